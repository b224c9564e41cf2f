"""Writing rows into a cache by kernel, interpreted, equals the plain update; compiled, it moves nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dspark_jax.kernels.cache_write import fits, write_pair
from dspark_jax.nn.cache import write

RACES = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def check(channels, span, count, dtype, interpret=True):
    """On and beside the edges of tiles, first and last positions included; bit for bit, and without NaN spreading."""
    edge = 128 if channels < 128 else 16
    start_B = np.array([0, 1, edge - count, edge - 1, edge, span - count - 1, span - count])
    rng = np.random.default_rng(0)
    cache, new = (rng.normal(size=(2, len(start_B), 2, size, channels)) for size in (span, count))
    cache[:, 2] = np.nan
    cache, new = (tuple(map(jnp.asarray, x.astype(dtype))) for x in (cache, new))
    assert fits(cache[0], count)
    found = jax.jit(lambda *x: write_pair(*x, interpret=interpret))(*cache, *new, start_B)
    expected = jax.jit(lambda *x: [write(x[i], x[i + 2], x[4]) for i in (0, 1)])(*cache, *new, start_B)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))


@pytest.mark.parametrize(
    ("channels", "span", "count", "dtype"), [(128, 48, 8, jnp.bfloat16), (64, 256, 7, jnp.float32)]
)
def test_rows_go_where_the_plain_update_puts_them(channels, span, count, dtype):
    check(channels, span, count, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_rows_go_where_the_plain_update_puts_them_widely(channels, dtype):
    for count in (1, 2, 16):
        check(channels, 256, count, dtype)


def test_no_copy_races_with_another(capfd):
    check(128, 32, 3, jnp.float32, interpret=RACES)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("channels", "span", "count"),
    [(128, 1000, 8), (64, 200, 8), (128, 16, 8), (80, 256, 8), (72, 256, 8), (192, 256, 8), (128, 1 << 16, 1 << 15)],
)
def test_what_does_not_end_on_an_edge_or_is_large_does_not_fit(channels, span, count):
    found = []
    jax.eval_shape(lambda: found.append(fits(jnp.zeros((2, 2, span, channels)), count)))
    assert found == [channels == 80]


ONE = """
from dspark_jax.kernels.cache_write import write_pair

for channels, dtype, count in CASES:
    # Small enough for VMEM, where XLA would keep it.
    cache, new = shape(32, 2, 1024, channels, dtype=dtype), shape(32, 2, count, channels, dtype=dtype)
    run = jax.jit(lambda *x: write_pair(*x), donate_argnums=(0, 1))
    compiled = run.lower(cache, cache, new, new, shape(32, dtype=jnp.int32)).compile()
    report(
        compiled,
        cache.shape,
        case=f"{channels} {dtype.__name__} {count}",
        loops=compiled.as_text().count(" while("),
        array=cache.size * cache.dtype.itemsize,
    )
"""
FEW = "CASES = (64, jnp.bfloat16, 8), (128, jnp.bfloat16, 8)"
ALL = "CASES = product((64, 128, 256), (jnp.bfloat16, jnp.float32), (1, 8, 65))"


@pytest.mark.parametrize(
    ("cases", "count"), [(FEW, 2), pytest.param(ALL, 18, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_compiled_for_a_tpu_it_updates_in_place_without_a_loop(updates_in_place, kind, cases, count):
    updates_in_place(kind, cases + ONE, count, 1 / 4)
