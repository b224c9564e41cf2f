"""The host's choice of the next round, against every choice it had."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.decoding.buckets import switch_sizes, verify_sizes
from dspark_jax.decoding.outlook import Outlooks
from dspark_jax.decoding.planner import Planner, two_step_plans
from dspark_jax.decoding.profile import Shape, StepCurve
from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.round import RoundPlan
from dspark_jax.decoding.scheduler import EarlyStop, FixedLength, Threshold, TwoStep

ROWS, BLOCK, SPAN = 4, 7, 256
SLOTS = np.arange(1, BLOCK + 1)


def curve(seconds, rows=ROWS):
    plans = two_step_plans(rows, BLOCK, TwoStep(), Rule.TOKEN)
    return StepCurve({Shape(rows, SPAN, size, plan.drafts): seconds(size, plan.drafts) for plan, size in plans})


def planner(seconds, *, new=False, **policy):
    """One that has seen a round of what it expects; a new one has seen nothing."""
    made = Planner(TwoStep(**{"every": 1} | policy), block=BLOCK, curve=curve(seconds))
    if not new:
        made.learn(told(0.7), [0], np.full((1, BLOCK), 0.7), ROWS, SPAN)
    return made


def told(*confidences, rows=ROWS):
    """Requests in the first rows, whose last drafts had these confidences all along the block."""
    outlooks = Outlooks.empty(rows, BLOCK)
    for row, confidence in enumerate(confidences):
        outlooks.enter(row, pinned=False)
        outlooks.survival_BK[row], outlooks.known_B[row], outlooks.gain_B[row] = confidence**SLOTS, True, 1.0
    return outlooks


def budget(plan):
    """Tokens that a plan for ROWS rows verifies."""
    return plan.sizes[0] if plan.sizes else ROWS * (plan.drafts + 1)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(0.05, 0.99), min_size=ROWS, max_size=ROWS),
    st.lists(st.integers(1, 40), min_size=6, max_size=6),
    st.integers(0, ROWS - 1),
)
def test_the_budget_is_the_best_of_all_however_jagged_the_curve(confidences, steps, resting):
    """Requests that rest are drafted along with the others."""
    times = dict(zip(verify_sizes(ROWS, BLOCK), np.cumsum(steps), strict=True))
    requests = told(*confidences)
    requests.resting_B[:resting] = 9
    gains = np.sort(requests.survival_BK, axis=None)[::-1]
    rates = {size: (ROWS + gains[: size - ROWS].sum()) / seconds for size, seconds in times.items()}
    plan = planner(lambda size, _: float(times[size]), min_gain=0.0).plan(SPAN, requests)
    assert rates[budget(plan)] == pytest.approx(max(rates.values()), rel=1e-9)


def test_where_verifying_is_free_all_is_verified_by_the_program_of_a_fixed_length():
    """Below the knee scheduling costs nothing: nothing is ranked or packed."""
    plan = planner(lambda size, drafts: 1.0 + (drafts > 0) * 0.1).plan(SPAN, told(0.9, 0.9, 0.5, 0.9))
    assert plan == RoundPlan(drafts=BLOCK) == Planner(FixedLength(), block=BLOCK).plan(SPAN, told())


def test_d_54_a_cost_added_to_every_drafting_round_makes_it_back_off_and_try_again():
    slow = planner(lambda size, drafts: 1.0 + 10.0 * (drafts > 0), rest=3)
    requests = told(0.8, 0.8, 0.8, 0.8)
    drafts = [slow.plan(SPAN, requests).drafts for _ in range(9)]
    assert drafts == [0] * 9
    requests = told(*[0.999] * ROWS)
    quick = planner(lambda size, drafts: 1.0 + 2.0 * (drafts > 0), rest=3)
    assert quick.plan(SPAN, requests).drafts == BLOCK


def test_a_request_whose_drafts_do_not_pay_rests_and_is_tried_again():
    costly = planner(lambda size, drafts: 1.0 + 0.5 * (drafts > 0) + size / 100, rest=4)
    request = told(0.9)
    for _ in range(6):
        costly.learn(request, [0], np.array([[0.05] * BLOCK]), ROWS, SPAN)
    assert [costly.plan(SPAN, request).drafts for _ in range(4)] == [0] * 4
    assert request.resting_B[0] == 0
    costly.learn(request, [0], np.array([[0.95] * BLOCK]), ROWS, SPAN)
    costly.learn(request, [0], np.array([[0.95] * BLOCK]), ROWS, SPAN)
    assert costly.plan(SPAN, request).drafts > 0


def test_requests_that_rest_leave_the_budget_to_the_others():
    costs = {"seconds": lambda size, drafts: 1.0 + size * 0.05, "min_gain": 0.0}
    crowded = planner(**costs).plan(SPAN, told(0.9, 0.9, 0.9, 0.9))
    requests = told(0.9, 0.05, 0.05, 0.05)
    requests.resting_B[1:] = 5
    assert ROWS < budget(planner(**costs).plan(SPAN, requests)) < budget(crowded)
    requests.resting_B[0] = 5
    assert planner(**costs).plan(SPAN, requests).drafts == 0, "while all rest nothing is drafted"


def test_a_round_without_drafts_is_promised_no_drafts_however_many_rows_are_empty():
    even = planner(lambda size, drafts: 10.0 + size)
    assert even.plan(SPAN, told(0.9)).drafts > 0


def test_what_another_budget_promises_must_be_worth_leaving_the_one_in_use():
    times = {4: 1.0, 8: 1.5, 12: 2.2, 16: 2.2, 24: 3.0, 32: 3.0}
    likely, unlikely = told(*[0.9] * ROWS), told(*[0.6] * ROWS)
    eager, shy = (planner(lambda size, _: times[size], min_gain=g) for g in (0.0, 0.5))
    assert [budget(eager.plan(SPAN, requests)) for requests in (likely, unlikely, likely)] == [32, 8, 32]
    assert [budget(shy.plan(SPAN, requests)) for requests in (likely, unlikely, likely)] == [32, 32, 32]
    never = told(*[0.1] * ROWS)
    assert [budget(shy.plan(SPAN, requests)) for requests in (never, unlikely)] == [ROWS, ROWS]


def test_after_its_rest_a_request_is_tried_again_as_one_of_whom_nothing_is_known():
    dear = planner(lambda size, drafts: 1.0 + 0.5 * (drafts > 0), rest=3)
    requests = told(0.05)
    assert [dear.plan(SPAN, requests).drafts for _ in range(5)] == [0, 0, 0, 0, BLOCK]


def test_a_budget_lasts_so_many_rounds_but_a_pinned_request_does_not_wait():
    times = {4: 1.0, 8: 1.5, 12: 2.2, 16: 2.2, 24: 3.0, 32: 3.0}
    lasting = planner(lambda size, _: times[size], min_gain=0.0, every=3)
    requests, looks = told(*[0.9] * ROWS), []
    for round_ in range(7):
        budgets = budget(lasting.plan(SPAN, requests)), lasting.watches
        looks.append(budgets)
        if round_ == 0:
            requests.survival_BK[:] = 0.6**SLOTS
    assert looks == [(32, False), (32, False), (32, True), (8, False), (8, False), (8, True), (8, False)]
    requests.pinned_B[0] = True
    assert budget(lasting.plan(SPAN, requests)) > 8


@pytest.mark.parametrize(("seconds", "rounds"), [(1e-3, 80), (5e-3, 16), (0.05, 3)])
def test_short_rounds_are_decided_for_so_many_that_it_takes_a_hundredth_of_them(seconds, rounds):
    """Reading confidences and choosing a budget takes a host some 0.8 ms, and more than one round in twenty of 1.5 ms
    went there when every eighth decided."""
    lasting = planner(lambda size, _: seconds, every=3)
    requests, watched = told(*[0.9] * ROWS), []
    for _ in range(2 * rounds):
        lasting.plan(SPAN, requests)
        watched.append(lasting.watches)
    assert np.flatnonzero(watched).tolist() == [rounds - 1, 2 * rounds - 1]


@pytest.mark.parametrize(
    ("every", "ahead", "watched"), [(4, 0, [3, 7]), (4, 1, [2, 6]), (2, 1, [0, 2, 4, 6]), (1, 1, range(8))]
)
def test_what_is_learnt_from_is_the_newest_round_that_is_read_before_the_next_budget(every, ahead, watched):
    policy = TwoStep(every=every)
    lasting = Planner(policy, block=BLOCK, curve=curve(lambda size, _: float(size)), ahead=ahead)
    requests, found = told(*[0.9] * ROWS), []
    for round_ in range(8):
        lasting.plan(SPAN, requests)
        found += [round_] * lasting.watches
    assert found == list(watched)
    fixed = Planner(FixedLength(), block=BLOCK)
    fixed.plan(SPAN, requests)
    assert not fixed.watches


def test_a_rest_is_counted_in_rounds_however_long_budgets_last():
    dear = planner(lambda size, drafts: 1.0 + 0.5 * (drafts > 0), rest=6, every=3)
    requests = told(0.05)
    assert [dear.plan(SPAN, requests).drafts for _ in range(10)] == [0] * 7 + [BLOCK] * 3


def test_pinned_requests_have_all_their_drafts_verified_whatever_it_costs():
    dear = planner(lambda size, drafts: float(size) ** 2 + drafts)
    requests = told(0.1, 0.1, 0.1, 0.1)
    requests.pinned_B[2], requests.resting_B[2] = True, 3
    for _ in range(3):
        plan = dear.plan(SPAN, requests)
        assert plan.drafts == BLOCK
        assert budget(plan) == 12
    requests.pinned_B[0] = True
    assert budget(dear.plan(SPAN, requests)) == 24


def test_one_request_drafts_no_more_than_is_verified():
    alone = Planner(TwoStep(), block=BLOCK, curve=curve(lambda size, _: 1 + size * 0.3, rows=1))
    plan = alone.plan(SPAN, told(0.7, rows=1))
    assert plan.sizes == ()
    assert 0 < plan.drafts < BLOCK


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 7, 8, 15, 16])
def test_d_34_d_55_plans_of_any_block_verify_one_token_more_than_they_draft(block):
    for rows in (1, 2, 3, 8):
        plans = two_step_plans(rows, block, TwoStep(), Rule.TOKEN)
        assert [plans[0][1], plans[-1][1]] == [rows, rows * (block + 1)]
        assert plans[-1][0] == RoundPlan(drafts=block)
        costs = [(tokens, plan.drafts) for plan, tokens in plans]
        assert all(fewer < more for fewer, more in pairwise(costs))
        assert all(
            RoundPlan(drafts=size // rows - 1) in [plan for plan, _ in plans] for size in verify_sizes(rows, block)
        )
        for plan, tokens in plans:
            assert plan.sizes in ((), (tokens,))
            assert rows <= tokens <= rows * (plan.drafts + 1)
            assert plan.sizes or tokens == rows * (plan.drafts + 1)


def test_where_drafting_is_dear_shorter_blocks_are_drafted_rather_than_ranked():
    dear = planner(lambda size, drafts: 1.0 + size * 0.02 + drafts * 0.3)
    assert dear.plan(SPAN, told(*[0.5] * ROWS)) == RoundPlan(drafts=1)
    free = planner(lambda size, drafts: 1.0 + size * 0.1)
    assert free.plan(SPAN, told(0.99, 0.99, 0.2, 0.2)).sizes


@pytest.mark.parametrize(
    ("survival", "drafts"),
    [
        ((0.7, 0.5, 0.35, 0.25, 0.2, 0.15, 0.1), 3),
        ((0.55, 0.29, 0.16, 0.11, 0.08, 0.06, 0.05), 2),
        ((0.3, 0.1, 0.03, 0.01, 0, 0, 0), 0),
    ],
)
def test_where_every_token_costs_the_same_blocks_are_as_short_as_is_best(survival, drafts):
    """Seconds as of 16 requests on two CPU cores, four tokens to one here."""
    linear = planner(lambda size, drafts: 0.226 + 0.01 * size + (0.11 + 0.0125 * drafts if drafts else 0.0))
    requests = told(*[0.5] * ROWS)
    requests.survival_BK[:] = survival
    assert linear.plan(SPAN, requests) == RoundPlan(drafts=drafts)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(0.05, 0.99), min_size=ROWS, max_size=ROWS),
    st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6),
)
def test_d_30_no_length_for_all_promises_more_than_the_budget_chosen(confidences, steps):
    times = dict(zip(verify_sizes(ROWS, BLOCK), 1.0 + np.cumsum(steps), strict=True))
    requests, some = told(*confidences), planner(lambda size, _: times[size])
    survival = requests.survival_BK
    chosen = budget(some.plan(SPAN, requests))
    ranked = np.sort(survival.ravel())[::-1]
    promised = (ROWS + ranked[: chosen - ROWS].sum()) / times[chosen]
    for length in (0, 1, 2, 3, 5, 7):
        fixed = (ROWS + survival[:, :length].sum()) / times[ROWS * (length + 1)]
        # min_gain is what a larger budget must promise over the one before.
        assert promised > fixed * 0.95


def test_confidences_of_a_shorter_block_are_continued_as_others_fall_off():
    some = planner(lambda size, _: 1.0)
    request = told(0.5)
    some.learn(request, [0], np.array([[0.9, 0.8]]), ROWS, SPAN)
    survival = request.survival_BK[0].copy()
    np.testing.assert_allclose(survival[:2], [0.9, 0.72])
    assert survival.shape == (BLOCK,)
    assert (np.diff(survival) < 0).all()
    assert (survival > 0).all()
    some.learn(request, [0], np.array([[]]), ROWS, SPAN)
    np.testing.assert_array_equal(request.survival_BK[0], survival)


def test_what_is_expected_of_unknown_requests_is_soon_what_was_seen_of_others():
    dear = planner(lambda size, drafts: 1.0 + 0.2 * drafts, rest=2, new=True)
    request, drafts = told(0.3), []
    for _ in range(60):
        plan = dear.plan(SPAN, request)
        drafts.append(plan.drafts)
        dear.learn(request, [0], np.full((1, plan.drafts), 0.15), ROWS, SPAN)
    assert any(drafts[:30])
    assert not any(drafts[30:]), "a drafter that never pays is not tried again and again"


@pytest.mark.parametrize(("fixed", "each"), [(2.0, 0.25), (8.0, 0.25)])
def test_what_was_expected_before_anything_was_seen_does_not_last(fixed, each):
    """Requests come and go whose drafts are all but certain, whatever the first guess said of them."""
    costs = {"seconds": lambda size, drafts: fixed + size + each * drafts, "new": True, "every": 8}
    some, confidence_K = planner(**costs), np.full(BLOCK, 0.98)
    kept_K = np.cumsum(np.cumprod(confidence_K))
    gained = took = 0.0
    for number in range(60):
        requests = told(*[0.5] * ROWS)
        requests.known_B[:] = False
        for _ in range(20):
            plan = some.plan(SPAN, requests)
            drafts, size = plan.drafts, budget(plan)
            if number >= 20:
                gained += ROWS * (1 + kept_K[size // ROWS - 2] if size > ROWS else 1)
                took += costs["seconds"](size, drafts)
            if some.watches:
                some.learn(requests, range(ROWS), np.tile(confidence_K[:drafts], (ROWS, 1)), ROWS, SPAN)
    best = max(ROWS * (1 + kept_K[n - 1]) / costs["seconds"](ROWS * (n + 1), n) for n in range(1, BLOCK + 1))
    assert gained / took > 0.96 * best


def test_until_a_whole_block_was_seen_one_is_drafted():
    dear = planner(lambda size, drafts: 1.0 + 9.0 * (drafts > 0), new=True)
    requests = told(0.5)
    requests.known_B[:] = False
    for _ in range(2):
        assert (dear.plan(SPAN, requests), dear.watches) == (RoundPlan(drafts=BLOCK), True)
    dear.learn(requests, [0], np.full((1, BLOCK), 0.5), ROWS, SPAN)
    assert dear.plan(SPAN, requests).drafts == 0


def test_what_never_pays_is_tried_less_and_less():
    dear = planner(lambda size, drafts: 1.0 + 9.0 * (drafts > 0))
    requests, tried = told(0.1), []
    for round_ in range(6000):
        drafts = dear.plan(SPAN, requests).drafts
        tried += [round_] * (drafts > 0)
        if dear.watches:
            dear.learn(requests, [0], np.full((1, drafts), 0.1), ROWS, SPAN)
    waits = np.diff([-1, *tried])
    assert waits[0] <= 136
    assert (np.diff(waits) >= 0).all()
    assert 1000 < waits[-1] < 1040


def test_confidences_that_are_no_numbers_teach_nothing():
    some, requests = planner(lambda size, _: float(size)), told(0.5, 0.5)
    some.learn(requests, [0, 1], np.array([[np.nan] * BLOCK, [0.9] * BLOCK]), ROWS, SPAN)
    clean, others = planner(lambda size, _: float(size)), told(0.5, 0.5)
    clean.learn(others, [1], np.array([[0.9] * BLOCK]), ROWS, SPAN)
    np.testing.assert_array_equal(requests.survival_BK, others.survival_BK)
    fresh = [told(0.5), told(0.5)]
    for each in fresh:
        each.known_B[:] = False
    assert some.plan(SPAN, fresh[0]) == clean.plan(SPAN, fresh[1])


def test_a_guess_does_not_last():
    lasting = planner(lambda size, _: float(size), every=3)
    guessed = told(0.9, 0.9, 0.9)
    guessed.known_B[1:] = False
    lasting.plan(SPAN, guessed)
    assert lasting.watches
    lasting.plan(SPAN, told(0.9, 0.9, 0.9))
    assert not lasting.watches


def test_requests_that_move_take_what_is_known_of_them_along():
    requests = told(0.9, 0.1, 0.5)
    requests.leave(1)
    moved = requests.moved([2, 0], 2)
    np.testing.assert_array_equal(moved.survival_BK, [0.5**SLOTS, 0.9**SLOTS])
    assert moved.live_B.all()
    grown = moved.moved([1], 4)
    assert grown.live_B.tolist() == [True, False, False, False]
    grown.enter(0, pinned=True)
    assert not grown.known_B[0], "whoever comes is not judged by who was there before"


def test_other_policies_need_one_plan_a_batch_size():
    for policy in (Threshold(confidence=0.4), EarlyStop(), FixedLength(length=2)):
        some = Planner(policy, block=BLOCK, curve=curve(lambda size, _: 1.0))
        assert some.plans(ROWS) == (some.plan(SPAN, told(0.1)),)
    assert Planner(FixedLength(length=99), block=BLOCK).plans(1) == (RoundPlan(drafts=BLOCK),)


def test_where_no_size_can_be_chosen_on_the_device_the_whole_block_is_computed_and_costs_the_same():
    for policy in (Threshold(confidence=0.4), EarlyStop()):
        some = Planner(policy, block=BLOCK, curve=curve(lambda size, _: float(size)), switches=False)
        assert some.plans(ROWS) == (RoundPlan(policy=policy),)
    np.testing.assert_allclose(some.rates(ROWS, SPAN), np.full(ROWS * 8 + 1, 1 / 32))


def test_algorithm_1_is_told_the_staircase_of_the_measured_sizes():
    rates = Planner(EarlyStop(), block=BLOCK, curve=curve(lambda size, _: float(size))).rates(ROWS, SPAN)
    sizes = switch_sizes(ROWS, BLOCK)
    assert sizes == (ROWS, 2 * ROWS, 4 * ROWS, 8 * ROWS)
    assert len(rates) == sizes[-1] + 1
    # The smallest drafting round is the one of sizes[1].
    measured = [sizes[1], *sizes[1:]]
    for tokens in range(1, sizes[-1] + 1):
        edge = measured[next(i for i, size in enumerate(sizes) if size >= tokens)]
        assert rates[tokens] == pytest.approx(1 / edge)
