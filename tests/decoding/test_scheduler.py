"""How many drafts are verified, and what that may depend on."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.decoding.scheduler import FixedLength, Threshold, verified_lengths

jitted = jax.jit(verified_lengths, static_argnums=0)
confidences = st.lists(st.lists(st.integers(0, 4).map(lambda n: n / 4), min_size=3, max_size=3), min_size=2, max_size=2)


@settings(deadline=None)
@given(confidences, st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_a_threshold_stops_before_the_first_confidence_under_it(confidence_BK, threshold):
    lengths = jitted(Threshold(confidence=threshold), np.array(confidence_BK, np.float32))
    for row, length in zip(confidence_BK, lengths, strict=True):
        expected = 0
        while expected < 3 and row[expected] >= threshold:
            expected += 1
        assert length == expected


@pytest.mark.parametrize(
    "policy", [FixedLength(length=1), FixedLength(), Threshold(confidence=0.3), Threshold(confidence=0.7)]
)
def test_admitting_a_draft_looks_at_no_later_confidence(policy):
    rng = np.random.default_rng(0)
    before, after = rng.random((2, 500, 3)).astype(np.float32)
    for slot in range(3):
        mixed = np.where(np.arange(3) <= slot, before, after)
        admitted = [np.asarray(jitted(policy, confidence)) > slot for confidence in (before, mixed)]
        np.testing.assert_array_equal(*admitted)


def test_a_fixed_length_is_the_same_for_every_row_and_at_most_the_block():
    confidence_BK = jnp.zeros((2, 3))
    for length, expected in ((None, 3), (0, 0), (2, 2), (9, 3)):
        assert verified_lengths(FixedLength(length=length), confidence_BK).tolist() == [expected] * 2


def test_verified_drafts_fall_as_the_threshold_rises():
    confidence_BK = np.random.default_rng(0).random((200, 3)).astype(np.float32)
    totals = [int(jitted(Threshold(confidence=c), confidence_BK).sum()) for c in (0.0, 0.3, 0.6, 0.9)]
    assert totals[0] == 600
    assert all(more > fewer for more, fewer in pairwise(totals))


@pytest.mark.parametrize("confidence", [-0.1, 1.1, float("nan")])
def test_a_threshold_is_a_probability(confidence):
    with pytest.raises(ValueError, match=r"a confidence threshold lies in 0\.\.1"):
        Threshold(confidence=confidence)


def test_a_negative_length_is_refused():
    with pytest.raises(ValueError, match="cannot be negative"):
        FixedLength(length=-1)
