"""The step learns, keeps its hands off the target, and does not apply what is not finite."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.data.pipeline import Batch
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.objective import LossWeights
from dspark_jax.interop.huggingface import load_target
from dspark_jax.targets.model import Target
from dspark_jax.training.draft import draft_config
from dspark_jax.training.objective import BlockObjective
from dspark_jax.training.optimizer import OptimizerConfig, build_optimizer
from dspark_jax.training.report import summarise
from dspark_jax.training.step import StepConfig, init_state, measure, train_step

POISON = 40
OBJECTIVE = BlockObjective(anchors=8, weights=LossWeights())


@pytest.fixture(scope="module")
def target(small_target):
    return load_target(small_target)


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, POISON, (4, 16)).astype(np.int32)
    mask = np.ones((4, 16), bool)
    mask[:, :3] = False
    return Batch(tokens_BT=tokens, loss_mask_BT=mask, segments_BT=np.ones((4, 16), np.int32))


@pytest.fixture(scope="module")
def optimizer():
    return build_optimizer(OptimizerConfig(learning_rate=5e-3), 200)


@pytest.fixture(scope="module")
def start(target, small_config, optimizer):
    drafter = DSpark(draft_config(small_config.drafter, target.spec), rngs=nnx.Rngs(0), dtype=jnp.float32)
    return init_state(drafter, optimizer, jax.random.key(0))


@pytest.fixture(scope="module")
def step(small_config, optimizer):
    config = StepConfig(objective=OBJECTIVE, dtype=jnp.dtype(jnp.float32))
    return jax.jit(partial(train_step, optimizer=optimizer, config=config))


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_the_loss_falls_on_a_batch_it_sees_often(step, start, target, batch):
    state, losses = start, []
    for _ in range(60):
        state, metrics = step(state, target, batch)
        losses.append(summarise([metrics])["loss"])
    assert losses[-1] < 0.75 * losses[0]
    assert int(state.step) == 60


def test_the_target_is_an_argument_and_stays_as_it_was(step, start, target, batch):
    before = jax.tree.map(lambda x: np.array(x), jax.tree.leaves(target))
    _, metrics = step(start, target, batch)
    louder = jax.tree.map(lambda x: x * 1.5, target)
    compiled = step._cache_size()
    _, other = step(start, louder, batch)
    assert same(before, jax.tree.leaves(target))
    assert float(other["l1"].sum) != float(metrics["l1"].sum)
    assert step._cache_size() == compiled


def test_a_batch_that_is_not_finite_is_counted_and_not_applied(step, start, target, batch):
    broken = jax.tree.map(lambda x: x, target)
    embedding = np.array(target.vocabulary.embedding[...])
    embedding[POISON] = np.nan
    broken.vocabulary.embedding = target.vocabulary.embedding.replace(jnp.asarray(embedding))
    poisoned = batch._replace(tokens_BT=np.where(np.arange(16) == 9, POISON, batch.tokens_BT).astype(np.int32))

    after, metrics = step(start, broken, poisoned)
    assert summarise([metrics])["rows_skipped"] == 1.0
    assert same((after.drafter, after.opt_state), (start.drafter, start.opt_state))
    assert int(after.step) == 1
    values = summarise([metrics])
    assert values["skipped"] == 1.0
    assert "loss" not in values
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(metrics))

    onward, metrics = step(after, target, batch)
    expected, _ = step(replace(start, step=jnp.int32(1)), target, batch)
    assert summarise([metrics])["skipped"] == 0.0
    assert same(onward.drafter, expected.drafter)
    assert not same(onward.drafter, start.drafter)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_d_43_a_row_that_is_not_finite_is_counted_and_the_others_are_learnt_as_without_it(
    start, target, batch, optimizer, accumulate, monkeypatch
):
    encode = Target.encode

    def overflowing(self, tokens_BT, *how):
        out = encode(self, tokens_BT, *how)
        return replace(out, features_BTE=jnp.where((tokens_BT == POISON)[..., None], jnp.inf, out.features_BTE))

    monkeypatch.setattr(Target, "encode", overflowing)
    tokens = np.array(batch.tokens_BT)
    tokens[1, 9] = POISON
    config = StepConfig(objective=OBJECTIVE, dtype=jnp.dtype(jnp.float32), accumulate=accumulate)
    step = jax.jit(partial(train_step, optimizer=optimizer, config=config))
    _, metrics = step(start, target, batch._replace(tokens_BT=tokens))
    _, expected = step(start, target, batch._replace(loss_mask_BT=batch.loss_mask_BT & (np.arange(4) != 1)[:, None]))
    values, others = summarise([metrics]), summarise([expected])
    assert (values["rows_skipped"], values["skipped"], others["rows_skipped"]) == (0.25, 0.0, 0.0)
    # Anchors are drawn alike; the means are those of the other rows.
    np.testing.assert_allclose([values["ce"], values["l1"]], [others["ce"], others["l1"]], rtol=1e-5)
    assert values["grad_norm"] > 0


def test_a_skipped_step_does_not_move_the_means_of_its_window(step, start, target, batch):
    _, good = step(start, target, batch)
    skipped = {name: jax.tree.map(jnp.zeros_like, mean) for name, mean in good.items()}
    skipped["skipped"] = good["skipped"].__class__(sum=jnp.ones(()), count=jnp.ones(()))
    alone, both = summarise([good]), summarise([good, skipped])
    assert both["loss"] == alone["loss"]
    assert both["skipped"] == 0.5


def test_masters_and_moments_stay_float32_under_bfloat16_compute(start, target, batch, small_config, optimizer):
    config = StepConfig(objective=OBJECTIVE, dtype=jnp.dtype(jnp.bfloat16))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target)
    after, metrics = jax.jit(partial(train_step, optimizer=optimizer, config=config))(start, half, batch)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((after.drafter, after.opt_state))}
    assert dtypes == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
    assert not same(after.drafter, start.drafter)
    assert np.isfinite(summarise([metrics])["loss"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_product_of_the_forward_pass_is_computed_in_the_asked_dtype(start, target, batch, small_config, dtype):
    config = StepConfig(objective=OBJECTIVE, dtype=jnp.dtype(dtype))
    frozen = jax.tree.map(lambda x: x.astype(dtype), target)
    compute = jax.jit(partial(measure, config=config))
    program = compute.lower(start.drafter, frozen, batch, jax.random.key(0)).as_text()
    products = re.findall(r"dot_general .*: \(tensor<[0-9x]*x(\w+)>, tensor<[0-9x]*x(\w+)>\)", program)
    assert len(products) > 10
    assert set(products) == {(short := {"bfloat16": "bf16", "float32": "f32"}[dtype], short)}


def test_anchors_are_drawn_anew_each_step(step, start, target, batch):
    _, first = step(start, target, batch)
    _, again = step(start, target, batch)
    _, second = step(replace(start, step=jnp.int32(1)), target, batch)
    assert float(first["ce"].sum) == float(again["ce"].sum) != float(second["ce"].sum)


def test_tokens_are_those_of_the_batch(step, start, target, batch):
    shorter = batch._replace(segments_BT=(np.arange(16) < np.array([[16], [0], [5], [7]])).astype(np.int32))
    _, metrics = step(start, target, shorter)
    assert float(metrics["tokens"].sum) == 28.0
