"""New keys and values of every row into its place in a cache, without a loop over rows and without a copy (TPU).

Memory is written in whole tiles and a row's place is on no tile's edge. So every row's window of tiles is fetched, many
rows' at once, the new entries are turned into place and blended in, and the window goes back where it came from.

The twin in plain code is nn.cache.write.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dspark_jax.core.arrays import Array, Float, Int
from dspark_jax.kernels.block_attention import LANES, Interpret

_SUBLANES = 16
_STEP_BYTES = 1 << 21

Pair = tuple[Array, Array]


def fits(cache_BJSC: Array, count: int) -> bool:
    """Whether `count` entries a row can be written into such a cache: it ends on a tile's edge, windows are small."""
    _, kv_heads, span, channels = cache_BJSC.shape
    edge, window = _edge(channels), _window(channels, count)
    whole = span % edge == 0 and window <= span and channels % (_SUBLANES if channels < LANES else LANES) == 0
    return whole and _row_bytes(kv_heads, window, channels, cache_BJSC.dtype.itemsize) <= _STEP_BYTES


def write_pair(
    keys_BJSC: Float[Array, "B J S C"],
    values_BJSC: Float[Array, "B J S C"],
    new_keys_BJTC: Float[Array, "B J T C"],
    new_values_BJTC: Float[Array, "B J T C"],
    start_B: Int[Array, "B"],
    *,
    interpret: Interpret = False,
) -> tuple[Float[Array, "B J S C"], Float[Array, "B J S C"]]:
    """Row b's new entries at positions start_B[b]..start_B[b]+T-1; the caches have to `fits`. start + T <= S."""
    batch, kv_heads, span, channels = keys_BJSC.shape
    count, dtype = new_keys_BJTC.shape[2], keys_BJSC.dtype
    # As in block attention: heads of fewer channels than lanes lie with positions along the lanes.
    turned = channels < LANES
    window = _window(channels, count)
    rows = _rows_a_step(batch, _row_bytes(kv_heads, window, channels, dtype.itemsize))

    def laid(x: Array) -> Array:
        return x.swapaxes(2, 3) if turned else x

    caches = tuple(map(laid, (keys_BJSC, values_BJSC)))
    padding = ((0, 0), (0, 0), (0, window - count), (0, 0))
    news = tuple(laid(jnp.pad(x.astype(dtype), padding)) for x in (new_keys_BJTC, new_values_BJTC))
    if not interpret:
        # A cache small enough to fit would be brought into VMEM whole, and back.
        caches = tuple(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in caches)
    tile = laid(jnp.zeros((1, kv_heads, window, channels), jnp.int8)).shape[1:]
    new_spec = pl.BlockSpec((rows, *tile), lambda step, *_: (step, 0, 0, 0))
    cache_spec = pl.BlockSpec(memory_space=pltpu.HBM)
    moved = 2 * batch * _row_bytes(kv_heads, window, channels, dtype.itemsize)
    written = pl.pallas_call(
        partial(_body, rows=rows, count=count, span=span, edge=_edge(channels), turned=turned),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch // rows,),
            in_specs=[new_spec, new_spec, cache_spec, cache_spec],
            out_specs=[cache_spec, cache_spec],
            scratch_shapes=[pltpu.VMEM((2, rows, *tile), dtype), pltpu.SemaphoreType.DMA((2, rows))],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches],
        input_output_aliases={3: 0, 4: 1},
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=moved, transcendentals=0),
        interpret=interpret,
        name="cache_write",
    )(start_B.astype(jnp.int32), *news, *caches)
    # libtpu refuses arrays held in HBM as the very results of a program.
    keys, values = written if interpret else lax.optimization_barrier(written)
    return laid(keys), laid(values)


def _edge(channels: int) -> int:
    """Positions between the edges that a window may start at."""
    return LANES if channels < LANES else _SUBLANES


def _window(channels: int, count: int) -> int:
    """Positions from edge to edge that hold `count` in a row, wherever they start."""
    return _edge(channels) * (pl.cdiv(count - 1, _edge(channels)) + 1)


def _row_bytes(kv_heads: int, window: int, channels: int, itemsize: int) -> int:
    """Of one row's windows, keys and values."""
    return 2 * kv_heads * window * channels * itemsize


def _rows_a_step(batch: int, row_bytes: int) -> int:
    most = max(1, min(batch, _STEP_BYTES // row_bytes))
    return next(rows for rows in range(most, 0, -1) if batch % rows == 0)


def _body(start_ref, *refs, rows, count, span, edge, turned):
    news, caches, (held_ref, done) = refs[:2], refs[4:6], refs[6:]
    kv_heads, window = held_ref.shape[2], held_ref.shape[4 if turned else 3]
    first_row = pl.program_id(0) * rows

    def place(row):
        """(first position of the row's window, where in it the new entries start)"""
        start = start_ref[first_row + row]
        first = jnp.minimum(lax.div(start, jnp.int32(edge)) * edge, span - window)
        return pl.multiple_of(first, edge), start - first

    def copies(row, back):
        positions = pl.ds(place(row)[0], window)
        for which, cache_ref in enumerate(caches):
            at = (first_row + row, slice(None), *((slice(None), positions) if turned else (positions, slice(None))))
            here, there = held_ref.at[which, row], cache_ref.at[at]
            yield pltpu.make_async_copy(*((here, there) if back else (there, here)), done.at[which, row])

    def blend(row):
        _, shift = place(row)
        axis = 1 if turned else 0
        offset = lax.broadcasted_iota(jnp.int32, held_ref.shape[3:], axis) - shift
        is_new = (offset >= 0) & (offset < count)
        for which, new_ref in enumerate(news):
            for head in range(kv_heads):
                # Only whole words can be turned.
                new = pltpu.roll(new_ref[row, head].astype(jnp.float32), shift, axis)
                held = held_ref[which, row, head]
                held_ref[which, row, head] = jnp.where(is_new, new.astype(held.dtype), held)

    @pl.loop(0, rows)
    def _(row):
        for copy in copies(row, back=False):
            copy.start()

    @pl.loop(0, rows)
    def _(row):
        for copy in copies(row, back=False):
            copy.wait()
        blend(row)
        for copy in copies(row, back=True):
            copy.start()

    @pl.loop(0, rows)
    def _(row):
        for copy in copies(row, back=True):
            copy.wait()
