from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.data.repetition import LoopRule, loop_start, repeated_fraction

RULE = LoopRule(ngram=4, window=16, repeated=0.75)


def slow_loop_start(tokens, rule):
    """The definition, in plain loops."""
    grams = [tuple(tokens[i : i + rule.ngram]) for i in range(len(tokens) - rule.ngram + 1)]
    seen = [gram in grams[:i] for i, gram in enumerate(grams)]
    for start in range(len(seen) - rule.window + 1):
        if sum(seen[start : start + rule.window]) >= rule.repeated * rule.window:
            return start
    return None


@given(
    head=st.lists(st.integers(0, 5), max_size=40),
    period=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    times=st.integers(0, 8),
)
def test_the_fast_search_is_the_definition(head, period, times):
    tokens = head + period * times
    assert loop_start(tokens, RULE) == slow_loop_start(tokens, RULE)


def test_a_loop_is_found_near_where_it_begins_and_fresh_text_has_none():
    fresh = list(range(200))
    assert loop_start(fresh, RULE) is None
    start = loop_start(fresh + [7000, 7001, 7002] * 30, RULE)
    assert 200 - RULE.window < start <= 206


def test_lists_that_count_on_are_loops_too():
    tokens = [token for item in range(20) for token in (item + 1000, *range(30))]
    assert loop_start(tokens, RULE) is not None


def test_the_repeated_share_counts_later_copies_only():
    assert repeated_fraction(list("abcd"), 2) == 0
    assert repeated_fraction(list("ababab"), 2) == 1 - 2 / 5
    assert repeated_fraction([1], 2) == 0
