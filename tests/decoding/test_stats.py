"""Counters add, and rates come from their sums."""

import pytest

from dspark_jax.decoding.stats import DecodeStats


def test_counts_add_and_the_accepted_length_includes_the_bonus():
    total = DecodeStats(rounds=2, proposed=10, verified=7, accepted=5) + DecodeStats(
        rounds=1, proposed=5, verified=2, accepted=0
    )
    assert total == DecodeStats(rounds=3, proposed=15, verified=9, accepted=5)
    assert total.committed == 8
    assert total.accepted_length == pytest.approx(8 / 3)


def test_nothing_yet():
    assert DecodeStats().accepted_length == 0
    assert DecodeStats() + DecodeStats() == DecodeStats()
