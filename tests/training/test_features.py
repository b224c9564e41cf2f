"""A step from cached outputs is the step that computes them; a cache is what it says, bounded, and goes on when cut."""

from dataclasses import replace
from functools import partial
from itertools import islice

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.data.feature_files import FeatureFiles
from dspark_jax.data.pipeline import Batch
from dspark_jax.drafters.objective import LossWeights
from dspark_jax.interop.huggingface import load_target
from dspark_jax.targets.model import Target, TargetOutput
from dspark_jax.training import features as feature_module
from dspark_jax.training.draft import MtpShape, draft_config, new_drafter
from dspark_jax.training.features import FeatureConfig, require_room
from dspark_jax.training.feed import Feed
from dspark_jax.training.objective import BlockObjective, objective_of
from dspark_jax.training.optimizer import OptimizerConfig, build_optimizer
from dspark_jax.training.report import summarise
from dspark_jax.training.setup import prepare
from dspark_jax.training.step import StepConfig, init_state, look, train_step
from dspark_jax.training.stored import store

OBJECTIVE = BlockObjective(anchors=4, weights=LossWeights())
FLOAT32 = jnp.dtype(jnp.float32)


@pytest.fixture(scope="module")
def target(small_target):
    return load_target(small_target)


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = np.random.default_rng(0)
    segments = np.array([[1] * 16, [1] * 7 + [2] * 9, [1] * 10 + [0] * 6, [1] * 5 + [2] * 6 + [3] * 5], np.int32)
    tokens = np.where(segments > 0, rng.integers(2, 40, (4, 16)), 0).astype(np.int32)
    mask = (rng.random((4, 16)) < 0.8) & (segments > 0)
    return Batch(tokens_BT=tokens, loss_mask_BT=mask, segments_BT=segments, rows_B=np.arange(4, dtype=np.int32))


def looking(target, batch, taps, dtype, accumulate=1):
    config = StepConfig(objective=OBJECTIVE, dtype=FLOAT32, accumulate=accumulate)
    return jax.jit(partial(look, taps=taps, dtype=dtype, config=config))(target, batch)


@pytest.fixture(scope="module")
def stepping(target, batch, small_config):
    """A step of plain descent, whose update is the gradient, and what it makes of the batch by itself."""
    optimizer = build_optimizer(OptimizerConfig(name="sgd", learning_rate=1.0, warmup=0.0, clip=1e9), 10)
    drafter = new_drafter(draft_config(small_config.drafter, target.spec), rngs=nnx.Rngs(0), dtype=FLOAT32)
    state = init_state(drafter, optimizer, jax.random.key(0))
    config = StepConfig(objective=OBJECTIVE, dtype=FLOAT32, accumulate=2)
    step = jax.jit(partial(train_step, optimizer=optimizer, config=config))
    return step, state, step(state, target, batch)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2), ("int8", 3e-2)])
def test_a_step_from_what_was_kept_is_the_step_that_computes_it(target, batch, stepping, monkeypatch, dtype, tolerance):
    step, state, (online, expected) = stepping
    kept = looking(target, batch, state.drafter.tapped_layers, dtype, accumulate=2)
    assert kept.values_BTMD.dtype == dtype
    # Read in one program for all three.
    seen = store(kept.output(FLOAT32), "float32")

    def never(*_):
        raise AssertionError("the target's layers were run")

    monkeypatch.setattr(Target, "encode", never)
    cached, metrics = step(state, target, batch, seen)
    for name, value in summarise([expected]).items():
        np.testing.assert_allclose(summarise([metrics])[name], value, atol=tolerance, rtol=tolerance, err_msg=name)
    whole, from_cache = (
        np.concatenate([np.ravel(a - b) for a, b in zip(*map(jax.tree.leaves, (state.drafter, after)), strict=True)])
        for after in (online.drafter, cached.drafter)
    )
    assert np.linalg.norm(whole) > 0.1
    assert np.linalg.norm(from_cache - whole) < 2 * tolerance * np.linalg.norm(whole)


def test_without_taps_the_hidden_states_alone_are_kept(target, batch, small_config):
    shape = MtpShape(block_size=2)
    drafter = new_drafter(draft_config(shape, target.spec), rngs=nnx.Rngs(0), dtype=FLOAT32)
    seen = looking(target, batch, drafter.tapped_layers, "float32")
    expected = target.encode(jnp.asarray(batch.tokens_BT), drafter.tapped_layers, None)
    assert seen.output(FLOAT32).features_BTE.shape == expected.features_BTE.shape
    assert objective_of(shape, anchors=1) is not None
    # Row 0 is one document.
    np.testing.assert_allclose(seen.output(FLOAT32).hidden_BTD[0], expected.hidden_BTD[0], atol=1e-5)


def test_eight_bits_err_by_half_a_step_of_each_position_and_tap():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(2, 3, 4, 8)) * 10.0 ** rng.integers(-3, 4, (2, 3, 4, 1))
    values[0, 0, 1] = 0.0
    values = jnp.asarray(values, jnp.float32)
    seen = TargetOutput(hidden_BTD=values[..., 3, :], features_BTE=values[..., :3, :].reshape(2, 3, 24), cache=None)
    kept = store(seen, "int8")
    again = kept.output(FLOAT32)
    assert kept.values_BTMD.dtype == jnp.int8
    error = jnp.abs(again.features_BTE.reshape(2, 3, 3, 8) - values[..., :3, :])
    assert jnp.all(error <= 0.5001 / 127 * jnp.max(jnp.abs(values[..., :3, :]), axis=-1, keepdims=True))
    assert jnp.all(jnp.abs(again.hidden_BTD - values[..., 3, :]) <= 0.5001 / 127 * jnp.max(jnp.abs(values[..., 3, :])))
    assert jnp.all(again.features_BTE[0, 0, 8:16] == 0)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_what_is_not_finite_stays_so(dtype, poison):
    seen = TargetOutput(
        hidden_BTD=jnp.ones((1, 2, 4)), features_BTE=jnp.ones((1, 2, 8)).at[0, 1, 5].set(poison), cache=None
    )
    finite = jnp.isfinite(store(seen, dtype).output(FLOAT32).features_BTE)
    assert finite[0, 0].all()
    assert not finite[0, 1].all()


def test_rows_are_computed_until_all_of_a_batch_are_kept(target, tmp_path, caching, numbered, owners):
    features, look, _ = caching(tmp_path, kind="mixed")
    for rows in ([3, 1], [2, 1], [1, 3], [3, 2], [0, 1]):
        assert owners(features(target, numbered(*rows))) == rows
    assert look.looked == [[3, 1], [2, 1], [0, 1]]


def test_what_is_kept_as_it_comes_never_passes_its_bound(target, tmp_path, caching, numbered):
    features, look, files = caching(tmp_path, max_gb=4e-4, kind="mixed")
    for _ in range(2):
        for row in range(0, 3000, 2):
            features(target, numbered(row, row + 1))
    features.flush()
    assert 0 < files.bytes_written <= 4e5
    kept = [row for row in range(3000) if row in files]
    assert 1000 < len(kept) < 3000
    assert len(look.looked) == 1500 + (3000 - len(kept) + 1) // 2


def test_a_cache_that_was_cut_short_goes_on(target, tmp_path, monkeypatch, caching, numbered):
    batches = [numbered(0, 1), numbered(2, 3), numbered(4, 5), numbered(6, -1)]
    monkeypatch.setattr(feature_module, "FeatureFiles", partial(FeatureFiles, file_bytes=3 * 64))
    features, look, _ = caching(tmp_path, kind="cached")
    look.interrupted_at = 3
    with pytest.raises(KeyboardInterrupt):
        features.fill(target, grain.MapDataset.source(batches), range(7), print)
    again, look, files = caching(tmp_path, kind="cached")
    said = []
    assert [row for row in range(7) if row in files] == [0, 1, 2]
    again.fill(target, grain.MapDataset.source(batches[1:]), range(7), said.append)
    assert look.looked == [[2, 3], [4, 5], [6, -1]]
    assert [row for row in range(-1, 8) if row in files] == list(range(7))
    assert "All rows are cached" in said[-1]
    assert files.read(list(range(7)))[0][:, 0, 0, 0].tolist() == list(range(7))


@pytest.mark.parametrize(
    ("kind", "max_gb", "free", "sentence"),
    [
        ("cached", 1e-4, 1e9, r"features\.max_gb is 0\.0001: raise it"),
        ("cached", 1.0, 1e5, r"has 0\.0001 GB free: give another features\.directory"),
        ("mixed", 1.0, 1e5, r"has 0\.0001 GB free"),
        ("mixed", 1e-4, 1e9, None),
        ("cached", 1.0, 1e9, None),
    ],
)
def test_the_size_is_said_and_refused_before_anything_is_written(
    tmp_path, monkeypatch, caching, kind, max_gb, free, sentence
):
    _, _, files = caching(tmp_path)
    monkeypatch.setattr(FeatureFiles, "bytes_free", property(lambda self: int(free)))
    said = []
    config = FeatureConfig(kind=kind, dtype="float32", max_gb=max_gb)
    if sentence is None:
        require_room(config, files, 10_000, said.append)
    else:
        with pytest.raises(ValueError, match=sentence):
            require_room(config, files, 10_000, said.append)
    assert "10,000 rows take" in said[0]
    assert not list(tmp_path.glob("*.arrayrecord"))


def test_a_run_with_a_cache_is_the_run_without(small_config, tmp_path):
    config = replace(small_config, evaluation=replace(small_config.evaluation, prompts=1))

    def losses(**features) -> list[float]:
        setup = prepare(replace(config, features=FeatureConfig(dtype="float32", **features)), tmp_path, print)
        state, window = setup.state, []
        # Into the second epoch.
        for batch in islice(Feed(setup.batches, setup.batch_sharding), 12):
            state, metrics = setup.step(state, setup.target, batch)
            window.append(metrics)
        return [summarise([metrics])["loss"] for metrics in window]

    expected = losses()
    for kind in ("cached", "mixed"):
        folder = tmp_path / kind
        np.testing.assert_allclose(losses(kind=kind, directory=str(folder)), expected, rtol=1e-4)
        assert kind == "mixed" or list(folder.glob("*.arrayrecord"))
    eight = FeatureConfig(kind="cached", dtype="int8", directory=str(tmp_path / "cached"))
    with pytest.raises(ValueError, match=r"was made with features\.dtype float32, and this run has int8"):
        prepare(replace(config, features=eight), tmp_path, print)
