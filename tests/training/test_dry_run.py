"""A dry run describes every config from shapes alone: released recipes, known sizes, no network."""

from dataclasses import replace
from pathlib import Path

import pytest

from dspark_jax.drafters.heads import GatedMarkov, RnnMarkov, VanillaMarkov
from dspark_jax.training import setup
from dspark_jax.training.config import find_config
from dspark_jax.training.draft import DFlashShape, DSparkShape, Eagle3Shape, MtpShape, draft_config
from dspark_jax.training.dry_run import dry_run
from dspark_jax.training.known_targets import target_facts
from dspark_jax.training.optimizer import OptimizerConfig
from dspark_jax.training.plan import plan_run
from dspark_jax.training.sources import PackedShards
from dspark_jax.training.topology import ACCELERATORS, parse_topology

CONFIGS = Path(__file__).parents[2] / "configs"
TARGETS = ("qwen3_4b", "qwen3_8b", "qwen3_14b", "gemma4_12b")
SHAPES = {"": DSparkShape, "dflash_": DFlashShape, "eagle3_": Eagle3Shape, "mtp_": MtpShape}


def config_of(name: str):
    return find_config(name, CONFIGS)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Whoever asks for a target's files fails."""

    def refuse(*arguments, **options):
        raise AssertionError("a dry run downloads nothing")

    monkeypatch.setattr(setup, "resolve", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.py")))
def test_every_config_is_described(name):
    said = []
    dry_run(config_of(name), None, said.append)
    text = "\n".join(said)
    for part in ("Config", "Parameters", "Sharding on ", "Memory of a device", "To be fetched", "an estimate"):
        assert part in text
    assert "drafter, trainable" in text
    # Some machine of the list is large enough for the released recipe as it is.
    assert "GB: fits" in text
    assert ("Hugging Face Hub" in text) == (name.split("_", 1)[-1] not in ("tiny", "135m") and name != "tiny")


def test_packed_rows_are_looked_for(tmp_path):
    for path, found in ((tmp_path, "is on this machine"), (tmp_path / "none", "is not here and has no download")):
        said = []
        dry_run(replace(config_of("tiny"), data=PackedShards(path=str(path))), None, said.append)
        assert f"  data: nothing, {path} {found}" in "\n".join(said)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("prefix", SHAPES)
def test_released_recipes(prefix, target):
    config = config_of(prefix + target)
    assert type(config.drafter) is SHAPES[prefix]
    sizes = (config.sequence_length, config.anchors, config.batch_size, config.epochs, config.steps)
    assert sizes == (4096, 512, 512, 10, None)
    assert config.precision == "bfloat16"
    optimizer = OptimizerConfig(learning_rate=6e-4, warmup=0.04, final=0.0, clip=1.0)
    assert config.optimizer == optimizer
    drafter = draft_config(config.drafter, target_facts(config.target).spec)
    taps = {
        "qwen3_4b": (1, 9, 17, 25, 33),
        "qwen3_8b": (1, 9, 17, 25, 33),
        "qwen3_14b": (1, 10, 19, 28, 37),
        "gemma4_12b": (5, 17, 29, 41, 46),
    }[target]
    assert prefix == "mtp_" or drafter.tapped_layers == taps
    assert drafter.block_size == (1 if prefix == "mtp_" else 7)
    if prefix in ("", "dflash_"):
        assert drafter.num_layers == 5
        assert drafter.mask_token_id == (4 if target == "gemma4_12b" else 151669)
        assert drafter.markov_head == (VanillaMarkov(rank=256) if prefix == "" else None)
        assert drafter.confidence == (prefix == "")


def test_the_other_heads():
    assert config_of("dspark_rnn_qwen3_4b").drafter.markov_head == RnnMarkov(rank=256)
    assert config_of("dspark_gated_qwen3_4b").drafter.markov_head == GatedMarkov(rank=256)
    base = config_of("qwen3_4b")
    for name in ("dspark_rnn_qwen3_4b", "dspark_gated_qwen3_4b"):
        other = config_of(name)
        assert replace(other, drafter=replace(other.drafter, markov_head=VanillaMarkov())) == base


@pytest.mark.parametrize(
    ("target", "parameters"),
    # As the model cards count them: 4.0, 8.2 and 14.8 billion; 11.95 with Gemma's image and audio embedders.
    [("qwen3_4b", 4_022_468_096), ("qwen3_8b", 8_190_735_360), ("qwen3_14b", 14_768_307_200), ("gemma4_12b", 11.907e9)],
)
def test_known_sizes_of_known_targets(target, parameters):
    config = config_of(target)
    plan = plan_run(config, target_facts(config.target).spec, parse_topology("v5e:8x8"))
    assert plan.target_parameters == pytest.approx(parameters, rel=1e-3 if target == "gemma4_12b" else 0)


def test_a_device_holds_its_share():
    config = replace(config_of("qwen3_4b"), accumulate=1)
    spec = target_facts(config.target).spec
    whole = plan_run(replace(config, fsdp=1), spec, parse_topology("v5p:4x4x4"))
    split = plan_run(replace(config, fsdp=8, tensor=8), spec, parse_topology("v5p:4x4x4"))
    part = "target parameters (bfloat16)"
    assert whole.parts[part] == 2 * whole.target_parameters
    assert split.parts[part] == pytest.approx(whole.parts[part] / 64, rel=0.01)
    assert whole.parts["optimizer moments (float32)"] == 8 * whole.drafter_parameters
    assert whole.parts["drafter masters (float32)"] == 4 * whole.drafter_parameters
    assert (whole.rows, split.rows) == (8, 64)
    assert split.activations.features == 8 * whole.activations.features


def test_gemma_drafters_have_the_global_layer():
    config = config_of("gemma4_12b")
    layer = draft_config(config.drafter, target_facts(config.target).spec).layer
    assert (layer.head_dim, layer.kv_heads, layer.window, layer.scale) == (512, 1, None, 1.0)
    assert all((layer.k_is_v, layer.v_norm, layer.branch_norms, layer.layer_scalar))
    assert layer.rope.proportion == 0.25


def test_what_does_not_divide_is_refused():
    config = config_of("gemma4_12b")
    spec = target_facts(config.target).spec
    with pytest.raises(ValueError, match=r"its 1 kv_heads do not divide over tensor=2"):
        plan_run(replace(config, tensor=2), spec, parse_topology("v5e:8x8"))
    with pytest.raises(ValueError, match=r"batch_size 100 does not divide over 64 devices"):
        plan_run(replace(config, batch_size=100), spec, parse_topology("v5e:8x8"))
    with pytest.raises(ValueError, match=r"fsdp=16 x tensor=1 does not divide the 8 devices of h200:8"):
        plan_run(config, spec, parse_topology("h200:8"))


def test_an_unknown_target_is_refused_not_guessed():
    with pytest.raises(ValueError, match=r"the shape of target some/model is not known .*Qwen/Qwen3-4B"):
        target_facts("some/model")


def test_topologies():
    assert set(ACCELERATORS) == {"v4", "v5e", "v5p", "v6e", "tpu7x", "h200"}
    assert (parse_topology("v5e:8x8").devices, parse_topology("v5e:8x8").hbm) == (64, 16e9)
    assert (parse_topology("tpu7x:2x2x1").devices, parse_topology("h200:8").devices) == (8, 8)
    for wrong in ("v9:8", "v5e", "v5e:8x", "v5e:0", "h200:8x8x8x8"):
        with pytest.raises(ValueError, match=r"--topology takes kind:chips.*known kinds are v4, v5e"):
            parse_topology(wrong)
