"""Drafters of the speculators package: read, over the whole vocabulary and part of it, and written."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.heads import GatedMarkov
from dspark_jax.drafters.mtp import Mtp, MtpConfig
from dspark_jax.interop.deepspec import save_drafter
from dspark_jax.interop.drafters import load_config, load_drafter
from dspark_jax.interop.huggingface import load_target
from dspark_jax.interop.speculators import save_speculators
from dspark_jax.interop.speculators_config import speculators_config
from dspark_jax.ops.sampling import SamplingLaw

GOLDEN = Path(__file__).parents[1] / "golden"
WHOLE = GOLDEN / "speculators/dspark_vanilla_qwen3"
REDUCED = GOLDEN / "speculators/dspark_vanilla_qwen3_v192"
DEEPSPEC = GOLDEN / "drafters/dspark_vanilla_qwen3"
VERIFIER = {"verifier": "qwen3_tiny", "verifier_architectures": ["Qwen3ForCausalLM"]}


@pytest.fixture(scope="module")
def target():
    return load_target(GOLDEN / "targets/qwen3_tiny")


@pytest.fixture
def copy(tmp_path):
    """copy(directory, nested, **fields): with fields of config.json changed, `None` of them taken out."""

    def make(directory, nested=None, **fields):
        to = tmp_path / "copy"
        shutil.copytree(directory, to, dirs_exist_ok=True)
        config = json.loads((to / "config.json").read_text())
        config["transformer_layer_config"].update(nested or {})
        config = {field: value for field, value in (config | fields).items() if value != "absent"}
        (to / "config.json").write_text(json.dumps(config))
        return to

    return make


def same(left, right):
    return jax.tree.structure(left) == jax.tree.structure(right) and jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), left, right)
    )


@pytest.mark.parametrize("directory", [WHOLE, REDUCED])
def test_teacher_forced_blocks_equal_the_packages(directory, target):
    reference = np.load(directory / "reference.npz")
    drafter = load_drafter(directory, target=target)
    block = drafter.block_size

    @jax.jit
    def run(drafter, vocabulary, tokens_BT, features_BTE, anchors_BA):
        hidden = drafter.training_blocks(vocabulary, tokens_BT, features_BTE, anchors_BA)
        return drafter.head_logits(vocabulary, hidden, tokens_BT[0][anchors_BA[..., None] + jnp.arange(block)])

    inputs = (reference["input_ids"], reference["target_hidden_states"], reference["anchor_positions"][None])
    logits, confidence = run(drafter, target.vocabulary, *map(jnp.asarray, inputs))
    drafted = np.flatnonzero(np.isfinite(logits[0, 0, 0]))
    assert len(drafted) == reference["draft_logits"].shape[-1]
    assert np.isneginf(np.delete(logits[0], drafted, axis=-1)).all()
    np.testing.assert_allclose(logits[0][..., drafted], reference["draft_logits"], atol=2e-4)
    np.testing.assert_allclose(confidence[0], reference["confidence_logits"], atol=2e-4)


def test_layer_ids_lose_the_one_that_the_package_adds():
    assert json.loads((WHOLE / "config.json").read_text())["aux_hidden_state_layer_ids"] == [1, 2, 3, 4, 5]
    assert load_config(WHOLE, load_target(GOLDEN / "targets/qwen3_tiny").spec).tapped_layers == (0, 1, 2, 3, 4)


def test_the_same_weights_make_the_same_drafter(target):
    assert same(load_drafter(WHOLE, target=target), load_drafter(DEEPSPEC, target=target))


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
def test_tokens_outside_a_reduced_vocabulary_are_never_drafted(target, temperature):
    drafter = load_drafter(REDUCED, jnp.bfloat16, target=target)
    law = SamplingLaw(
        temperature_B=jnp.full(2, temperature),
        top_k_B=jnp.asarray([0, 250]),
        top_p_B=jnp.asarray([1.0, 0.99]),
        keys_B=jax.random.split(jax.random.key(0), 2),
    )
    state = drafter.init_state(2, 16, jnp.bfloat16)
    propose = jax.jit(lambda *args: drafter.propose(*args, law)[0])
    proposal = propose(target.vocabulary, state, jnp.asarray([3, 4]), jnp.zeros(2, jnp.int32))
    outside = np.setdiff1d(np.arange(320), np.flatnonzero(load_file(REDUCED / "model.safetensors")["t2d"]))
    assert len(outside) == 128
    assert (np.asarray(proposal.probs_BKV)[..., outside] == 0).all()
    np.testing.assert_allclose(proposal.probs_BKV.sum(axis=-1), 1.0, atol=1e-5)
    assert not np.isin(proposal.tokens_BK, outside).any()


class TestReducedVocabularyMistakes:
    def edit(self, directory, change):
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    def test_maps_that_contradict_each_other(self, copy, target):
        directory = copy(REDUCED)
        self.edit(directory, lambda tensors: tensors["d2t"].__setitem__(-1, tensors["d2t"][-1] + 1))
        with pytest.raises(ValueError, match="d2t and t2d contradict each other"):
            load_drafter(directory, target=target)

    @pytest.mark.parametrize("name", ["d2t", "t2d", "lm_head.weight"])
    def test_a_missing_tensor(self, copy, target, name):
        directory = copy(REDUCED)
        self.edit(directory, lambda tensors: tensors.pop(name))
        with pytest.raises(ValueError, match=rf"missing the tensor {name}"):
            load_drafter(directory, target=target)

    def test_a_head_of_its_own(self, copy, target):
        """The target's head is used: one that was trained apart from it cannot be honoured."""
        directory = copy(REDUCED)
        self.edit(directory, lambda tensors: tensors["lm_head.weight"].__setitem__((0, 0), 9.0))
        with pytest.raises(ValueError, match=r"lm_head\.weight differs from the target's"):
            load_drafter(directory, target=target)

    def test_another_size_than_config_says(self, copy, target):
        with pytest.raises(ValueError, match=r"d2t has shape \[192\], config\.json needs \[191\]"):
            load_drafter(copy(REDUCED, draft_vocab_size=191), target=target)

    def test_it_is_not_written(self, tmp_path, target):
        drafter = load_drafter(REDUCED, target=target)
        with pytest.raises(ValueError, match="reduced vocabulary is read but not written"):
            save_speculators(tmp_path / "out", drafter, **VERIFIER)
        with pytest.raises(ValueError, match="reduced_vocabulary has no DeepSpec layout"):
            save_drafter(tmp_path / "out", drafter)


class TestSlotAlignment:
    """`sample_from_anchor`: whose token a slot predicts, and so how many are drafted."""

    @pytest.mark.parametrize(
        ("kind", "said", "itself", "drafts"),
        [("dspark", "absent", False, 5), ("dspark", False, True, 4), ("dflash", "absent", True, 4)],
    )
    def test_it_is_read(self, copy, target, kind, said, itself, drafts):
        config = load_config(copy(WHOLE, speculators_model_type=kind, sample_from_anchor=said), target.spec)
        assert (config.slot_predicts_itself, config.block_size, config.input_slots) == (itself, drafts, 5)
        assert (config.markov_head is None) == (kind == "dflash")
        assert config.confidence == (kind == "dspark")

    def test_it_is_written(self, tmp_path, target):
        base = load_config(DEEPSPEC)
        for headless, itself, kind in ((True, True, "dflash"), (True, False, "dspark"), (False, True, "dspark")):
            heads = {"markov_head": None, "confidence": False} if headless else {}
            config = replace(base, slot_predicts_itself=itself, **heads)
            module = DSpark(config, rngs=nnx.Rngs(0))
            save_speculators(tmp_path / "out", module, **VERIFIER)
            fields = json.loads((tmp_path / "out/config.json").read_text())
            assert (fields["speculators_model_type"], fields["sample_from_anchor"]) == (kind, not itself)
            assert fields["block_size"] == 5 + itself
            assert fields["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
            assert same(load_drafter(tmp_path / "out", target=target), module)


class TestWriting:
    def test_the_files_of_the_package(self, tmp_path, target):
        """Tensors byte for byte; every field that the package writes and is not a default of another kind."""
        target_config = json.loads((GOLDEN / "targets/qwen3_tiny/config.json").read_text())
        save_speculators(tmp_path / "out", load_drafter(DEEPSPEC), target_config=target_config, **VERIFIER)
        written, original = (load_file(d / "model.safetensors") for d in (tmp_path / "out", WHOLE))
        assert {name: tensor.tobytes() for name, tensor in written.items()} == {
            name: tensor.tobytes() for name, tensor in original.items()
        }
        ours, theirs = (json.loads((d / "config.json").read_text()) for d in (tmp_path / "out", WHOLE))
        layer, their_layer = ours.pop("transformer_layer_config"), theirs.pop("transformer_layer_config")
        assert ours == {field: value for field, value in theirs.items() if field in ours}
        assert theirs.keys() - ours.keys() == {"auto_map", "transformers_version"}
        ids = ("bos_token_id", "eos_token_id")
        assert {f: v for f, v in layer.items() if f not in ids} == {
            f: v for f, v in their_layer.items() if f in layer and f not in ids
        }
        assert their_layer.keys() - layer.keys() == {"max_window_layers", "pad_token_id", "use_cache"}

    def test_a_richer_head_comes_back(self, tmp_path, target):
        config = replace(load_config(DEEPSPEC), markov_head=GatedMarkov(rank=3), confidence_with_markov=False)
        module = DSpark(config, rngs=nnx.Rngs(0))
        save_speculators(tmp_path / "out", module, **VERIFIER)
        assert same(load_drafter(tmp_path / "out", target=target), module)

    def test_what_the_package_has_no_model_for(self, tmp_path):
        with pytest.raises(ValueError, match="only drafters with Qwen3's layer can be written"):
            save_speculators(tmp_path / "out", load_drafter(GOLDEN / "drafters/dspark_vanilla_gemma4"), **VERIFIER)
        assert not (tmp_path / "out").exists()


class TestChains:
    """Eagle3 and MTP: written, read back, and what of the package's variants is refused."""

    @pytest.fixture
    def eagle3(self, tmp_path, target):
        module = load_drafter(GOLDEN / "drafters/eagle3_qwen3", target=target)
        save_speculators(tmp_path / "eagle3", module, vocabulary=target.vocabulary, **VERIFIER)
        return tmp_path / "eagle3", module

    @pytest.fixture
    def mtp(self, tmp_path, eagle3):
        config = MtpConfig(vocab_size=320, layer=eagle3[1].config.layer, num_target_layers=6)
        module = Mtp(config, rngs=nnx.Rngs(0))
        save_speculators(tmp_path / "mtp", module, **VERIFIER)
        return tmp_path / "mtp", module

    def test_eagle3_comes_back(self, eagle3, target):
        directory, module = eagle3
        again = load_drafter(directory, target=target)
        assert again.config == module.config
        assert same(again, module)
        fields = json.loads((directory / "config.json").read_text())
        assert fields["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3, 4, 5]
        assert {"embed_tokens.weight", "lm_head.weight"} < load_file(directory / "model.safetensors").keys()

    def test_mtp_comes_back_and_says_how_many_layers_its_target_has(self, mtp):
        directory, module = mtp
        again = load_drafter(directory)
        assert again.config == module.config
        assert same(again, module)
        assert all(name.startswith("mtp_layers.0.") for name in load_file(directory / "model.safetensors"))

    def test_eagle3_needs_the_target(self, tmp_path, eagle3):
        with pytest.raises(ValueError, match="holds the target's embedding and LM head: give the target"):
            save_speculators(tmp_path / "out", eagle3[1], **VERIFIER)

    def test_mtp_of_several_tokens_is_not_written(self, tmp_path, mtp):
        module = Mtp(replace(mtp[1].config, block_size=2), rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="MTP drafter of 2 tokens cannot be written, only of 1"):
            save_speculators(tmp_path / "out", module, **VERIFIER)

    @pytest.mark.parametrize(
        ("fields", "nested", "message"),
        [
            ({"norm_before_residual": True}, {}, "norm_before_residual True is not supported; supported: False"),
            ({"draft_vocab_size": 192}, {}, "draft_vocab_size 192 is not supported; supported: 320"),
            ({}, {"num_hidden_layers": 2}, "transformer_layer_config.num_hidden_layers 2 is not supported"),
            ({"eagle_aux_hidden_state_layer_ids": "absent"}, {}, "eagle_aux_hidden_state_layer_ids is missing"),
        ],
    )
    def test_another_eagle3_is_refused_by_name(self, eagle3, copy, target, fields, nested, message):
        with pytest.raises(ValueError, match=message):
            load_drafter(copy(eagle3[0], nested, **fields), target=target)

    def test_another_mtp_is_refused_by_name(self, mtp, copy):
        proposal = json.loads((mtp[0] / "config.json").read_text())["speculators_config"]
        proposal["proposal_methods"][0]["speculative_tokens"] = 3
        with pytest.raises(ValueError, match="speculative_tokens 3 of an MTP drafter is not supported; supported: 1"):
            load_drafter(copy(mtp[0], speculators_config=proposal))

    def test_a_tensor_without_a_place_is_named(self, mtp):
        directory, _ = mtp
        tensors = load_file(directory / "model.safetensors")
        save_file(tensors | {"other.weight": np.zeros(2, np.float32)}, directory / "model.safetensors")
        with pytest.raises(ValueError, match=r"without a place .*: other\.weight"):
            load_drafter(directory)


@pytest.mark.parametrize(
    ("fields", "nested", "message"),
    [
        ({"speculators_model_type": "dflash2"}, {}, "speculators_model_type 'dflash2' is not supported"),
        ({"speculators_model_type": "peagle"}, {}, "supported: 'dspark', 'dflash', 'eagle3', 'mtp'"),
        ({"target_hidden_size": 128}, {}, "target_hidden_size 128 is not supported"),
        ({"draft_vocab_size": 321}, {}, "draft_vocab_size 321 is more than the vocabulary of 320"),
        ({"mask_token_id": "absent"}, {}, "the field mask_token_id is missing"),
        ({}, {"model_type": "gpt_oss"}, "transformer_layer_config.model_type 'gpt_oss' is not supported"),
        ({}, {"layer_types": ["sliding_attention"] * 2}, "layer_types .* is not supported"),
        (
            {"markov_head_type": "rnn", "sample_from_anchor": False},
            {},
            "'rnn' is not supported with sample",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(copy, target, fields, nested, message):
    directory = copy(WHOLE, nested, **fields)
    with pytest.raises(ValueError, match=message) as caught:
        load_drafter(directory, target=target)
    assert str(directory / "config.json") in str(caught.value)


def test_without_a_target_the_number_of_its_layers_is_asked_for():
    with pytest.raises(ValueError, match=r"num_target_layers is missing .*: give the target"):
        load_config(WHOLE)


def test_defaults_are_those_of_the_package():
    fields = json.loads((WHOLE / "config.json").read_text())
    for field in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"):
        del fields[field]
    config = speculators_config(fields, lambda: 6)
    assert (config.markov_rank, config.confidence, config.confidence_with_markov) == (256, True, True)
