"""How many drafts are verified, and what that may depend on."""

from itertools import pairwise, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.decoding.scheduler import EarlyStop, FixedLength, Guide, Threshold, TwoStep, verified_lengths

ROWS, BLOCK = 3, 3
MOST = ROWS * (BLOCK + 1)
# Few values, so that ties are common.
confidences = st.lists(
    st.lists(st.integers(0, 4).map(lambda n: n / 4), min_size=BLOCK, max_size=BLOCK), min_size=ROWS, max_size=ROWS
)
curves = st.lists(st.integers(1, 50), min_size=MOST + 1, max_size=MOST + 1)
masks = st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)
lengths_of = jax.jit(verified_lengths, static_argnums=(0, 3))


def guide(batch, block=BLOCK, **changes):
    changes = {name: jnp.asarray(value) for name, value in changes.items()}
    return Guide.unguided(batch, block).replace(**changes)


def jitted(policy, confidence_BK, **changes):
    """The lengths that a policy gives, TwoStep's with a budget of two drafts a row, EarlyStop's on a flat curve."""
    confidence_BK = np.asarray(confidence_BK, np.float32)
    batch, block = confidence_BK.shape
    sizes = (3 * batch,) if isinstance(policy, TwoStep) else ()
    flat = np.linspace(2, 1, batch * (block + 1) + 1, dtype=np.float32)
    return np.asarray(lengths_of(policy, confidence_BK, guide(batch, block, **({"rates_N": flat} | changes)), sizes))


def literal_early_stop(confidence_BK, live, pinned, rates):
    """Algorithm 1, line by line; drafts of pinned rows are admitted before it begins."""
    survival = np.cumprod(np.asarray(confidence_BK, np.float32), axis=1)
    requests = [row for row in range(len(live)) if live[row]]
    candidates = sorted(
        (0 if pinned[row] else 1, 0 if pinned[row] else -survival[row, k], row, k)
        for row in requests
        for k in range(BLOCK)
    )
    lengths, expected, tokens = [0] * len(live), np.float32(len(requests)), len(requests)
    best = expected * np.float32(rates[tokens])
    for free, _, row, k in candidates:
        throughput = (expected + survival[row, k]) * np.float32(rates[tokens + 1])
        if free and not throughput > best:
            break
        lengths[row] += 1
        expected, tokens, best = expected + survival[row, k], tokens + 1, throughput
    return lengths


@settings(deadline=None, max_examples=300)
@given(confidences, curves, masks, masks)
def test_early_stop_is_algorithm_1_on_any_curve(confidence_BK, rates, live, pinned):
    pinned = [a and b for a, b in zip(live, pinned, strict=True)]
    found = jitted(
        EarlyStop(fill=False),
        confidence_BK,
        rates_N=np.float32(rates),
        live_B=np.array(live),
        pinned_B=np.array(pinned),
    )
    assert found.tolist() == literal_early_stop(confidence_BK, live, pinned, rates)


@settings(deadline=None, max_examples=100)
@given(confidences, st.integers(1, 20), st.integers(0, 10), st.integers(0, 5))
def test_early_stop_is_the_best_of_all_lengths_where_cost_is_convex(confidence_BK, fixed, knee, slope):
    tokens = np.arange(MOST + 1)
    rates = 1 / (fixed + slope * np.maximum(tokens - knee, 0.0))
    survival = np.cumprod(confidence_BK, axis=1)

    def throughput(lengths):
        expected = ROWS + sum(survival[row, :length].sum() for row, length in enumerate(lengths))
        return expected * rates[ROWS + sum(lengths)]

    found = jitted(EarlyStop(fill=False), confidence_BK, rates_N=np.float32(rates))
    best = max(map(throughput, product(range(BLOCK + 1), repeat=ROWS)))
    assert throughput(found) == pytest.approx(best, rel=1e-5)


@settings(deadline=None, max_examples=100)
@given(confidences, curves)
def test_filling_takes_the_next_in_rank_up_to_the_edge_of_the_bucket(confidence_BK, rates):
    sizes = (3, 6, 9, 12)
    literal = sum(literal_early_stop(confidence_BK, [True] * ROWS, [False] * ROWS, rates))
    found = np.asarray(
        lengths_of(EarlyStop(), np.float32(confidence_BK), guide(ROWS, rates_N=np.float32(rates)), sizes)
    )
    edge = min(size for size in sizes if size >= ROWS + literal)
    assert ROWS + found.sum() == (edge if literal else ROWS)
    assert_best_ranked(confidence_BK, found)


def assert_best_ranked(confidence_BK, lengths):
    """No draft left out outranks one taken: by survival, ties by row and slot."""
    survival = np.cumprod(np.float32(confidence_BK), axis=1)
    taken = np.arange(BLOCK) < np.asarray(lengths)[:, None]
    rank = [(-survival[row, k], row, k) for row, k in np.ndindex(survival.shape)]
    ins, outs = ([r for r, t in zip(rank, taken.ravel(), strict=True) if t is np.bool_(want)] for want in (True, False))
    assert not ins or not outs or max(ins) < min(outs)


@settings(deadline=None, max_examples=100)
@given(confidences, st.integers(ROWS, MOST))
def test_a_budget_goes_to_the_drafts_that_rank_highest(confidence_BK, budget):
    found = np.asarray(lengths_of(TwoStep(), np.float32(confidence_BK), guide(ROWS), (budget,)))
    assert ROWS + found.sum() == budget
    assert_best_ranked(confidence_BK, found)


def test_dead_rows_verify_nothing_and_pinned_rows_everything():
    confidence_BK = np.full((ROWS, BLOCK), 0.1, np.float32)
    for policy in (FixedLength(length=1), Threshold(confidence=0.5), EarlyStop(fill=False), TwoStep()):
        found = jitted(policy, confidence_BK, live_B=[True, False, True], pinned_B=[False, False, True])
        assert found[1:].tolist() == [0, BLOCK], policy


def test_early_stop_without_a_curve_is_an_error():
    with pytest.raises(ValueError, match="needs a step curve"):
        verified_lengths(EarlyStop(), jnp.ones((1, 2)), guide(1, 2), ())


@settings(deadline=None)
@given(confidences, st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_a_threshold_stops_before_the_first_confidence_under_it(confidence_BK, threshold):
    lengths = jitted(Threshold(confidence=threshold), np.array(confidence_BK, np.float32))
    for row, length in zip(confidence_BK, lengths, strict=True):
        expected = 0
        while expected < BLOCK and row[expected] >= threshold:
            expected += 1
        assert length == expected


@pytest.mark.parametrize(
    "policy",
    [
        FixedLength(length=1),
        Threshold(confidence=0.3),
        Threshold(confidence=0.7),
        EarlyStop(fill=False),
        EarlyStop(),
        TwoStep(),
    ],
)
def test_admitting_a_draft_looks_at_no_later_confidence_of_its_request(policy):
    """Another batch, other curves; the row that is watched sits between others."""
    rng = np.random.default_rng(0)
    sizes = (8,) if isinstance(policy, TwoStep) else (3, 6, 8, 12)
    seen = set()
    for _ in range(300):
        before, after = rng.choice([0.2, 0.5, 0.5, 0.9, 1.0], (2, ROWS, BLOCK)).astype(np.float32)
        told = guide(ROWS, rates_N=np.sort(rng.random(MOST + 1).astype(np.float32))[::-1].copy())
        row = rng.integers(ROWS)
        for slot in range(BLOCK):
            mixed = before.copy()
            mixed[row, slot + 1 :] = after[row, slot + 1 :]
            one, other = (np.asarray(lengths_of(policy, x, told, sizes))[row] > slot for x in (before, mixed))
            assert one == other
            seen.add(bool(one))
    assert seen == {True, False}


def test_a_fixed_length_is_the_same_for_every_row_and_at_most_the_block():
    confidence_BK = jnp.zeros((2, 3))
    for length, expected in ((None, 3), (0, 0), (2, 2), (9, 3)):
        assert jitted(FixedLength(length=length), confidence_BK).tolist() == [expected] * 2


def test_verified_drafts_fall_as_the_threshold_rises():
    confidence_BK = np.random.default_rng(0).random((200, 3)).astype(np.float32)
    totals = [int(jitted(Threshold(confidence=c), confidence_BK).sum()) for c in (0.0, 0.3, 0.6, 0.9)]
    assert totals[0] == 600
    assert all(more > fewer for more, fewer in pairwise(totals))


@pytest.mark.parametrize("confidence", [-0.1, 1.1, float("nan")])
def test_a_threshold_is_a_probability(confidence):
    with pytest.raises(ValueError, match=r"a confidence threshold lies in 0\.\.1"):
        Threshold(confidence=confidence)


@pytest.mark.parametrize(
    "policy", [lambda: FixedLength(length=-1), lambda: TwoStep(min_gain=-1.0), lambda: TwoStep(rest=-1)]
)
def test_negative_settings_are_refused(policy):
    with pytest.raises(ValueError, match="cannot be negative"):
        policy()
