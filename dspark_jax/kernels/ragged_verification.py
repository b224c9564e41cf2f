"""The target's attention over tokens of many rows packed on one axis, by the kernel that JAX ships (TPU).

Keys and values of a position lie together: pages are [P, S, 2 J, C], keys in the even heads and values in the odd ones.
The tokens that are verified are already in their pages. The twin in plain code is in ops/ragged_verification.py.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from dspark_jax.core.arrays import Array, DType, Float, Int
from dspark_jax.kernels.block_attention import LANES

_POSITIONS, _QUERIES = 512, 32


def fits(heads: int, kv_heads: int, channels: int, dtype: DType) -> bool:
    """Whether the kernel takes such heads: of 128 channels, those of a position whole tiles, and so their queries."""
    packed, group = 4 // jnp.dtype(dtype).itemsize, heads // kv_heads
    words, rest = divmod(2 * kv_heads, packed)
    # Several tiles of heads are taken one at a time, or all at once, which needs too much memory.
    one_at_a_time = words <= 8 or group % 2 == 0 or (group == 1 and packed > 1)
    return channels == LANES and not rest and (words in (1, 2, 4) or words % 8 == 0) and one_at_a_time


def ragged_verification(
    q_NHC: Float[Array, "N H C"],
    pages_PSXC: Float[Array, "P S X C"],
    pages_BI: Int[Array, "B I"],
    start_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "N H C"]:
    """The first sum(count_B) entries are the rows' tokens, one row after the other, row b's at positions start_B[b]..

    Each sees its row up to itself, the last `window` positions of it with a window. Position s of row b is in page
    pages_BI[b, s // S]. Entries behind the last token are meaningless.
    """
    size, table = pages_PSXC.shape[1], pages_BI.shape[1]
    return ragged_paged_attention(
        q_NHC,
        pages_PSXC,
        *ragged_rows(pages_BI, start_B, count_B),
        sm_scale=scale,
        sliding_window=window,
        soft_cap=soft_cap,
        # Given, since the usual choice asks which device this process has, which is another when compiling ahead.
        num_kv_pages_per_block=min(table, max(1, _POSITIONS // size)),
        num_queries_per_block=min(q_NHC.shape[0], _QUERIES),
    )


def ragged_rows(
    pages_BI: Int[Array, "B I"], start_B: Int[Array, "B"], count_B: Int[Array, "B"]
) -> tuple[Int[Array, "B"], Int[Array, "B I"], Int[Array, "B+1"], Int[Array, "1"]]:
    """What the kernel is told of rows: (lengths, pages, where each row's tokens start and the last one's end, rows).

    Rows without tokens come last and are not counted: the kernel would fetch keys for them that it never waits for. It
    would for no rows at all, so then one is made up.
    """
    count_B = count_B.at[0].add((jnp.sum(count_B) == 0).astype(count_B.dtype))
    order = jnp.argsort(count_B == 0, stable=True)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count_B[order], dtype=jnp.int32)])
    rows = jnp.sum(count_B > 0, dtype=jnp.int32)[None]
    return (start_B + count_B)[order].astype(jnp.int32), pages_BI[order].astype(jnp.int32), starts, rows
