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
from dspark_jax.interop.deepspec import check_fit, load_config, load_drafter, save_drafter
from dspark_jax.interop.deepspec_config import config_of, fields_of
from dspark_jax.interop.huggingface import load_target, read_spec
from dspark_jax.ops.rope import LinearScaling, Llama3Scaling, RopeSpec

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


def test_one_block_equals_the_reference(target, drafter):
    """Every tensor in its place: context projection, both layers, both heads."""
    reference = np.load(DRAFTER / "draft_reference.npz")
    length = reference["context_ids"].shape[1]
    state = drafter.init_state(1, 32, jnp.float32)
    start = jnp.zeros(1, jnp.int32)
    state = drafter.extend(
        state, jnp.asarray(reference["context_hidden_states"]), jnp.asarray(reference["context_ids"]), start
    )
    anchor = jnp.asarray(reference["anchor_id"])[None]
    hidden, _ = drafter.cached_block(target.vocabulary, state, anchor, start + length)
    np.testing.assert_allclose(hidden, reference["block_hidden"], atol=2e-4)
    drafts = reference["greedy_draft_tokens"]
    previous = jnp.asarray(np.concatenate([np.asarray(anchor)[None], drafts[:, :-1]], axis=1))
    logits, confidence = drafter.head_logits(target.vocabulary, hidden, previous)
    np.testing.assert_allclose(logits, reference["corrected_logits"], atol=2e-4)
    np.testing.assert_allclose(confidence, reference["confidence_logits"], atol=2e-4)


class TestSave:
    def test_the_round_trip_is_the_identity(self, tmp_path, drafter, target, fields):
        save_drafter(tmp_path / "out", drafter, extra_config=fields, vocabulary=target.vocabulary)
        assert json.loads((tmp_path / "out/config.json").read_text()) == fields
        written, original = (load_file(d / "model.safetensors") for d in (tmp_path / "out", DRAFTER))
        assert written.keys() == original.keys()
        for name, tensor in original.items():
            assert written[name].dtype == tensor.dtype
            assert written[name].tobytes() == tensor.tobytes(), name

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
from dspark_jax.interop import deepspec

def half(tensors, path, metadata):
    Path(path).write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

drafter = deepspec.load_drafter(Path(sys.argv[1]))
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
        ("architectures", ["Qwen3Eagle3Model"], r"architectures \['Qwen3Eagle3Model'\] is not supported"),
        ("architectures", ["Gemma4DSparkModel"], r"supported: \['Qwen3DSparkModel'\]"),
        ("markov_head_type", "rnn", "markov_head_type 'rnn' is not supported; supported: 'vanilla'"),
        ("markov_rank", 0, "markov_rank 0 is not supported"),
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
