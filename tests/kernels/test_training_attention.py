"""The training attention kernel, interpreted: values and gradients equal its twin's."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from dspark_jax.kernels import training_attention as kernel
from dspark_jax.ops import training_attention as twin

RACES = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


@dataclass(frozen=True, kw_only=True)
class Case:
    anchors: int = 20
    block: int = 3
    group: int = 2
    kv_heads: int = 1
    channels: int = 16
    length: int = 300
    window: int | None = None
    dtype: str = "float32"

    def arrays(self, batch, seed):
        """(queries, context keys and values, own keys and values), (anchors, starts of their documents), a gradient"""
        rng = np.random.default_rng(seed)
        normal = lambda *shape: jnp.asarray(rng.normal(size=shape), self.dtype)  # noqa: E731
        queries = self.anchors * self.block
        q = normal(batch, queries, self.group * self.kv_heads, self.channels)
        context = normal(2, batch, self.kv_heads, self.length, self.channels)
        own = normal(2, batch, self.kv_heads, queries, self.channels)
        anchors = np.sort(rng.integers(0, self.length, (batch, self.anchors)), axis=1)
        # Rows with fewer anchors are filled up with zeros behind them.
        anchors[-1, self.anchors // 2 :] = 0
        bounds = np.sort(rng.integers(0, self.length, 3))
        starts = np.array([0, *bounds])[np.searchsorted(bounds, anchors, side="right")]
        return (q, *context, *own), (jnp.asarray(anchors), jnp.asarray(starts)), normal(*q.shape)

    @property
    def how(self):
        return {"scale": 0.3, "window": self.window}


CASES = st.builds(
    Case,
    anchors=st.sampled_from([1, 16, 20, 40]),
    block=st.integers(1, 9),
    group=st.sampled_from([1, 3, 4]),
    kv_heads=st.sampled_from([1, 2]),
    channels=st.sampled_from([64, 128]),
    length=st.sampled_from([100, 256, 300]),
    window=st.one_of(st.none(), st.integers(1, 200)),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


def check(case, interpret=True, tries=2, batch=2):
    def value_and_gradient(run, arrays, places, d_out):
        out, back = jax.vjp(lambda *arrays: run(*arrays, *places), *arrays)
        return out, back(d_out)

    fast = jax.jit(
        partial(value_and_gradient, partial(kernel.training_attention, **case.how, tile=128, interpret=interpret))
    )
    slow = jax.jit(partial(value_and_gradient, partial(twin.training_attention, **case.how)))
    close = {"atol": 1e-4, "rtol": 1e-4} if case.dtype == "float32" else {"atol": 0.1, "rtol": 0.1}
    for seed in range(tries):
        arguments = case.arrays(batch, seed)
        (out, found), (expected_out, expected) = fast(*arguments), slow(*arguments)
        assert out.dtype == expected_out.dtype
        names = ("out", "q", "k", "v", "own_k", "own_v")
        for name, a, b in zip(names, (out, *found), (expected_out, *expected), strict=True):
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            np.testing.assert_allclose(a, b, **close, err_msg=f"{name} of {case}")


@pytest.mark.parametrize(
    "case",
    [
        Case(channels=64, kv_heads=2, group=3, block=7, window=90),
        Case(channels=128, block=8, length=256, dtype="bfloat16"),
    ],
    ids=str,
)
def test_values_and_gradients_equal_the_twin_s(case):
    check(case)


@pytest.mark.slow
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(CASES)
def test_values_and_gradients_equal_the_twin_s_widely(case):
    check(case)


@pytest.mark.slow
def test_no_step_races_with_another_or_reads_what_nobody_wrote(capfd):
    check(Case(window=90), interpret=RACES, tries=1)
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_steps_read_the_context_that_is_visible_and_no_other():
    """Tiles of 2 queries, context tiles of 10."""
    low = jnp.array([[0, 0, 12, 25, 0, 0], [5, 30, 0, 0, 35, 31]])
    high = jnp.array([[10, 11, 30, 28, 0, 0], [5, 41, 0, 9, 36, 40]])
    first, count = jax.jit(kernel.visible_tiles, static_argnums=(2, 3))(low, high, 2, 10)
    np.testing.assert_array_equal(first, [[0, 1, 0], [3, 0, 3]])
    np.testing.assert_array_equal(count, [[2, 2, 0], [2, 1, 1]])
    first, count = jax.jit(kernel.seeing_tiles, static_argnums=2)(first, count, 5)
    np.testing.assert_array_equal(count, [[1, 2, 1, 0, 0], [1, 0, 0, 3, 1]])
    np.testing.assert_array_equal(np.where(count, first, -1), [[0, 0, 1, -1, -1], [1, -1, -1, 0, 0]])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("channels", [64, 128, 256])
def test_forward_and_backward_lower_for_a_tpu(channels, dtype):
    case = Case(channels=channels, block=7)
    arrays, places, _ = jax.eval_shape(lambda: Case(channels=channels, block=7).arrays(2, 0))
    arrays = [jax.ShapeDtypeStruct(x.shape, dtype) for x in arrays]

    def loss(arrays, places):
        return jnp.sum(kernel.training_attention(*arrays, *places, **case.how).astype(jnp.float32))

    text = jax.jit(jax.grad(loss)).trace(arrays, places).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 3
