"""DeepSpec's drafter directories, read and written."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.eagle3 import Eagle3, Eagle3Config
from dspark_jax.drafters.mtp import Mtp, MtpConfig
from dspark_jax.interop.deepspec import save_drafter
from dspark_jax.interop.deepspec_config import config_of, fields_of
from dspark_jax.interop.drafters import check_fit, load_config, load_drafter
from dspark_jax.interop.huggingface import load_target, read_spec
from dspark_jax.ops.rope import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling
from dspark_jax.ops.sampling import SamplingLaw

ROOT = Path(__file__).parents[2]
DRAFTER = ROOT / "tests/golden/drafters/dspark_vanilla_llama"
TARGET = ROOT / "tests/golden/targets/llama_tiny"


@pytest.fixture(scope="module")
def target():
    return load_target(TARGET)


@pytest.fixture(scope="module")
def drafter():
    return load_drafter(DRAFTER)


@pytest.fixture
def fields():
    return json.loads((DRAFTER / "config.json").read_text())


@pytest.fixture
def copy(tmp_path):
    directory = tmp_path / "drafter"
    shutil.copytree(DRAFTER, directory)
    return directory


def edit_config(directory, **fields):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_tensors(directory, edit):
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_config(drafter):
    config = drafter.config
    assert (config.block_size, config.num_layers, config.markov_rank) == (5, 2, 16)
    assert (config.tapped_layers, config.num_target_layers, config.mask_token_id) == ((0, 1, 2, 3, 4), 6, 319)
    assert config.confidence
    assert config.confidence_with_markov
    assert config.layer.qk_norm
    assert config.layer.rope == RopeSpec(theta=10_000.0)


NAMES = ["dspark_vanilla_llama", "dspark_vanilla_qwen3", "dspark_gated_qwen3", "dspark_rnn_qwen3", "dflash_qwen3"]
NAMES += ["eagle3_qwen3", "dspark_vanilla_gemma4", "dflash_gemma4"]


@pytest.fixture(scope="module", params=NAMES)
def golden(request):
    """(directory, drafter, target) of every kind of drafter in the parity files."""
    directory = ROOT / "tests/golden/drafters" / request.param
    target = load_target(ROOT / "tests/golden/targets" / f"{request.param.rpartition('_')[2]}_tiny")
    return directory, load_drafter(directory, target=target), target


def test_one_step_equals_the_reference(golden):
    """Every tensor in its place; wrong conditioning shows at once."""
    directory, drafter, target = golden
    reference = dict(np.load(directory / "draft_reference.npz"))
    anchor = jnp.asarray(reference["anchor_id"]).reshape(1)
    ids = jnp.asarray(reference["context_ids"])
    features = jnp.asarray(reference["context_hidden_states"])
    start = jnp.asarray([ids.shape[1]])
    law = SamplingLaw(
        temperature_B=jnp.zeros(1),
        top_k_B=jnp.zeros(1, jnp.int32),
        top_p_B=jnp.ones(1),
        keys_B=jax.random.split(jax.random.key(0), 1),
    )

    @jax.jit
    def run(drafter, vocabulary):
        state = drafter.init_state(1, 32, jnp.float32)
        following = jnp.concatenate([ids[:, 1:], anchor[None]], axis=1)
        state = drafter.extend(state, vocabulary, features, following, jnp.zeros(1, jnp.int32), start)
        return drafter.propose(vocabulary, state, anchor, start, law)[0]

    proposal = run(drafter, target.vocabulary)
    np.testing.assert_array_equal(proposal.tokens_BK, reference["greedy_draft_tokens"])
    confidence = jax.nn.sigmoid(reference["confidence_logits"]) if "confidence_logits" in reference else 1.0
    np.testing.assert_allclose(jax.nn.sigmoid(proposal.logit_BK), confidence, atol=2e-4)


def test_d_08_every_kind_comes_back_as_it_was(tmp_path, golden):
    """Tensors byte for byte (each is used, none is made up), fields of config.json equal."""
    directory, drafter, target = golden
    fields = json.loads((directory / "config.json").read_text())
    save_drafter(tmp_path / "out", drafter, extra_config=fields, vocabulary=target.vocabulary)
    assert json.loads((tmp_path / "out/config.json").read_text()) == fields
    written, original = (load_file(d / "model.safetensors") for d in (tmp_path / "out", directory))
    assert written.keys() == original.keys()
    for name, tensor in original.items():
        assert written[name].dtype == tensor.dtype
        assert written[name].tobytes() == tensor.tobytes(), name


def test_every_kind_is_written_under_its_targets_fields(tmp_path, golden):
    """As training does: the target's config.json, no copies of its vocabulary."""
    _, drafter, target = golden
    name = f"{target.spec.family}_tiny".replace("gemma4", "gemma4_unified")
    extra = json.loads((ROOT / "tests/golden/targets" / name / "config.json").read_text())
    save_drafter(tmp_path / "out", drafter, extra_config=extra)
    again = load_drafter(tmp_path / "out", target=target)
    assert again.config == drafter.config
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, drafter))
    assert "text_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_an_mtp_drafter_comes_back(tmp_path, family, golden_layer):
    config = MtpConfig(vocab_size=320, layer=golden_layer(family), num_target_layers=6, block_size=2, step_decay=0.7)
    module = Mtp(config, rngs=nnx.Rngs(0))
    save_drafter(tmp_path / "out", module)
    again = load_drafter(tmp_path / "out", target=load_target(ROOT / "tests/golden/targets" / f"{family}_tiny"))
    assert isinstance(again, Mtp)
    assert again.config == config
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, module))
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight"} <= load_file(tmp_path / "out/model.safetensors").keys()


def test_a_gemma_eagle3_comes_back(tmp_path, golden_layer):
    config = Eagle3Config(vocab_size=320, layer=golden_layer("gemma4"), num_target_layers=6, tapped_layers=(0, 3))
    module = Eagle3(config, rngs=nnx.Rngs(0))
    save_drafter(tmp_path / "out", module)
    assert load_config(tmp_path / "out") == config
    again = load_drafter(tmp_path / "out")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, module))


@pytest.fixture
def golden_layer():
    """golden_layer(family): a drafter's layer for that family."""

    def layer(family):
        name = f"dspark_vanilla_{family}"
        return load_config(ROOT / "tests/golden/drafters" / name).layer

    return layer


class TestSave:
    def test_the_drafter_is_saved_without_the_targets_vocabulary(self, tmp_path, drafter):
        save_drafter(tmp_path / "out", drafter)
        assert not {"embed_tokens.weight", "lm_head.weight"} & load_file(tmp_path / "out/model.safetensors").keys()
        again = load_drafter(tmp_path / "out")
        assert again.config == drafter.config
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, drafter))

    def test_a_type_can_be_asked_for(self, tmp_path, drafter):
        save_drafter(tmp_path / "out", drafter, dtype=jnp.bfloat16)
        assert load_file(tmp_path / "out/model.safetensors")["fc.weight"].dtype == jnp.bfloat16
        assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"

    def test_the_drafters_own_fields_win_over_the_targets(self, tmp_path, drafter):
        extra = json.loads((TARGET / "config.json").read_text()) | {"rope_theta": 5.0, "max_position_embeddings": 99}
        save_drafter(tmp_path / "out", drafter, extra_config=extra)
        assert load_config(tmp_path / "out") == drafter.config
        written = json.loads((tmp_path / "out/config.json").read_text())
        assert written["max_position_embeddings"] == 99
        assert "rope_theta" not in written

    def test_a_process_killed_while_saving_leaves_the_old_drafter(self, copy):
        program = """
import os, signal, sys
from pathlib import Path
from dspark_jax.interop import deepspec, drafters

def half(tensors, path, metadata):
    Path(path).write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

drafter = drafters.load_drafter(Path(sys.argv[1]))
deepspec.save_file = half
deepspec.save_drafter(Path(sys.argv[1]), drafter)
"""
        for name in ("train_reference.npz", "draft_reference.npz", "decode_reference.json"):
            (copy / name).unlink()
        before = {file.name: file.read_bytes() for file in copy.iterdir()}
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        killed = subprocess.run(
            [sys.executable, "-c", program, str(copy)], cwd=ROOT, env=environment, capture_output=True, check=False
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
        assert {file.name: file.read_bytes() for file in copy.iterdir()} == before

    def test_layers_without_qk_norms_have_no_layout(self, drafter):
        config = replace(drafter.config, layer=replace(drafter.config.layer, qk_norm=False))
        with pytest.raises(ValueError, match="without q/k norms has no DeepSpec layout"):
            fields_of(config, {})


@pytest.mark.parametrize("confidence", [True, False])
@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize(
    "rope",
    [
        RopeSpec(theta=5e5),
        RopeSpec(theta=1e6, scaling=LinearScaling(factor=4.0)),
        RopeSpec(scaling=YarnScaling(factor=4.0, original_max_len=512, attention_factor=1.5, truncate=False)),
        RopeSpec(scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192)),
    ],
)
def test_every_field_survives_the_round_trip(tmp_path, drafter, confidence, with_markov, rope):
    config = replace(
        drafter.config,
        layer=replace(drafter.config.layer, rope=rope, head_dim=8, norm_eps=1e-6),
        confidence=confidence,
        confidence_with_markov=with_markov,
        block_size=7,
        tapped_layers=(-1, 4, 2),
        num_layers=1,
    )
    assert config_of(json.loads(json.dumps(fields_of(config, {})))) == config
    module = DSpark(config, rngs=nnx.Rngs(0))
    save_drafter(tmp_path / "out", module)
    again = load_drafter(tmp_path / "out")
    assert jax.tree.structure(again) == jax.tree.structure(module)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, module))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("architectures", ["Qwen4DSparkModel"], r"architectures \['Qwen4DSparkModel'\] is not .* Qwen3DSparkModel"),
        ("architectures", ["Qwen3Eagle3Model"], r"num_hidden_layers 2 is not supported; supported: 1"),
        ("markov_head_type", "gru", "markov_head_type 'gru' is not supported; supported: vanilla, gated, rnn"),
        ("markov_rank", 0, "confidence_with_markov needs a Markov head"),
        ("hidden_act", "gelu", "hidden_act 'gelu' is not supported"),
        ("layer_types", ["full_attention", "sliding_attention"], "layer_types .* is not supported"),
        ("target_layer_ids", [0, 5], "its last layer cannot be tapped"),
        ("mask_token_id", 320, "mask_token_id 320"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(copy, field, value, message):
    edit_config(copy, **{field: value})
    with pytest.raises(ValueError, match=message) as caught:
        load_drafter(copy)
    assert str(copy / "config.json") in str(caught.value)


def test_a_missing_field_is_named(copy, fields):
    del fields["block_size"]
    (copy / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"config\.json: the field block_size is missing"):
        load_drafter(copy)


@pytest.mark.parametrize("size", [0, -1, 7.5, "7", True])
def test_a_block_size_that_is_no_size_is_named(copy, fields, size):
    (copy / "config.json").write_text(json.dumps(fields | {"block_size": size}))
    with pytest.raises(ValueError, match=r"config\.json: block_size .* is not supported"):
        load_drafter(copy)


class TestFit:
    def test_its_own_target(self, target):
        load_drafter(DRAFTER, target=target)

    def test_without_copies_of_the_vocabulary(self, copy, target):
        edit_tensors(copy, lambda tensors: [tensors.pop(name) for name in ("embed_tokens.weight", "lm_head.weight")])
        load_drafter(copy, target=target)

    @pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
    def test_the_vocabulary_of_another_target(self, copy, target, name):
        edit_tensors(copy, lambda tensors: tensors[name].__setitem__((7, 7), 99.0))
        load_drafter(copy)
        with pytest.raises(ValueError, match=f"{name} differs from the target's"):
            load_drafter(copy, target=target)

    def test_copies_in_a_narrower_type_are_the_same_vocabulary(self, copy, target):
        def narrow(tensors):
            for name, tensor in tensors.items():
                tensors[name] = tensor.astype(jnp.bfloat16)

        edit_tensors(copy, narrow)
        load_drafter(copy, target=target)
        load_drafter(DRAFTER, target=load_target(TARGET, jnp.bfloat16))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"vocab_size": 400}, "its vocab_size is 400, the target has 320"),
            ({"num_target_layers": 7}, "its num_target_layers is 7, the target has 6"),
            ({"num_target_layers": 9, "tapped_layers": (1, 6)}, "num_target_layers is 9"),
        ],
    )
    def test_what_does_not_fit_is_named(self, drafter, changes, message):
        with pytest.raises(ValueError, match=message):
            check_fit(replace(drafter.config, **changes), read_spec(TARGET))

    def test_another_width(self, drafter):
        config = replace(drafter.config, layer=replace(drafter.config.layer, d_model=72))
        with pytest.raises(ValueError, match="its hidden_size is 72, the target has 64"):
            check_fit(config, read_spec(TARGET))


def test_a_gemma_drafter_under_a_target_in_the_new_spelling(tmp_path, golden_layer):
    """What a target's per_layer_config says of its layers 0 and 1 is not said of the drafter's."""
    extra = json.loads((ROOT / "tests/golden/targets/gemma4_tiny/config.json").read_text())
    sizes = {"head_dim": extra.pop("global_head_dim"), "num_key_value_heads": extra.pop("num_global_key_value_heads")}
    extra["per_layer_config"] = {"0": {"head_dim": 8}, "2": sizes}
    config = load_config(ROOT / "tests/golden/drafters/dspark_vanilla_gemma4")
    written = json.loads(json.dumps(fields_of(config, extra)))
    assert config_of(written) == config
    # Nor where another tool has kept the field.
    assert config_of(written | {"per_layer_config": extra["per_layer_config"]}) == config
