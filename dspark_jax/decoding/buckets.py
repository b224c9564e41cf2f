"""The few shapes a decode state takes, and the device functions that move rows between them."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.arrays import Array, Int
from dspark_jax.decoding.round import DecodeState
from dspark_jax.nn.cache import Cache

SMALLEST_SPAN = 256
_TILE = 128


class Passes(NamedTuple):
    """How prompts are cut for a device."""

    sizes: tuple[int, ...]
    """Tokens of a pass, falling: a compiled program each."""
    cost: int
    """Tokens that take as long as one pass more does."""


FEW_PASSES = Passes(sizes=(512, 128, 32), cost=512)
"""Where a launch takes as long as many tokens."""
LITTLE_PADDING = Passes(sizes=(512, 128, 64, 32), cost=35)
"""Where every token counts. On two CPU cores a pass of n tokens of the default model took as long as n + 35."""


def row_bucket(rows: int, max_batch: int) -> int:
    """Rows of the state that holds `rows` live requests: a power of two, or max_batch."""
    return min(_power_of_two(rows), max_batch)


def verify_sizes(rows: int, block: int) -> tuple[int, ...]:
    """Token counts over all rows that a round may be compiled for: 1, 2, 3, 4, 6, 8, 12, ... tokens a row, up to
    block + 1."""
    widths = sorted({1 << n for n in range(block)} | {3 << n for n in range(block)} | {block + 1})
    return tuple(rows * width for width in widths if width <= block + 1)


def switch_sizes(rows: int, block: int) -> tuple[int, ...]:
    """The fewer ones of a program that holds them all: 1, 2, 4, ... tokens a row, and block + 1."""
    return tuple(
        size
        for size in verify_sizes(rows, block)
        if size // rows & (size // rows - 1) == 0 or size == rows * (block + 1)
    )


def span_bucket(positions: int, largest: int) -> int:
    """Span of the state that holds `positions`: a power of two from 256 up, or `largest`."""
    return min(max(_power_of_two(positions), SMALLEST_SPAN), largest)


def whole_span(max_len: int, block: int) -> int:
    """Span of a state whose rows hold max_len tokens and a block after them.

    Long ones end on the edge of a tile, as kernels that write in tiles need.
    """
    span = max_len + block + 1
    return span if span < SMALLEST_SPAN else -(-span // _TILE) * _TILE


def prefill_chunks(lengths: Sequence[int], span: int, passes: Passes) -> list[tuple[np.ndarray, int]]:
    """(start of each row, chunk length) of the passes that take in prompts of these lengths.

    Rows that end early redo their last window, which writes the same entries again; a chunk never reaches past the
    span. A row shorter than its chunk has scratch after its end.
    """
    lengths_B = np.asarray(lengths)
    sizes = tuple(sorted({min(size, span) for size in passes.sizes}, reverse=True))
    whole, rest = divmod(max(lengths), sizes[0])
    chunks, done = [], 0
    for size in sizes[:1] * whole + _cheapest_cover(rest, Passes(sizes, passes.cost)):
        chunks.append((np.maximum(np.minimum(done, lengths_B - size), 0).astype(np.int32), size))
        done += size
    return chunks


@cache
def _cheapest_cover(tokens: int, passes: Passes) -> tuple[int, ...]:
    """Sizes of passes, falling, that take in so many tokens."""
    if tokens <= 0:
        return ()
    covers = [
        (size, *_cheapest_cover(tokens - size, Passes(passes.sizes[index:], passes.cost)))
        for index, size in enumerate(passes.sizes)
    ]
    return min(covers, key=lambda cover: sum(cover) + passes.cost * len(cover))


def regroup(state: DecodeState, picked_B: Int[Array, "B"], span: int) -> DecodeState:
    """The picked rows of `state` (in that order, repeats allowed) in a state of another span."""

    def move(leaf: Any) -> Any:
        return leaf.picked(picked_B, span) if _is_cache(leaf) else leaf[picked_B]

    return jax.tree.map(move, state, is_leaf=_is_cache)


def insert(state: DecodeState, group: DecodeState, rows_G: Int[Array, "G"]) -> DecodeState:
    """`state` with its rows `rows_G` replaced by those of `group`; a row index past the end drops that row."""

    def put(old: Any, new: Any) -> Any:
        return old.inserted(new, rows_G) if _is_cache(old) else old.at[rows_G].set(new, mode="drop")

    return jax.tree.map(put, state, group, is_leaf=_is_cache)


def request_keys(seeds: Sequence[int]) -> Array:
    """One PRNG key for each 64-bit seed; integers that differ modulo 2**64 never share a key."""
    words = [((seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF) for seed in seeds]
    return jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl="threefry2x32")


def _is_cache(leaf: Any) -> bool:
    return isinstance(leaf, Cache)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
