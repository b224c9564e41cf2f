"""Attention of one draft block a row: over the context in a cache and, both ways, over the block itself (TPU).

A row's context is read in tiles. The tiles a row needs are known from the position of its block before the kernel
starts; steps past them name the tile that is already there, so they move nothing and compute nothing. The block's own
keys and values start the running softmax, which therefore never sees an empty row.

A head of fewer than 128 channels would leave lanes empty, so XLA keeps such a cache with positions along the lanes. The
kernel reads it in that order: the transposition in front of it is a change of name, not a copy.

The twins in plain code are in ops/block_attention.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, Mesh

from dspark_jax.core.arrays import Array, Float, Int
from dspark_jax.core.mesh import sharding

LANES = 128

Interpret = bool | pltpu.InterpretParams

_MASKED = -1e30
_STEP_BYTES = 1 << 20


def default_tile(kv_heads: int, channels: int, itemsize: int) -> int:
    """Context positions a step: as many as keep one step's keys, of all heads, within 1 MiB; 128 to 1024.

    Keys and values of two steps are in VMEM at a time, a quarter of its usual 16 MiB.
    """
    fitting = _STEP_BYTES // (kv_heads * channels * itemsize)
    return max(LANES, min(1024, 1 << (max(fitting, 1).bit_length() - 1)))


def block_attention(
    q_BKHC: Float[Array, "B K H C"],
    k_BJSC: Float[Array, "B J S C"],
    v_BJSC: Float[Array, "B J S C"],
    own_k_BJKC: Float[Array, "B J K C"],
    own_v_BJKC: Float[Array, "B J K C"],
    start_B: Int[Array, "B"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    tile: int | None = None,
    interpret: Interpret = False,
) -> Float[Array, "B K H C"]:
    """A block at start_B.. sees cached positions before start_B and its own keys and values; nothing is written.

    With a window a slot sees context no further back than a causal query at its position would; the block itself is
    never cut. Softmax and sums are float32. `tile`: positions a step, a multiple of 128.
    """
    kv_heads, span, channels = k_BJSC.shape[1:]
    tile = min(tile or default_tile(kv_heads, channels, k_BJSC.dtype.itemsize), span)

    def place(row, tile_index, used):
        return row, tile_index

    return _call(
        q_BKHC,
        (k_BJSC, v_BJSC),
        (own_k_BJKC, own_v_BJKC),
        (start_B.astype(jnp.int32),),
        place,
        span=span,
        tile=tile,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        interpret=interpret,
    )


def paged_block_attention(
    q_BKHC: Float[Array, "B K H C"],
    k_PJSC: Float[Array, "P J S C"],
    v_PJSC: Float[Array, "P J S C"],
    own_k_BJKC: Float[Array, "B J K C"],
    own_v_BJKC: Float[Array, "B J K C"],
    pages_BI: Int[Array, "B I"],
    start_B: Int[Array, "B"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    interpret: Interpret = False,
) -> Float[Array, "B K H C"]:
    """`block_attention` where position s of row b is in page pages_BI[b, s // S], S positions a page.

    Entries of the table that hold no visible context may be anything. A step reads one page, of all heads: pages of
    fewer than 128 positions waste steps, and heads of fewer than 128 channels need pages of a multiple of 128.
    """
    tile = k_PJSC.shape[2]

    def place(row, tile_index, used, table):
        return page_of(table, row, tile_index, used), 0

    return _call(
        q_BKHC,
        (k_PJSC, v_PJSC),
        (own_k_BJKC, own_v_BJKC),
        (start_B.astype(jnp.int32), pages_BI.astype(jnp.int32)),
        place,
        span=tile * pages_BI.shape[1],
        tile=tile,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        interpret=interpret,
    )


def sharded_block_attention(
    mesh: Mesh | AbstractMesh,
    q_BKHC: Array,
    k_BJSC: Array,
    v_BJSC: Array,
    own_k: Array,
    own_v: Array,
    start_B: Array,
    **how,
) -> Float[Array, "B K H C"]:
    """`block_attention` of arrays whose rows and heads are spread over `mesh`; every device works on its own."""
    queries, cache = sharding(mesh, "batch", None, "heads").spec, sharding(mesh, "batch", "kv_heads").spec
    return jax.shard_map(
        partial(block_attention, **how),
        mesh=mesh,
        in_specs=(queries, *(cache,) * 4, sharding(mesh, "batch").spec),
        out_specs=queries,
        check_vma=False,
    )(q_BKHC, k_BJSC, v_BJSC, own_k, own_v, start_B)


def sharded_paged_block_attention(
    mesh: Mesh | AbstractMesh,
    q_BKHC: Array,
    k_PJSC: Array,
    v_PJSC: Array,
    own_k: Array,
    own_v: Array,
    pages_BI: Array,
    start_B: Array,
    **how,
) -> Float[Array, "B K H C"]:
    """`paged_block_attention` over `mesh`. The devices of a row keep its pages: a table counts within their share."""
    queries, cache = sharding(mesh, "batch", None, "heads").spec, sharding(mesh, "batch", "kv_heads").spec
    rows = sharding(mesh, "batch").spec
    return jax.shard_map(
        partial(paged_block_attention, **how),
        mesh=mesh,
        in_specs=(queries, *(cache,) * 4, rows, rows),
        out_specs=queries,
        check_vma=False,
    )(q_BKHC, k_PJSC, v_PJSC, own_k, own_v, pages_BI, start_B)


def page_of(table_BI, row, tile_index, used):
    """The page to read; a row of which no page is used names none, and the first one always exists."""
    return jnp.where(used > 0, table_BI[row, tile_index], 0)


def tile_of_step(start, step, *, tile: int, window: int | None, last: int):
    """(tile a step reads, how many tiles are visible from `start`). Steps past them stay at the one before: a block
    that does not change is not moved again."""
    first, count = visible_tiles(start, tile, window)
    return jnp.clip(first + jnp.minimum(step, count - 1), 0, last), count


def visible_tiles(start, tile: int, window: int | None):
    """(first tile with visible context, how many there are) of a block at `start`."""
    lowest = 0 if window is None else jnp.maximum(start - window + 1, 0)
    first = lax.div(jnp.int32(lowest), jnp.int32(tile))
    count = lax.div(start - 1, jnp.int32(tile)) - first + 1
    return first, jnp.where(start > lowest, count, 0)


def steps_of(span: int, tile: int, window: int | None) -> int:
    """Steps that every row's tiles fit into."""
    most = pl.cdiv(span, tile)
    return max(1, most if window is None else min(most, (window + tile - 3) // tile + 1))


def _call(q_BKHC, cache, own, scalars, place, *, span, tile, scale, window, soft_cap, interpret):
    batch, slots, heads, channels = q_BKHC.shape
    kv_heads = cache[0].shape[1]
    group = heads // kv_heads
    rows = slots * group
    lanes_are_positions = channels < LANES
    if tile % LANES and tile != cache[0].shape[2]:
        raise ValueError(f"block attention: a tile of {tile} positions is no multiple of {LANES}")
    if lanes_are_positions:
        cache = tuple(x.swapaxes(2, 3) for x in cache)
    if not interpret:
        # A cache small enough to fit would be brought into VMEM whole, with all that no row sees.
        cache = tuple(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in cache)
    # Row r of a key/value head's queries is slot r // group.
    q_BJQC = q_BKHC.reshape(batch, slots, kv_heads, group, channels).swapaxes(1, 2)
    q_BJQC = q_BJQC.reshape(batch, kv_heads, rows, channels)
    # Whole sublanes, so that what lies behind the last slot is known to be zero.
    padded = -(-slots // 16) * 16
    own = tuple(jnp.pad(x, ((0, 0), (0, 0), (0, padded - slots), (0, 0))) for x in own)
    last_tile = pl.cdiv(span, tile) - 1

    def cached(row, step, start_ref, *tables):
        tile_index, used = tile_of_step(start_ref[row], step, tile=tile, window=window, last=last_tile)
        major, minor = place(row, tile_index, used, *tables)
        return (major, 0, 0, minor) if lanes_are_positions else (major, 0, minor, 0)

    def of_row(row, step, *_):
        return row, 0, 0, 0

    cached_spec = pl.BlockSpec(
        (1, kv_heads, channels, tile) if lanes_are_positions else (1, kv_heads, tile, channels), cached
    )
    own_spec = pl.BlockSpec((1, kv_heads, padded, channels), of_row)
    rows_spec = pl.BlockSpec((1, kv_heads, rows, channels), of_row)
    body = partial(
        _body,
        slots=slots,
        group=group,
        tile=tile,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        lanes_are_positions=lanes_are_positions,
    )
    read = sum(x.size * x.dtype.itemsize for x in (q_BJQC, *cache, *own))
    out_BJQC = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, steps_of(span, tile, window)),
            in_specs=[rows_spec, own_spec, own_spec, cached_spec, cached_spec],
            out_specs=rows_spec,
            scratch_shapes=[
                pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
                pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
                pltpu.VMEM((kv_heads, rows, channels), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_BJQC.shape, q_BKHC.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * q_BJQC.size * (span + slots),
            bytes_accessed=read + q_BJQC.size * q_BJQC.dtype.itemsize,
            transcendentals=batch * heads * slots * (span + slots),
        ),
        interpret=interpret,
        name="block_attention",
    )(*scalars, q_BJQC, *own, *cache)
    return out_BJQC.reshape(batch, kv_heads, slots, group, channels).swapaxes(1, 2).reshape(q_BKHC.shape)


def _body(start_ref, *refs, slots, group, tile, scale, window, soft_cap, lanes_are_positions):
    q_ref, own_k_ref, own_v_ref, k_ref, v_ref, out_ref, max_ref, sum_ref, mixed_ref = refs[-9:]
    kv_heads, rows = q_ref.shape[1:3]
    row, step = pl.program_id(0), pl.program_id(1)
    start = start_ref[row]
    first, count = visible_tiles(start, tile, window)
    # Float32 in, float32 multiplied: the default would round the operands to bfloat16.
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else lax.Precision.DEFAULT

    def product(a, b, contract):
        return lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)

    def scores_of(q, k, channel_axis):
        scores = product(q, k, ((1,), (channel_axis,))) * scale
        return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)

    @pl.when(step == 0)
    def _():
        # The block attends to itself.
        is_slot = lax.broadcasted_iota(jnp.int32, (rows, own_k_ref.shape[2]), 1) < slots
        for head in range(kv_heads):
            scores = jnp.where(is_slot, scores_of(q_ref[0, head], own_k_ref[0, head], 1), _MASKED)
            max_ref[head] = jnp.max(scores, axis=1, keepdims=True)
            weights = jnp.exp(scores - max_ref[head])
            sum_ref[head] = jnp.sum(weights, axis=1, keepdims=True)
            own_v = own_v_ref[0, head]
            mixed_ref[head] = product(weights.astype(own_v.dtype), own_v, ((1,), (0,)))

    def context(seen, position_seen):
        """One tile; seen: [rows, tile] or None where all of it is, position_seen: of the values' shape."""
        for head in range(kv_heads):
            v = v_ref[0, head]
            scores = scores_of(q_ref[0, head], k_ref[0, head], 0 if lanes_are_positions else 1)
            if seen is not None:
                # What nobody sees may be anything, NaN included, and zero times NaN is NaN.
                scores, v = jnp.where(seen, scores, _MASKED), jnp.where(position_seen, v, jnp.zeros_like(v))
            old_max = max_ref[head]
            new_max = jnp.maximum(old_max, jnp.max(scores, axis=1, keepdims=True))
            weights, kept = jnp.exp(scores - new_max), jnp.exp(old_max - new_max)
            max_ref[head] = new_max
            sum_ref[head] = kept * sum_ref[head] + jnp.sum(weights, axis=1, keepdims=True)
            mixed = product(weights.astype(v.dtype), v, ((1,), (1 if lanes_are_positions else 0,)))
            mixed_ref[head] = kept * mixed_ref[head] + mixed

    base = (first + step) * tile
    # A tile inside what every slot sees needs no mask.
    whole = base + tile <= start
    if window is not None:
        whole &= base > start + slots - 1 - window

    @pl.when((step < count) & whole)
    def _():
        context(None, None)

    @pl.when((step < count) & ~whole)
    def _():
        def positions(shape, axis):
            return base + lax.broadcasted_iota(jnp.int32, shape, axis)

        seen = positions((rows, tile), 1) < start
        position = positions(v_ref.shape[2:], 1 if lanes_are_positions else 0)
        position_seen = position < start
        if window is not None:
            slot = lax.div(lax.broadcasted_iota(jnp.int32, (rows, tile), 0), jnp.int32(group))
            seen &= positions((rows, tile), 1) > start + slot - window
            position_seen &= position > start - window
        context(seen, position_seen)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        for head in range(kv_heads):
            out_ref[0, head] = (mixed_ref[head] / sum_ref[head]).astype(out_ref.dtype)
