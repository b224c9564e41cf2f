"""Metrics equal their definitions in plain loops, and values known beforehand."""

from itertools import pairwise

import numpy as np
import pytest

from dspark_jax.decoding.reliability import BINS, MASSES, area_under_roc, equal_mass_error, quality


def slow_ece(probabilities, kept):
    total = 0.0
    for low in range(BINS):
        inside = [i for i, p in enumerate(probabilities) if low <= p * BINS < low + 1 or (p == 1 and low == BINS - 1)]
        if inside:
            predicted = sum(probabilities[i] for i in inside) / len(inside)
            observed = sum(kept[i] for i in inside) / len(inside)
            total += len(inside) / len(kept) * abs(predicted - observed)
    return total


def slow_equal_mass_error(probabilities, kept):
    pairs = sorted(zip(probabilities, kept, strict=True), key=lambda pair: pair[0])
    edges = [int(len(pairs) * i / MASSES) for i in range(MASSES + 1)]
    bins = [pairs[low:high] for low, high in pairwise(edges)]
    return sum(abs(sum(p - y for p, y in each)) for each in bins) / len(pairs)


def slow_auc(probabilities, kept):
    wins = pairs = 0
    for p, good in zip(probabilities, kept, strict=True):
        for other, also in zip(probabilities, kept, strict=True):
            if good and not also:
                pairs += 1
                wins += 1.0 if p > other else 0.5 * (p == other)
    return wins / pairs


def test_metrics_equal_the_loops_also_with_ties_and_at_the_ends():
    rng = np.random.default_rng(0)
    for digits in (1, 2, 8):
        probability_B = np.append(np.round(rng.random(300), digits), [0.0, 1.0, 1.0])
        kept_B = rng.random(303) < probability_B**2
        found = quality(probability_B, kept_B)
        assert found.ece == pytest.approx(slow_ece(probability_B, kept_B))
        assert equal_mass_error(probability_B, kept_B) == pytest.approx(slow_equal_mass_error(probability_B, kept_B))
        assert found.auc == pytest.approx(slow_auc(probability_B, kept_B))
        assert found.brier == pytest.approx(sum((p - y) ** 2 for p, y in zip(probability_B, kept_B, strict=True)) / 303)
        assert (found.count, len(found.count_Q)) == (303, BINS)
        assert found.kept_Q.sum() == kept_B.sum()


def test_known_values():
    right = np.array([True, False])
    assert quality(np.array([1.0, 0.0]), right).ece == quality(np.array([1.0, 0.0]), right).brier == 0
    assert quality(np.array([0.0, 1.0]), right).ece == quality(np.array([0.0, 1.0]), right).brier == 1
    assert area_under_roc(np.array([0.9, 0.1]), right) == 1
    assert area_under_roc(np.array([0.1, 0.9]), right) == 0
    assert area_under_roc(np.array([0.4, 0.4]), right) == 0.5
    constant = quality(np.full(4, 0.7), np.array([True, False, False, False]))
    assert constant.ece == pytest.approx(0.45)
    assert constant.brier == pytest.approx((0.09 + 3 * 0.49) / 4)


def test_nothing_happened_and_only_one_thing_happened():
    empty = quality(np.zeros(0), np.zeros(0, bool))
    assert (empty.count, empty.ece, empty.auc, empty.brier) == (0, None, None, None)
    assert quality(np.array([0.5, 0.6]), np.array([True, True])).auc is None


def test_the_error_of_exact_probabilities_is_what_the_luck_of_the_draw_gives():
    rng = np.random.default_rng(0)
    probability_B = rng.random(3_000)
    found = [quality(probability_B, rng.random(3_000) < probability_B).ece for _ in range(200)]
    assert quality(probability_B, probability_B > 0.5).ece_if_true == pytest.approx(np.mean(found), rel=0.05)
