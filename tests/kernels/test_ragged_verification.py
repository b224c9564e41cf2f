"""Packed verification over pages: the twin equals dense attention, the kernel is told the same rows and compiles."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from dspark_jax.kernels.ragged_verification import ragged_rows
from dspark_jax.ops.attention import attention
from dspark_jax.ops.masks import causal_mask
from dspark_jax.ops.ragged_verification import ragged_verification as twin

PAGE, TABLE, KV_HEADS, GROUP, CHANNELS = 4, 5, 2, 3, 8


def arrays(entries=12, batch=4):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(entries, KV_HEADS * GROUP, CHANNELS)), jnp.float32)
    pages = jnp.asarray(rng.normal(size=(batch * TABLE, PAGE, 2 * KV_HEADS, CHANNELS)), jnp.float32)
    return q, pages, jnp.asarray(rng.permutation(batch * TABLE).reshape(batch, TABLE))


STARTS, COUNTS = jnp.array([0, 13, 6, 4]), jnp.array([3, 5, 0, 2])


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (6, 2.0)])
def test_packed_tokens_see_their_row_up_to_themselves(window, soft_cap):
    q, pages, table = arrays()
    how = {"scale": 0.4, "window": window, "soft_cap": soft_cap}
    found, first = jax.jit(partial(twin, **how))(q, pages, table, STARTS, COUNTS), 0
    for row, (start, count) in enumerate(zip(STARTS.tolist(), COUNTS.tolist(), strict=True)):
        if count:
            held = pages[table[row]].reshape(1, -1, 2 * KV_HEADS, CHANNELS).swapaxes(1, 2)
            mask = causal_mask(jnp.array([start]), count, held.shape[2], window)
            mine = q[None, first : first + count]
            run = jax.jit(partial(attention, scale=0.4, soft_cap=soft_cap))
            expected = run(mine, held[:, ::2], held[:, 1::2], mask)[0]
            np.testing.assert_allclose(found[first : first + count], expected, atol=1e-5)
        first += count


def test_jax_s_reference_is_told_of_the_same_rows():
    q, pages, table = arrays()
    counts = jnp.array([0, 5, 2, 0])
    rows = ragged_rows(table, STARTS, counts)
    expected = ref_ragged_paged_attention(q, pages, *rows, sm_scale=0.4, sliding_window=6, soft_cap=2.0)
    found = jax.jit(partial(twin, scale=0.4, window=6, soft_cap=2.0))(q, pages, table, STARTS, counts)
    assert expected.shape[0] == counts.sum()
    np.testing.assert_allclose(found[: counts.sum()], expected, atol=1e-5)


def test_rows_without_tokens_are_not_counted_unless_there_are_no_others():
    nobody = ragged_rows(jnp.arange(8).reshape(4, 2), STARTS, jnp.zeros(4, jnp.int32))
    assert (nobody[0][0], nobody[2].tolist(), nobody[3].tolist()) == (1, [0, 1, 1, 1, 1], [1])
    lengths, pages, starts, rows = ragged_rows(jnp.arange(8).reshape(4, 2), STARTS, jnp.array([0, 5, 0, 2]))
    assert rows.tolist() == [2]
    assert (lengths[:2].tolist(), starts.tolist()) == ([18, 6], [0, 5, 7, 7, 7])
    assert pages[:2].tolist() == [[2, 3], [6, 7]]


ONE = """
import numpy as np
from jax.sharding import Mesh

from dspark_jax.kernels.ragged_verification import fits, ragged_verification

# JAX's kernel asks which TPU it is for.
mesh = Mesh(np.array(described.devices[:1]), ("x",)).abstract_mesh
HEADS = (32, 8), (8, 4), (12, 1), (14, 2), (32, 32)
for (heads, kv_heads), dtype, (window, size) in product(HEADS, (jnp.bfloat16, jnp.float32), ((None, 128), (1024, 200))):
    if not fits(heads, kv_heads, 128, dtype):
        continue
    table = 8192 // size if size == 128 else 1
    q, pages = shape(256, heads, 128, dtype=dtype), shape(1024, size, 2 * kv_heads, 128, dtype=dtype)
    rows, tables = shape(32, dtype=jnp.int32), shape(32, table, dtype=jnp.int32)
    run = jax.jit(partial(ragged_verification, scale=0.1, window=window))
    with jax.sharding.use_abstract_mesh(mesh):
        compiled = run.lower(q, pages, tables, rows, rows).compile()
    report(
        compiled,
        pages.shape,
        case=f"{heads} {kv_heads} {dtype.__name__} {window} {size}",
        pages=pages.size * pages.dtype.itemsize,
    )
"""


@pytest.mark.slow
def test_every_tpu_takes_the_kernel_and_leaves_the_pages_where_they_are(ahead, kind):
    found = ahead(kind, ONE)
    assert len(found) == 18
    for facts in found:
        assert facts["kernels"] == 1, facts
        assert facts["copied"] == [], facts
        assert facts["temporaries"] < facts["pages"] / 8, facts
