"""Attention of all draft blocks of a sequence at once, forward and backward, at the cost of what is visible (TPU).

Every query sees an interval of the context, from its document's start (or its window's) to its anchor, and its own
block both ways. Anchors ascend, so a tile of neighbouring blocks sees a short run of context tiles: others are neither
read nor computed. What a dense mask would cover is [A K, T + A K]; a block here meets no other block outside its tile.

Scores are computed transposed, [keys, queries]: what belongs to a query (interval, maximum, sum) is then one value a
lane. Blocks are padded to a multiple of 8 slots and tiles hold a multiple of 16 of them, which fills whole lanes.

The twin in plain code is in ops/training_attention.py.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, Mesh

from dspark_jax.core.arrays import Array, Float, Int
from dspark_jax.core.mesh import sharding
from dspark_jax.kernels.block_attention import LANES, Interpret

_MASKED, _ROWS = -1e30, 512
_SCORES = 1 << 18
# Many wide heads that share their keys need more than the 16 MiB that a step usually gets (a v4 has no more).
_WIDE, _WIDE_VMEM = 1 << 19, 40 << 20
_NN, _NT = ((1,), (0,)), ((1,), (1,))


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Static sizes. `blocks`: in a tile of queries; `slots`: of a padded block, `real` of them filled; `tile`: context
    positions of a step."""

    blocks: int
    slots: int
    real: int
    group: int
    tile: int
    scale: float
    interpret: Interpret

    @property
    def rows(self) -> int:
        return self.keys * self.group

    @property
    def keys(self) -> int:
        return self.blocks * self.slots


def default_tile(rows: int) -> int:
    """Context positions a step, of tiles of so many queries: 2 ** 18 scores, which are 1 MiB; 128 to 512."""
    return max(LANES, min(512, 1 << ((_SCORES // rows).bit_length() - 1)))


def training_attention(
    q_BQHC: Float[Array, "B Q H C"],
    k_BJTC: Float[Array, "B J T C"],
    v_BJTC: Float[Array, "B J T C"],
    own_k_BJQC: Float[Array, "B J Q C"],
    own_v_BJQC: Float[Array, "B J Q C"],
    anchors_BA: Int[Array, "B A"],
    doc_start_BA: Int[Array, "B A"],
    *,
    scale: float,
    window: int | None = None,
    tile: int | None = None,
    interpret: Interpret = False,
) -> Float[Array, "B Q H C"]:
    """Blocks of Q / A slots at their anchors see the context from doc_start_BA to before the anchor, and themselves.

    With a window a slot sees context no further back than a causal query at its position would. Anchors in any order
    are right; ascending ones are fast. Differentiable in queries, keys and values.
    """
    batch, queries, heads, channels = q_BQHC.shape
    kv_heads, length = k_BJTC.shape[1:3]
    anchors = anchors_BA.shape[1]
    real, group = queries // anchors, heads // kv_heads
    slots = -(-real // 8) * 8
    blocks = 16 * max(1, _ROWS // (16 * slots * group))
    tile = tile or default_tile(blocks * slots * group)
    plan = _Plan(blocks=blocks, slots=slots, real=real, group=group, tile=tile, scale=scale, interpret=interpret)
    more_blocks, more_slots, more_context = -anchors % blocks, slots - real, -length % tile

    def padded(x_BAK: Array) -> Array:
        rest = ((0, 0),) * (x_BAK.ndim - 3)
        return jnp.pad(x_BAK, ((0, 0), (0, more_blocks), (0, more_slots), *rest))

    def own(x_BJQC: Array) -> Array:
        x_BAKJC = padded(x_BJQC.swapaxes(1, 2).reshape(batch, anchors, real, kv_heads, channels))
        return jnp.moveaxis(x_BAKJC, 3, 1).reshape(batch, kv_heads, -1, channels)

    def context(x_BJTC: Array) -> Array:
        return jnp.pad(x_BJTC, ((0, 0), (0, 0), (0, more_context), (0, 0)))

    low_BAK = jnp.broadcast_to(doc_start_BA[..., None], (batch, anchors, real))
    if window is not None:
        low_BAK = jnp.maximum(low_BAK, anchors_BA[..., None] + jnp.arange(real) - window + 1)
    high_BAK = jnp.broadcast_to(anchors_BA[..., None], low_BAK.shape)

    def of_queries(x_BAK: Array) -> Array:
        return jnp.repeat(padded(x_BAK).reshape(batch, 1, -1), group, axis=2).astype(jnp.int32)

    q_BAKJGC = padded(q_BQHC.reshape(batch, anchors, real, kv_heads, group, channels))
    q_BJCR = q_BAKJGC.transpose(0, 3, 5, 1, 2, 4).reshape(batch, kv_heads, channels, -1)
    out_BJCR = _attend(
        plan,
        q_BJCR,
        context(k_BJTC),
        context(v_BJTC),
        own(own_k_BJQC),
        own(own_v_BJQC),
        of_queries(low_BAK),
        of_queries(high_BAK),
    )
    out = out_BJCR.reshape(batch, kv_heads, channels, anchors + more_blocks, slots, group)
    return out[:, :, :, :anchors, :real].transpose(0, 3, 4, 1, 5, 2).reshape(q_BQHC.shape)


def sharded_training_attention(
    mesh: Mesh | AbstractMesh, q: Array, k, v, own_k, own_v, anchors_BA, doc_start_BA, **how
):
    """`training_attention` of arrays whose rows and heads are spread over `mesh`; every device works on its own."""
    queries, keys = sharding(mesh, "batch", None, "heads").spec, sharding(mesh, "batch", "kv_heads").spec
    rows = sharding(mesh, "batch").spec
    return jax.shard_map(
        partial(training_attention, **how),
        mesh=mesh,
        in_specs=(queries, *(keys,) * 4, rows, rows),
        out_specs=queries,
        check_vma=False,
    )(q, k, v, own_k, own_v, anchors_BA, doc_start_BA)


def visible_tiles(low_BR: Array, high_BR: Array, rows: int, tile: int) -> tuple[Array, Array]:
    """(first context tile, how many) that each tile of `rows` queries needs, [B, query tiles] each."""
    low, high = (x.reshape(x.shape[0], -1, rows) for x in (low_BR, high_BR))
    lowest = jnp.min(jnp.where(high > low, low, jnp.iinfo(jnp.int32).max), axis=2)
    highest = jnp.max(jnp.where(high > low, high, 0), axis=2)
    first = jnp.where(highest > 0, lowest // tile, 0)
    return first, jnp.where(highest > 0, (highest - 1) // tile - first + 1, 0)


def seeing_tiles(first_BI: Array, count_BI: Array, context_tiles: int) -> tuple[Array, Array]:
    """The other way round: (first query tile, how many up to the last) that need each context tile."""
    tile = jnp.arange(context_tiles)[:, None]
    needs = (first_BI[:, None] <= tile) & (tile < (first_BI + count_BI)[:, None])
    first, last = jnp.argmax(needs, axis=2), needs.shape[2] - 1 - jnp.argmax(needs[..., ::-1], axis=2)
    return first.astype(jnp.int32), jnp.where(needs.any(axis=2), last - first + 1, 0).astype(jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, q, k, v, own_k, own_v, low, high):
    return _forward(plan, q, k, v, own_k, own_v, low, high)[0]


def _attend_forward(plan, q, k, v, own_k, own_v, low, high):
    out, logsum = _forward(plan, q, k, v, own_k, own_v, low, high)
    return out, (q, k, v, own_k, own_v, low, high, out, logsum)


def _attend_backward(plan, kept, d_out):
    q, k, v, own_k, own_v, low, high, out, logsum = kept
    # What a query's gradient to its scores has in common; float32 as the scores are.
    shift = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=2, keepdims=True)
    d_out = d_out.astype(q.dtype)
    d_q, d_own_k, d_own_v = _backward_queries(plan, q, k, v, own_k, own_v, low, high, d_out, logsum, shift)
    d_k, d_v = _backward_context(plan, q, k, v, low, high, d_out, logsum, shift)
    return d_q, d_k, d_v, d_own_k, d_own_v, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _product(a, b, contract):
    # Float32 in, float32 multiplied: the default would round the operands to bfloat16.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _context_scores(plan, k, q, tile_index, low, high):
    position = tile_index * plan.tile + lax.broadcasted_iota(jnp.int32, (plan.tile, plan.rows), 0)
    return jnp.where((position >= low) & (position < high), _product(k, q, _NN) * plan.scale, _MASKED)


def _own_scores(plan, own_k, q):
    key, row = (lax.broadcasted_iota(jnp.int32, (plan.keys, plan.rows), axis) for axis in (0, 1))
    same = lax.div(key, jnp.int32(plan.slots)) == lax.div(row, jnp.int32(plan.slots * plan.group))
    filled = lax.rem(key, jnp.int32(plan.slots)) < plan.real
    return jnp.where(same & filled, _product(own_k, q, _NN) * plan.scale, _MASKED)


class _Specs:
    """Blocks of a grid (row, head, query tile, step) whose steps walk over the context tiles of a query tile."""

    def __init__(self, plan: _Plan, channels: int):
        def at_queries(row, head, tile, step, *_):
            return row, head, 0, tile

        def at_keys(row, head, tile, step, *_):
            return row, head, tile, 0

        def walked(row, tile, step, first_ref, count_ref):
            return first_ref[row, tile] + jnp.clip(step, 0, jnp.maximum(count_ref[row, tile] - 1, 0))

        def at_context(row, head, tile, step, *tables):
            return row, head, walked(row, tile, step, *tables), 0

        def at_context_lanes(row, head, tile, step, *tables):
            return row, head, 0, walked(row, tile, step, *tables)

        self.queries = pl.BlockSpec((1, 1, channels, plan.rows), at_queries)
        self.value = pl.BlockSpec((1, 1, 1, plan.rows), at_queries)
        self.interval = pl.BlockSpec((1, 1, plan.rows), lambda row, head, tile, step, *_: (row, 0, tile))
        self.own = pl.BlockSpec((1, 1, plan.keys, channels), at_keys)
        self.own_lanes = pl.BlockSpec((1, 1, channels, plan.keys), at_queries)
        self.context = pl.BlockSpec((1, 1, plan.tile, channels), at_context)
        self.context_lanes = pl.BlockSpec((1, 1, channels, plan.tile), at_context_lanes)


def _call(body, plan, tables, grid, in_specs, out_specs, out_shapes, scratch, arguments, products, name):
    scores = grid[0] * grid[1] * arguments[0].shape[3] * plan.tile * grid[3]
    return pl.pallas_call(
        partial(body, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables), grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch
        ),
        out_shape=out_shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3 + ("arbitrary",),
            vmem_limit_bytes=_WIDE_VMEM if plan.rows * arguments[0].shape[2] >= _WIDE else None,
        ),
        cost_estimate=pl.CostEstimate(
            # Half of it: anchors lie in the middle of their sequence on average.
            flops=products * scores * arguments[0].shape[2],
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in arguments),
            transcendentals=scores // 2,
        ),
        interpret=plan.interpret,
        name=name,
    )(*tables, *arguments)


def _forward(plan, q, k, v, own_k, own_v, low, high):
    batch, kv_heads, channels, rows = q.shape
    tables = visible_tiles(low[:, 0], high[:, 0], plan.rows, plan.tile)
    specs = _Specs(plan, channels)
    return _call(
        _forward_body,
        plan,
        tables,
        (batch, kv_heads, rows // plan.rows, k.shape[2] // plan.tile),
        [specs.queries, specs.context, specs.context_lanes, specs.own, specs.own_lanes, specs.interval, specs.interval],
        [specs.queries, specs.value],
        [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, kv_heads, 1, rows), jnp.float32)],
        [pltpu.VMEM((size, plan.rows), jnp.float32) for size in (1, 1, channels)],
        (q, k, v.swapaxes(2, 3), own_k, own_v.swapaxes(2, 3), low, high),
        2,
        "training_attention",
    )


def _forward_body(plan, first_ref, count_ref, q_ref, k_ref, v_ref, own_k_ref, own_v_ref, low_ref, high_ref, *rest):
    out_ref, logsum_ref, max_ref, sum_ref, mixed_ref = rest
    row, tile, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    q = q_ref[0, 0]

    @pl.when(step == 0)
    def _():
        scores = _own_scores(plan, own_k_ref[0, 0], q)
        max_ref[...] = jnp.max(scores, axis=0, keepdims=True)
        weights = jnp.exp(scores - max_ref[...])
        sum_ref[...] = jnp.sum(weights, axis=0, keepdims=True)
        mixed_ref[...] = _product(own_v_ref[0, 0], weights.astype(q.dtype), _NN)

    @pl.when(step < count_ref[row, tile])
    def _():
        scores = _context_scores(plan, k_ref[0, 0], q, first_ref[row, tile] + step, low_ref[0], high_ref[0])
        old_max = max_ref[...]
        new_max = jnp.maximum(old_max, jnp.max(scores, axis=0, keepdims=True))
        weights, kept = jnp.exp(scores - new_max), jnp.exp(old_max - new_max)
        max_ref[...] = new_max
        sum_ref[...] = kept * sum_ref[...] + jnp.sum(weights, axis=0, keepdims=True)
        mixed_ref[...] = kept * mixed_ref[...] + _product(v_ref[0, 0], weights.astype(q.dtype), _NN)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        out_ref[0, 0] = (mixed_ref[...] / sum_ref[...]).astype(out_ref.dtype)
        logsum_ref[0, 0] = max_ref[...] + jnp.log(sum_ref[...])


def _backward_queries(plan, q, k, v, own_k, own_v, low, high, d_out, logsum, shift):
    batch, kv_heads, channels, rows = q.shape
    tables = visible_tiles(low[:, 0], high[:, 0], plan.rows, plan.tile)
    specs = _Specs(plan, channels)
    return _call(
        _backward_queries_body,
        plan,
        tables,
        (batch, kv_heads, rows // plan.rows, k.shape[2] // plan.tile),
        [
            *(specs.queries, specs.context, specs.context_lanes, specs.context, specs.own, specs.own_lanes, specs.own),
            *(specs.interval, specs.interval, specs.queries, specs.value, specs.value),
        ],
        [specs.queries, specs.own, specs.own],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, own_k, own_v)],
        [pltpu.VMEM((channels, plan.rows), jnp.float32)],
        (q, k, k.swapaxes(2, 3), v, own_k, own_k.swapaxes(2, 3), own_v, low, high, d_out, logsum, shift),
        3,
        "training_attention_dq",
    )


def _backward_queries_body(
    plan, first_ref, count_ref, q_ref, k_ref, k_lanes_ref, v_ref, own_k_ref, own_lanes_ref, *rest
):
    own_v_ref, low_ref, high_ref, d_out_ref, logsum_ref, shift_ref, d_q_ref, d_own_k_ref, d_own_v_ref, sum_ref = rest
    row, tile, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    q, d_out = q_ref[0, 0], d_out_ref[0, 0]

    def gradients(scores, v):
        """(weights, gradient of the products behind the scores)"""
        weights = jnp.exp(scores - logsum_ref[0, 0])
        d_scores = weights * (_product(v, d_out, _NN) - shift_ref[0, 0]) * plan.scale
        return weights.astype(q.dtype), d_scores.astype(q.dtype)

    @pl.when(step == 0)
    def _():
        weights, d_scores = gradients(_own_scores(plan, own_k_ref[0, 0], q), own_v_ref[0, 0])
        d_own_v_ref[0, 0] = _product(weights, d_out, _NT).astype(d_own_v_ref.dtype)
        d_own_k_ref[0, 0] = _product(d_scores, q, _NT).astype(d_own_k_ref.dtype)
        sum_ref[...] = _product(own_lanes_ref[0, 0], d_scores, _NN)

    @pl.when(step < count_ref[row, tile])
    def _():
        scores = _context_scores(plan, k_ref[0, 0], q, first_ref[row, tile] + step, low_ref[0], high_ref[0])
        _, d_scores = gradients(scores, v_ref[0, 0])
        sum_ref[...] += _product(k_lanes_ref[0, 0], d_scores, _NN)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        d_q_ref[0, 0] = sum_ref[...].astype(d_q_ref.dtype)


def _backward_context(plan, q, k, v, low, high, d_out, logsum, shift):
    batch, kv_heads, channels, rows = q.shape
    context_tiles = k.shape[2] // plan.tile
    tables = seeing_tiles(*visible_tiles(low[:, 0], high[:, 0], plan.rows, plan.tile), context_tiles)

    def walked(row, tile, step, first_ref, count_ref):
        return first_ref[row, tile] + jnp.clip(step, 0, jnp.maximum(count_ref[row, tile] - 1, 0))

    def at_queries(row, head, tile, step, *tables):
        return row, head, 0, walked(row, tile, step, *tables)

    queries, value = (pl.BlockSpec((1, 1, size, plan.rows), at_queries) for size in (channels, 1))
    interval = pl.BlockSpec((1, 1, plan.rows), lambda b, head, tile, step, *t: (b, 0, walked(b, tile, step, *t)))
    context = pl.BlockSpec((1, 1, plan.tile, channels), lambda row, head, tile, step, *_: (row, head, tile, 0))
    return _call(
        _backward_context_body,
        plan,
        tables,
        (batch, kv_heads, context_tiles, rows // plan.rows),
        [queries, context, context, interval, interval, queries, value, value],
        [context, context],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        [pltpu.VMEM((plan.tile, channels), jnp.float32)] * 2,
        (q, k, v, low, high, d_out, logsum, shift),
        4,
        "training_attention_dkv",
    )


def _backward_context_body(plan, first_ref, count_ref, q_ref, k_ref, v_ref, low_ref, high_ref, d_out_ref, *rest):
    logsum_ref, shift_ref, d_k_ref, d_v_ref, k_sum_ref, v_sum_ref = rest
    row, tile, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _():
        k_sum_ref[...] = jnp.zeros_like(k_sum_ref)
        v_sum_ref[...] = jnp.zeros_like(v_sum_ref)

    @pl.when(step < count_ref[row, tile])
    def _():
        q, d_out = q_ref[0, 0], d_out_ref[0, 0]
        scores = _context_scores(plan, k_ref[0, 0], q, tile, low_ref[0], high_ref[0])
        weights = jnp.exp(scores - logsum_ref[0, 0])
        d_scores = weights * (_product(v_ref[0, 0], d_out, _NN) - shift_ref[0, 0]) * plan.scale
        v_sum_ref[...] += _product(weights.astype(q.dtype), d_out, _NT)
        k_sum_ref[...] += _product(d_scores.astype(q.dtype), q, _NT)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        d_k_ref[0, 0] = k_sum_ref[...].astype(d_k_ref.dtype)
        d_v_ref[0, 0] = v_sum_ref[...].astype(d_v_ref.dtype)
