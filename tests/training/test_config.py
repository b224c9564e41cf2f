"""Configs are found by name, fit their targets, and refuse what cannot work."""

import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from dspark_jax.drafters.heads import VanillaMarkov
from dspark_jax.drafters.objective import LossWeights
from dspark_jax.interop.huggingface import read_spec
from dspark_jax.training import setup
from dspark_jax.training.config import FREE_ON_RESUME, TrainConfig, find_config
from dspark_jax.training.draft import DFlashShape, DSparkShape, Eagle3Shape, MtpShape, draft_config, spread_taps
from dspark_jax.training.optimizer import OptimizerConfig
from dspark_jax.training.overrides import apply_overrides, flatten
from dspark_jax.training.setup import find_target, prepare
from dspark_jax.training.sources import ChatFiles, PackedShards

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.py")))
def test_every_shipped_config_is_found_by_its_name(name):
    config = find_config(name, CONFIGS)
    assert isinstance(config, TrainConfig)
    assert find_config(str(CONFIGS / f"{name}.py"), Path("nowhere")) == config


def test_the_toy_needs_nothing_that_does_not_ship():
    spec = read_spec(find_target(find_config("tiny", CONFIGS).target))
    assert draft_config(find_config("tiny", CONFIGS).drafter, spec).layer.qk_norm


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"there is no config tinny in .*; the nearest are tiny"):
        find_config("tinny", CONFIGS)


def test_a_file_without_a_config_is_named(tmp_path):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match=r"empty\.py does not define `config`"):
        find_config("empty", tmp_path)


@pytest.mark.parametrize("field", ["batch_size", "sequence_length", "anchors", "epochs", "steps", "log_every"])
def test_sizes_are_at_least_one(small_config, field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1"):
        replace(small_config, **{field: 0})


def test_fields_that_may_change_on_resume_exist(small_config):
    assert set(flatten(small_config)) >= FREE_ON_RESUME
    assert "evaluation.every" in FREE_ON_RESUME
    assert not {"steps", "seed", "batch_size", "optimizer.learning_rate"} & FREE_ON_RESUME


def test_precision_is_a_dtype(small_config):
    assert replace(small_config, precision="bfloat16").dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("layers", "taps"), [(36, (1, 9, 17, 25, 33)), (30, (1, 8, 14, 20, 27)), (6, (1, 2, 3)), (2, (0,))]
)
def test_taps_spread_as_in_the_released_drafters(layers, taps):
    assert spread_taps(layers) == taps
    assert max(taps) < layers - 1


def test_a_drafter_takes_its_sizes_from_the_target(small_target):
    spec = read_spec(small_target)
    config = draft_config(DSparkShape(mask_token_id=3, ffw=8, num_layers=2), spec)
    assert (config.vocab_size, config.num_target_layers, config.tapped_layers) == (48, 2, (0,))
    assert (config.layer.d_model, config.layer.heads, config.layer.ffw) == (16, 4, 8)
    assert config.layer.qk_norm
    assert (config.block_size, config.markov_head) == (7, VanillaMarkov(rank=256))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"mask_token_id": 48}, "mask_token_id 48 is outside the vocabulary of 48"),
        ({"mask_token_id": 3, "tapped_layers": (1,)}, "last layer cannot be tapped"),
    ],
)
def test_a_drafter_that_cannot_be_served_is_refused_before_training(small_target, shape, message):
    with pytest.raises(ValueError, match=message):
        draft_config(DSparkShape(**shape), read_spec(small_target))


@pytest.mark.parametrize(
    "assignment",
    [
        "drafter.block_size=0",
        "drafter.num_layers=0",
        "drafter.markov_rank=-1",
        "drafter.ffw=0",
        "checkpoint.every=0",
        "checkpoint.keep=0",
        "fsdp=0",
        "tensor=-1",
    ],
)
def test_sizes_below_one_are_refused_by_name_before_anything_is_loaded(small_config, assignment):
    field = assignment.partition("=")[0]
    with pytest.raises(ValueError, match=rf"{re.escape(field)}.* must be at least 1"):
        apply_overrides(small_config, [assignment])


@pytest.mark.parametrize(
    "assignment",
    [
        *("seed=-1", f"seed={2**32}"),
        *("optimizer.learning_rate=0", "optimizer.learning_rate=-1e-3", "optimizer.clip=0", "optimizer.warmup=1"),
        *("optimizer.beta1=1", "optimizer.beta2=2", "optimizer.beta2=-0.1", "optimizer.weight_decay=-1"),
        *("optimizer.final=-0.1", "optimizer.final=1.5"),
        *("evaluation.temperatures=", "evaluation.temperatures=0,-1"),
        *("data.sequences=0", "data.prompt_tokens=0", "data.temperature=-1", "data.validation=0", "data.validation=1"),
        *("drafter.tapped_layers=", "drafter.tapped_layers=0,0"),
        *("drafter.loss.ce=-1", "drafter.loss.l1=-0.1", "drafter.loss.confidence=-1", "drafter.loss.decay=0"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(small_config, assignment):
    field = assignment.partition("=")[0]
    with pytest.raises(ValueError, match=re.escape(field)):
        apply_overrides(small_config, [assignment])


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ChatFiles(paths=()), "data.paths"),
        (lambda: ChatFiles(paths=("a",), validation=0.0), "data.validation"),
        (lambda: LossWeights(ce=0.0, l1=0.0), "drafter.loss.ce"),
        (lambda: DFlashShape(mask_token_id=3, decay=0.0), "drafter.decay"),
        (lambda: Eagle3Shape(step_decay=0.0), "drafter.step_decay"),
        (lambda: Eagle3Shape(tapped_layers=()), "drafter.tapped_layers"),
        (lambda: MtpShape(step_decay=-1.0), "drafter.step_decay"),
        (lambda: OptimizerConfig(learning_rate=float("nan")), "optimizer.learning_rate"),
    ],
)
def test_a_config_written_in_python_is_refused_alike(make, field):
    with pytest.raises(ValueError, match=re.escape(field)):
        make()


def test_packed_rows_are_chosen_by_the_start_of_their_name_and_cannot_be_unpacked(small_config):
    assert apply_overrides(small_config, ["data=packed", "data.path=there"]).data == PackedShards(path="there")
    with pytest.raises(ValueError, match="packing must be true"):
        apply_overrides(small_config, ["packing=false", "data=packed"])


def test_a_drafter_that_does_not_fit_is_refused_before_the_target_is_loaded(small_config, tmp_path, monkeypatch):
    monkeypatch.delattr(setup, "load_target")
    with pytest.raises(ValueError, match="last layer cannot be tapped"):
        prepare(apply_overrides(small_config, ["drafter.tapped_layers=1"]), tmp_path, print)


def test_lengths_past_the_target_are_refused(small_config, tmp_path):
    with pytest.raises(ValueError, match=r"sequence_length 60 and evaluation\.new_tokens 8 together pass .* 64"):
        prepare(replace(small_config, sequence_length=60), tmp_path, print)


def test_layouts_to_export_are_named_in_a_list(small_config):
    assert apply_overrides(small_config, ["export=deepspec,speculators"]).export == ("deepspec", "speculators")
    with pytest.raises(ValueError, match="export takes a comma-separated list of deepspec, speculators, not 'onnx'"):
        apply_overrides(small_config, ["export=onnx"])
