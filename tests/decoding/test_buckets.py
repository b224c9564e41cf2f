"""Shapes: few, large enough, and covered by the prefill plan."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.decoding.buckets import (
    FEW_PASSES,
    LITTLE_PADDING,
    SMALLEST_SPAN,
    Passes,
    prefill_chunks,
    request_keys,
    row_bucket,
    span_bucket,
    whole_span,
)

PASSES = (FEW_PASSES, LITTLE_PADDING, Passes(sizes=(48, 16), cost=0))


@given(st.integers(1, 200), st.integers(1, 200))
def test_rows_are_a_power_of_two_or_the_maximum(rows, max_batch):
    bucket = row_bucket(rows, max_batch)
    assert bucket <= max_batch
    assert bucket >= min(rows, max_batch)
    assert bucket == max_batch or (bucket & (bucket - 1) == 0 and bucket < 2 * rows)


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_spans_are_a_power_of_two_or_the_largest(positions, largest):
    bucket = span_bucket(positions, largest)
    assert min(positions, largest) <= bucket <= largest
    if bucket != largest:
        assert bucket & (bucket - 1) == 0
        assert bucket == SMALLEST_SPAN or bucket < 2 * positions


@given(st.integers(1, 10_000), st.integers(1, 16))
def test_a_whole_span_holds_everything_and_a_long_one_ends_on_a_tiles_edge(max_len, block):
    span = whole_span(max_len, block)
    assert 0 <= span - (max_len + block + 1) < 128
    assert span < SMALLEST_SPAN or span % 128 == 0


@settings(max_examples=300)
@given(st.data())
def test_prefill_covers_every_position_before_the_anchor_in_order_and_stays_in_the_span(data):
    span = data.draw(st.sampled_from([37, 256, 306, 512, 2048]))
    lengths = data.draw(st.lists(st.integers(0, span), min_size=1, max_size=5))
    chunks = prefill_chunks(lengths, span, data.draw(st.sampled_from(PASSES)))
    covered = np.zeros(len(lengths), int)
    for start_B, size in chunks:
        assert (start_B >= 0).all()
        assert (start_B + size <= span).all()
        # No gap: a window attends to everything before it.
        assert (start_B <= covered).all()
        covered = np.maximum(covered, start_B + size)
        # A row that ends inside its window is written there again, never past its end if it is as long as the window.
        assert all(start + size <= max(length, size) for start, length in zip(start_B, lengths, strict=True))
    assert (covered >= lengths).all()
    # No pass for nothing: without the last one the longest would not be taken in.
    assert not chunks or sum(size for _, size in chunks[:-1]) < max(lengths)


@pytest.mark.parametrize("passes", PASSES)
def test_no_other_passes_take_in_a_prompt_at_less_cost(passes):
    cheapest = [0]
    for length in range(1, 1200):
        cheapest.append(min(size + passes.cost + cheapest[max(length - size, 0)] for size in passes.sizes))
        sizes = [size for _, size in prefill_chunks([length], 2048, passes)]
        assert sum(sizes) + passes.cost * len(sizes) == cheapest[length]


@pytest.mark.parametrize(
    ("length", "few", "little"),
    [(60, [128], [64]), (150, [512], [128, 32]), (300, [512], [128, 128, 64]), (560, [512, 128], [512, 64])],
)
def test_on_a_cpu_there_are_more_passes_and_less_padding(length, few, little):
    sizes = [[size for _, size in prefill_chunks([length], 2048, passes)] for passes in (FEW_PASSES, LITTLE_PADDING)]
    assert sizes == [few, little]


def test_prefill_of_a_single_token_takes_no_pass():
    assert prefill_chunks([0, 0], 64, LITTLE_PADDING) == []


@pytest.mark.parametrize("passes", PASSES)
def test_chunk_sizes_are_few(passes):
    for span in (200, 256, 2048):
        sizes = {size for length in range(1, span) for _, size in prefill_chunks([length], span, passes)}
        assert len(sizes) <= len(passes.sizes)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=2, max_size=2))
def test_seeds_share_a_key_only_when_they_are_the_same_64_bits(seeds):
    first, second = np.asarray(jax.random.key_data(request_keys(seeds)))
    assert (first == second).all() == ((seeds[0] - seeds[1]) % 2**64 == 0)


@pytest.mark.parametrize("seeds", [[0, 2**32], [1, 2**32 + 1], [5, -5]])
def test_seeds_beyond_32_bits_differ(seeds):
    first, second = np.asarray(jax.random.key_data(request_keys(seeds)))
    assert (first != second).any()
