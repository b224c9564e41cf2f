"""New keys and values, packed on one axis, into the pages of their rows (TPU).

A position of a page is whole tiles, so it goes where it belongs without a look at what lies around it. Every row's
entries go as they lie, many rows' at once; where they cross from a page to the next they go one by one.

The twin in plain code is in ops/pages.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dspark_jax.core.arrays import Array, Float, Int
from dspark_jax.kernels.block_attention import Interpret

_PIECE = 32


def write_pages(
    pages_PSXC: Float[Array, "P S X C"],
    new_NXC: Float[Array, "N X C"],
    pages_BI: Int[Array, "B I"],
    first_B: Int[Array, "B"],
    start_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
    *,
    width: int,
    interpret: Interpret = False,
) -> Float[Array, "P S X C"]:
    """Row b's count_B[b] entries from first_B[b] on at its positions start_B[b].., s being in page pages_BI[b, s // S].

    A row with entries has `width` positions free, start + width <= I * S, and those after its own become scratch; a
    row without writes nothing. No two rows with entries share a page that they write to.
    """
    batch, table = pages_BI.shape
    size, kind = pages_PSXC.shape[1], pages_PSXC.dtype
    # Of the last rows more is read than they have.
    missing = max(0, min(width - 1, batch * width - new_NXC.shape[0]))
    new_NXC = jnp.pad(new_NXC.astype(kind), ((0, missing), (0, 0), (0, 0)))
    if not interpret:
        # Pages few enough to fit would be brought into VMEM, and back.
        pages_PSXC = pltpu.with_memory_space_constraint(pages_PSXC, pltpu.HBM)
    piece = next(count for count in range(min(width, size, _PIECE), 0, -1) if width % count == 0)
    moved = 2 * batch * width * new_NXC[0].size * kind.itemsize
    written = pl.pallas_call(
        partial(_body, batch=batch, table=table, size=size, width=width, piece=piece),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(pages_PSXC.shape, kind),
        input_output_aliases={5: 0},
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=moved, transcendentals=0),
        interpret=interpret,
        name="page_write",
    )(
        pages_BI.reshape(-1).astype(jnp.int32),
        *(x.astype(jnp.int32) for x in (first_B, start_B, count_B)),
        new_NXC,
        pages_PSXC,
    )
    # libtpu refuses arrays held in HBM as the very results of a program.
    return written if interpret else lax.optimization_barrier(written)


def _body(pages_ref, first_ref, start_ref, count_ref, new_ref, _, cache_ref, done, *, batch, table, size, width, piece):
    pieces = width // piece

    def each(act):
        """`act` on the copy of every piece of every row."""

        @pl.loop(0, batch * pieces)
        def _(index):
            row, slot = lax.div(index, jnp.int32(pieces)), lax.rem(index, jnp.int32(pieces)) * piece
            entry, position = first_ref[row] + slot, start_ref[row] + slot
            there = slot < count_ref[row]
            inside = lax.rem(position, jnp.int32(size)) + piece <= size

            def copy(ahead, count):
                at = position + ahead
                page = pages_ref[row * table + lax.div(at, jnp.int32(size))]
                place = cache_ref.at[page, pl.ds(lax.rem(at, jnp.int32(size)), count)]
                return pltpu.make_async_copy(new_ref.at[pl.ds(entry + ahead, count)], place, done)

            @pl.when(there & inside)
            def _():
                act(copy(0, piece))

            @pl.when(there & ~inside)
            def _():
                @pl.loop(0, piece)
                def _(ahead):
                    act(copy(ahead, 1))

    each(lambda copy: copy.start())
    each(lambda copy: copy.wait())
