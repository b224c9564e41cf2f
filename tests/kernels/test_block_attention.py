"""The block attention kernel, interpreted, equals its twin; the twin, attention over a cache that is written to."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from dspark_jax.kernels import block_attention as kernel
from dspark_jax.nn.cache import write
from dspark_jax.ops import block_attention as twin
from dspark_jax.ops.attention import attention
from dspark_jax.ops.masks import cached_block_mask

TILE = 128
RACES = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


@dataclass(frozen=True, kw_only=True)
class Case:
    slots: int = 3
    group: int = 2
    kv_heads: int = 1
    channels: int = 16
    span: int = 300
    window: int | None = None
    soft_cap: float | None = None
    dtype: str = "float32"

    def arrays(self, batch, seed=0):
        """(queries, caches, own keys and values)"""
        rng = np.random.default_rng(seed)

        def normal(*shape):
            return rng.normal(size=shape).astype(np.float32)

        q = normal(batch, self.slots, self.kv_heads * self.group, self.channels)
        cache = normal(2, batch, self.kv_heads, self.span, self.channels)
        own = normal(2, batch, self.kv_heads, self.slots, self.channels)
        return q, cache, own

    @property
    def how(self):
        return {"scale": 0.3, "window": self.window, "soft_cap": self.soft_cap}

    @property
    def close(self):
        return {"atol": 2e-5} if self.dtype == "float32" else {"atol": 0.03}

    def unseen(self, start_B):
        """[B, S]: positions no slot may see."""
        position = np.arange(self.span)
        unseen = position >= start_B[:, None]
        return unseen if self.window is None else unseen | (position <= start_B[:, None] - self.window)


CASES = st.builds(
    Case,
    slots=st.integers(1, 9),
    group=st.sampled_from([1, 2, 4]),
    kv_heads=st.sampled_from([1, 2]),
    channels=st.sampled_from([64, 128, 256]),
    span=st.sampled_from([24, 128, 200, 384, 400]),
    window=st.one_of(st.none(), st.integers(1, 300)),
    soft_cap=st.sampled_from([None, 2.0]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


def starts(case, batch, seed):
    """Empty, full, on either side of the tiles' edges, and anything."""
    most = case.span - case.slots
    rng = np.random.default_rng(seed)
    edges = [0, most, *(x for x in (1, TILE - 1, TILE, TILE + 1, 2 * TILE) if x <= most)]
    return np.where(rng.random(batch) < 0.6, rng.choice(edges, batch), rng.integers(0, most + 1, batch)).astype(
        np.int32
    )


def check(case, interpret=True, tries=4):
    """The kernel gives what the twin does, although whatever nobody may see is NaN."""
    batch = 3
    run = jax.jit(partial(kernel.block_attention, **case.how, tile=TILE, interpret=interpret))
    expect = jax.jit(partial(twin.block_attention, **case.how))
    for seed in range(tries):
        q, cache, own = (jnp.asarray(x, case.dtype) for x in case.arrays(batch, seed))
        start_B = starts(case, batch, seed)
        unseen = case.unseen(start_B)[None, :, None, :, None]
        found = run(q, *jnp.where(unseen, jnp.nan, cache), *own, start_B)
        assert found.dtype == q.dtype
        expected = expect(q, *jnp.where(unseen, 0, cache), *own, start_B)
        np.testing.assert_allclose(
            found.astype(jnp.float32), expected.astype(jnp.float32), **case.close, err_msg=f"{case} at {start_B}"
        )


def check_paged(case, interpret=True, tries=3):
    """Pages in any order, a table that names no page where no context is, give what one cache does."""
    batch, count = 3, -(-case.span // TILE)
    run = jax.jit(partial(kernel.paged_block_attention, **case.how, interpret=interpret))
    expect = jax.jit(partial(twin.block_attention, **case.how))
    plain = jax.jit(partial(twin.paged_block_attention, **case.how))
    for seed in range(tries):
        q, cache, own = (jnp.asarray(x, case.dtype) for x in case.arrays(batch, seed))
        start_B = starts(case, batch, seed)
        padding = ((0, 0), (0, 0), (0, 0), (0, count * TILE - case.span), (0, 0))
        pages = jnp.pad(cache, padding).reshape(2, batch, case.kv_heads, count, TILE, -1).swapaxes(2, 3)
        order = np.random.default_rng(seed).permutation(batch * count)
        pages = pages.reshape(2, batch * count, *pages.shape[3:])[:, np.argsort(order)]
        table = order.reshape(batch, count)
        expected = expect(q, *cache, *own, start_B).astype(jnp.float32)
        np.testing.assert_allclose(plain(q, *pages, *own, table, start_B).astype(jnp.float32), expected, **case.close)
        touched = ~np.pad(case.unseen(start_B), ((0, 0), (0, count * TILE - case.span)), constant_values=True)
        named = np.where(touched.reshape(batch, count, TILE).any(-1), table, 2**30)
        found = run(q, *pages, *own, named, start_B).astype(jnp.float32)
        np.testing.assert_allclose(found, expected, **case.close, err_msg=f"{case} at {start_B}")


@pytest.mark.parametrize("window", [None, 1, 4])
def test_the_twin_equals_attention_over_a_cache_that_holds_the_block(window):
    case, start_B = Case(window=window, span=20), jnp.array([0, 3, 17])
    q, cache, own = map(jnp.asarray, case.arrays(3))
    mask = cached_block_mask(start_B, case.slots, case.span, window)
    written = [write(held, new, start_B) for held, new in zip(cache, own, strict=True)]
    expected = attention(q, *written, mask, scale=0.3)
    found = jax.jit(partial(twin.block_attention, **case.how))(q, *cache, *own, start_B)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        Case(channels=64, kv_heads=2, slots=5, span=400, window=150),
        Case(channels=128, group=4, slots=7, span=300, soft_cap=2.0, dtype="bfloat16"),
    ],
    ids=str,
)
def test_the_kernel_equals_its_twin(case):
    check(case)


def test_pages_equal_one_cache():
    check_paged(Case(channels=64, span=384, window=200))


@pytest.mark.slow
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(CASES)
def test_the_kernel_equals_its_twin_widely(case):
    check(case, tries=6)
    check_paged(case)


@pytest.mark.parametrize("window", [None, 1, 2, 30, 32, 33, 34, 65])
def test_every_tile_with_visible_context_is_read_once_and_no_other(window):
    tile, span = 32, 200
    steps = np.arange(kernel.steps_of(span, tile, window))
    read = jax.jit(jax.vmap(partial(kernel.tile_of_step, tile=tile, window=window, last=6), in_axes=(None, 0)))
    for start in (0, 1, 31, 32, 33, 64, 100, 191, 192, 193, 200):
        tiles, used = map(np.asarray, read(jnp.int32(start), steps))
        position = np.arange(0 if window is None else max(0, start - window + 1), start)
        visible = sorted(set(position // tile))
        assert (used == len(visible)).all()
        moved = tiles[np.r_[True, tiles[1:] != tiles[:-1]]].tolist()
        assert moved == visible or (not visible and len(moved) == 1 and 0 <= moved[0] <= 6)


def test_a_row_without_context_reads_a_page_that_exists():
    table = jnp.full((2, 3), 10**6)
    assert kernel.page_of(table, 1, 2, jnp.int32(0)) == 0
    assert kernel.page_of(table.at[1, 2].set(5), 1, 2, jnp.int32(1)) == 5


@pytest.mark.parametrize("channels", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_no_step_races_with_another_or_reads_what_nobody_wrote(channels, capfd):
    check(Case(channels=channels, window=150), interpret=RACES, tries=2)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 150])
def test_no_step_over_pages_races_with_another(window, capfd):
    check_paged(Case(window=window), interpret=RACES, tries=2)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("channels", [64, 128, 256])
def test_both_forms_lower_for_a_tpu(channels, dtype):
    shapes = jax.eval_shape(lambda: Case(channels=channels).arrays(2))
    q, cache, own = (jax.ShapeDtypeStruct(x.shape, dtype) for x in shapes)
    pair = lambda x: (jax.ShapeDtypeStruct(x.shape[1:], dtype),) * 2  # noqa: E731
    pages = (jax.ShapeDtypeStruct((9, 1, TILE, channels), dtype),) * 2
    start_B, table = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((2, 3), jnp.int32)
    how = {"scale": 0.1, "window": 150, "soft_cap": 2.0}
    for run, arguments in (
        (kernel.block_attention, (q, *pair(cache), *pair(own), start_B)),
        (kernel.paged_block_attention, (q, *pages, *pair(own), table, start_B)),
    ):
        text = jax.jit(partial(run, **how)).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") == 1


def test_a_tile_of_broken_lanes_is_refused():
    q, cache, own = Case().arrays(2)
    with pytest.raises(ValueError, match="a tile of 100 positions is no multiple of 128"):
        kernel.block_attention(*map(jnp.asarray, (q, *cache, *own)), jnp.zeros(2, jnp.int32), scale=1.0, tile=100)
