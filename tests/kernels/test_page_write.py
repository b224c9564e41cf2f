"""Writing packed entries into pages, plainly and by kernel, is a loop in Python; compiled it moves nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dspark_jax.kernels import page_write as kernels
from dspark_jax.ops import pages as plain
from dspark_jax.ops.packing import packing

RACES = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
PAGE, TABLE = 8, 3


def check(counts, starts, width, size, write):
    """Where rows have scratch anything may lie; what was there is kept everywhere else, NaN included."""
    rng, batch = np.random.default_rng(0), len(counts)
    pages = rng.normal(size=(batch * TABLE, PAGE, 4, 128)).astype(np.float32)
    pages[:, ::3] = np.nan
    table, new = rng.permutation(batch * TABLE).reshape(batch, TABLE), rng.normal(size=(size, 4, 128))
    expected, entry, scratch = pages.copy(), 0, np.zeros(pages.shape[:2], bool)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for slot in range(width if count else 0):
            place = table[row, (start + slot) // PAGE], (start + slot) % PAGE
            scratch[place] = slot >= count
            if slot < count:
                expected[place] = new[entry]
                entry += 1
    first_B = packing(jnp.asarray(counts), width, size).first_B
    arguments = pages, new.astype(np.float32), table, first_B, np.asarray(starts), np.asarray(counts)
    found = np.asarray(jax.jit(lambda *x: write(*x, width=width))(*arguments))
    np.testing.assert_array_equal(found[~scratch], expected[~scratch])
    return found[scratch], pages[scratch]


def interpreted(*arguments, width):
    return kernels.write_pages(*arguments, width=width, interpret=True)


CASES = [
    # Inside a page, up to its edge, across it and to the end of the row; rows that are full, partly so and empty.
    ([5, 2, 0, 5, 1], [0, 3, 19, 6, 19], 5, 16),
    # Several pieces a row, on edges and across them.
    ([12, 12, 0], [0, 7, 3], 12, 36),
    ([1, 1, 1], [0, 7, 23], 1, 4),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("write", [plain.write_pages, interpreted], ids=["plain", "kernel"])
def test_entries_go_where_the_table_says_and_nowhere_else(case, write):
    check(*case, write)


def test_plainly_nothing_behind_a_row_s_own_entries_is_touched():
    found, before = check(*CASES[0], plain.write_pages)
    assert len(found) == 3 + 4
    np.testing.assert_array_equal(found, before)


def test_no_copy_races_with_another_and_only_entries_are_written(capfd):
    found, _ = check(*CASES[0], lambda *x, width: kernels.write_pages(*x, width=width, interpret=RACES))
    assert "RACE DETECTED" not in capfd.readouterr().out
    assert np.isfinite(found).all()


ONE = """
from dspark_jax.kernels.page_write import write_pages
from dspark_jax.kernels.ragged_verification import fits

for kv_heads, dtype, (width, entries), page in CASES:
    assert fits(16, kv_heads, 128, dtype)
    pages, new = shape(256, page, 2 * kv_heads, 128, dtype=dtype), shape(entries, 2 * kv_heads, 128, dtype=dtype)
    rows = shape(32, dtype=jnp.int32)
    run = jax.jit(partial(write_pages, width=width), donate_argnums=0)
    compiled = run.lower(pages, new, shape(32, 8, dtype=jnp.int32), rows, rows, rows).compile()
    report(
        compiled,
        pages.shape,
        case=f"{kv_heads} {dtype.__name__} {width} {entries} {page}",
        loops=compiled.as_text().count(" while("),
        array=pages.size * pages.dtype.itemsize,
    )
"""
FEW = "CASES = (8, jnp.bfloat16, (8, 128), 128), (4, jnp.float32, (32, 1024), 128)"
ALL = """
CASES = product((1, 2, 4, 8), (jnp.bfloat16, jnp.float32), ((1, 32), (8, 128), (512, 16384)), (128, 200))
"""


@pytest.mark.parametrize(
    ("cases", "count"), [(FEW, 2), pytest.param(ALL, 48, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_compiled_for_a_tpu_it_updates_in_place_without_a_loop(updates_in_place, kind, cases, count):
    updates_in_place(kind, cases + ONE, count, 1 / 8)
