"""Targets by name and by directory, against the reference implementation's numbers."""

import json
import shutil
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.numpy import load_file, save_file

from dspark_jax.data.tokenizer import load_tokenizer
from dspark_jax.interop import huggingface
from dspark_jax.interop.huggingface import load_target, read_spec, resolve, stop_ids

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = GOLDEN / "targets" / "llama_tiny"


@pytest.fixture
def copy(tmp_path):
    """A copy of the tiny target and a function that edits its config.json."""
    directory = tmp_path / "tiny"
    shutil.copytree(TINY, directory)

    def edit(**fields):
        config = json.loads((directory / "config.json").read_text())
        config.update(fields)
        config = {field: value for field, value in config.items() if value != "absent"}
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return edit


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma4"])
def test_tiny_targets_equal_the_reference(family):
    directory = GOLDEN / "targets" / f"{family}_tiny"
    reference = np.load(directory / "reference.npz")
    layers = tuple(reference["layer_ids"].tolist())

    @jax.jit
    def run(target, tokens):
        output = target.encode(tokens, layers)
        return output.features_BTE, output.hidden_BTD, target.vocabulary.logits(output.hidden_BTD)

    features, hidden, logits = run(load_target(directory), jnp.asarray(reference["input_ids"]))
    np.testing.assert_allclose(
        features.reshape(reference["hidden_states"].shape), reference["hidden_states"], atol=2e-4
    )
    np.testing.assert_allclose(hidden, reference["last_hidden_state"], atol=2e-4)
    np.testing.assert_allclose(logits, reference["logits"], atol=2e-4)


class TestWrappedGemma:
    """A text model inside a multimodal checkpoint: `text_config`, prefixed names, towers beside it."""

    WRAPPED = GOLDEN / "targets" / "gemma4_unified_tiny"

    def test_it_is_the_bare_model(self):
        bare, wrapped = load_target(GOLDEN / "targets" / "gemma4_tiny"), load_target(self.WRAPPED)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), bare, wrapped))
        tokens = jnp.asarray(np.load(self.WRAPPED / "reference.npz")["input_ids"])
        logits = jax.jit(lambda target: target.vocabulary.logits(target.encode(tokens, ()).hidden_BTD))(wrapped)
        np.testing.assert_allclose(logits, np.load(self.WRAPPED / "reference.npz")["logits"], atol=2e-4)

    @pytest.mark.parametrize(
        "architecture", ["Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"]
    )
    def test_towers_are_left_out_and_said_to_be(self, tmp_path, architecture):
        directory = self.with_tensors(tmp_path, architecture, "model.vision_tower.x", "model.embed_audio.y")
        said = []
        load_target(directory, say=said.append)
        assert len(said) == 1
        assert "model.vision_tower (1 tensors), model.embed_audio (1 tensors)" in said[0]

    def test_anything_else_is_refused(self, tmp_path):
        directory = self.with_tensors(tmp_path, "Gemma4ForConditionalGeneration", "model.language_model.extra")
        with pytest.raises(ValueError, match=r"1 tensor without a place .*model\.language_model\.extra"):
            load_target(directory)

    def test_the_end_of_an_answer_is_in_the_text_config(self, tmp_path):
        directory = self.with_tensors(tmp_path, "Gemma4ForConditionalGeneration")
        assert stop_ids(directory) == {1}

    def with_tensors(self, directory, architecture, *names):
        config = json.loads((self.WRAPPED / "config.json").read_text()) | {"architectures": [architecture]}
        (directory / "config.json").write_text(json.dumps(config))
        tensors = load_file(self.WRAPPED / "model.safetensors") | dict.fromkeys(names, np.zeros(3, np.float32))
        save_file(tensors, directory / "model.safetensors")
        return directory


@pytest.mark.slow  # Like tests/targets/test_smollm2_parity.py, from the download on.
def test_smollm2_equals_the_reference(smollm2):
    reference = np.load(GOLDEN / "smollm2" / "reference.npz")
    prompts = [reference[f"input_ids_{i}"] for i in range(4)]
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens_BT = np.stack([np.pad(prompt, (0, lengths.max() - len(prompt))) for prompt in prompts])
    layers = tuple(reference["layers"].tolist())

    @jax.jit
    def run(target):
        output = target.encode(jnp.asarray(tokens_BT), layers)
        last_BD = output.hidden_BTD[jnp.arange(4), lengths - 1]
        return target.vocabulary.logits(last_BD), output.features_BTE[0]

    logits_BV, features_TE = run(load_target(smollm2))
    for i in range(4):
        np.testing.assert_allclose(logits_BV[i], reference[f"bf16w_last_logits_{i}"], atol=1e-3)
    for layer, hidden_TD in zip(layers, np.split(features_TE, len(layers), axis=-1), strict=True):
        expected = reference[f"bf16w_hidden_{layer}_0"]
        # Position 0 carries a massive activation (near 24,900), so its float32 sums are coarser.
        np.testing.assert_allclose(hidden_TD[0], expected[0], rtol=1e-5, atol=0.05)
        np.testing.assert_allclose(hidden_TD[1 : len(expected)], expected[1:], rtol=1e-5, atol=1e-3)


def test_smollm2_tokenizes_as_the_reference(smollm2):
    reference = np.load(GOLDEN / "smollm2" / "reference.npz")
    tokenizer = load_tokenizer(smollm2)
    for i in range(4):
        ids = reference[f"input_ids_{i}"].tolist()
        assert tokenizer.encode(str(reference[f"text_{i}"])) == ids
        assert tokenizer.encode_chat([{"role": "user", "content": str(reference["prompts"][i])}]) == ids
    assert stop_ids(smollm2) == {0, 2}
    assert tokenizer.vocab_size == read_spec(smollm2).vocab_size == 49_152


def test_weights_are_cast_to_the_type_that_is_asked_for():
    wide, narrow = load_target(TINY), load_target(TINY, jnp.bfloat16)
    for left, right in zip(jax.tree.leaves(wide), jax.tree.leaves(narrow), strict=True):
        assert left.dtype == jnp.float32
        assert right.dtype == jnp.bfloat16
        assert (left.astype(jnp.bfloat16) == right).all()


def test_an_untied_head_is_read(copy):
    directory = copy(tie_word_embeddings=False)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    save_file(tensors, directory / "model.safetensors")
    vocabulary = load_target(directory).vocabulary
    np.testing.assert_array_equal(vocabulary.head[...], tensors["lm_head.weight"].T)
    np.testing.assert_array_equal(vocabulary.embedding[...], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"architectures \['MambaForCausalLM'\] is not .* LlamaForCausalLM"),
        ({"architectures": "absent"}, "architectures None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config 'awq' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type 'dynamic' is not supported"),
        ({"hidden_size": "absent"}, "the field hidden_size is missing"),
        ({"num_hidden_layers": 5}, "9 tensors without a place"),
        ({"num_hidden_layers": 7}, "missing 9 tensors"),
        ({"intermediate_size": 161}, r"down_proj\.weight has shape \[64, 160\], config\.json needs \[64, 161\]"),
        ({"tie_word_embeddings": False}, r"missing 1 tensor .*lm_head\.weight \(vocabulary\.head\)"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_directory(copy, fields, message):
    directory = copy(**fields)
    with pytest.raises(ValueError, match=message) as caught:
        load_target(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("generation", "expected"), [([2, 0], {0, 2}), (7, {7}), (None, {1})])
def test_stop_ids(copy, generation, expected):
    directory = copy()
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert stop_ids(directory) == expected


def test_no_stop_ids_anywhere(copy):
    directory = copy(eos_token_id=None)
    (directory / "generation_config.json").unlink()
    assert stop_ids(directory) == frozenset()


class TestResolve:
    def test_a_directory_is_itself(self, tmp_path):
        assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path

    @pytest.mark.parametrize("name", ["smollm2_135m", "HuggingFaceTB/SmolLM2-135M-Instruct"])
    def test_the_default_targets_names(self, monkeypatch, tmp_path, name):
        """Also where a directory happens to carry the name, as the results of a training run do."""
        (tmp_path / name).mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(huggingface, "default_target", lambda: Path("/made"))
        assert resolve(name) == Path("/made")

    def test_a_repository_is_fetched_without_other_formats(self, monkeypatch, tmp_path):
        calls = []

        def fetch(name, allow_patterns):
            calls.append((name, allow_patterns))
            return str(tmp_path)

        monkeypatch.setattr(huggingface, "snapshot_download", fetch)
        assert resolve("owner/model") == resolve("owner/model", weights=False) == tmp_path
        few = ["*.json", "*.jinja"]
        assert calls == [("owner/model", ["*.safetensors", *few]), ("owner/model", few)]

    def test_a_mistyped_path_is_no_repository(self):
        with pytest.raises(FileNotFoundError, match=r"\./no/such/place: there is no such directory"):
            resolve("./no/such/place")

    @pytest.mark.parametrize(
        ("error", "kind", "message"),
        [
            (GatedRepoError, PermissionError, "accept the terms on its Hub page"),
            (RepositoryNotFoundError, FileNotFoundError, "no such public model on the Hub"),
            (LocalEntryNotFoundError, ConnectionError, "the Hub cannot be reached"),
            (ConnectionError, ConnectionError, "the Hub cannot be reached"),
        ],
    )
    def test_the_hubs_refusals_are_one_sentence(self, monkeypatch, error, kind, message):
        def fail(name, allow_patterns):
            if issubclass(error, RepositoryNotFoundError):
                request = httpx.Request("GET", "https://huggingface.co")
                raise error("first line\nsecond line", response=httpx.Response(404, request=request))
            raise error("first line\nsecond line")

        monkeypatch.setattr(huggingface, "snapshot_download", fail)
        with pytest.raises(kind, match=message) as caught:
            resolve("owner/model")
        assert str(caught.value).startswith("owner/model: ")
        assert "\n" not in str(caught.value)
