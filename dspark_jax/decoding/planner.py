"""The host's half of the scheduler: which compiled round runs next, decided before it starts.

What a budget is decided from was read in rounds that are over (the asynchronous variant of section 3.3), so a global
optimum over the jagged curve anticipates nothing.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dspark_jax.decoding.buckets import switch_sizes, verify_sizes
from dspark_jax.decoding.outlook import Outlooks
from dspark_jax.decoding.profile import StepCurve
from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.round import RoundPlan
from dspark_jax.decoding.scheduler import EarlyStop, FixedLength, Policy, Threshold, TwoStep

# How much the newest round counts in what is expected of the next.
_FRESHNESS = 0.5
_PRIOR_FRESHNESS = 0.02
_PRIOR_CONFIDENCE = 0.7
_PRIOR_ROUNDS = 1
"""What is expected before anything was seen counts as a round of one request."""
_DECIDING, _SHARE = 8e-4, 0.01
"""Seconds that a budget and the reading it goes by take the host, and what of the rounds it lasts they may be."""
_PATIENCE, _LONGEST_PATIENCE = 128, 1024
"""Rounds without a whole block before one is tried again: the fewest and the most."""


class _Option(NamedTuple):
    plan: RoundPlan
    tokens: int
    seconds: float


class Planner:
    """Chooses a plan for every round. Policies other than TwoStep always run one plan a batch size.

    `switches`: whether a round may choose its size on the device. Where it may not, Threshold and EarlyStop decide what
    is judged and the whole block is computed. `ahead`: rounds that are started before one is read.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        block: int,
        curve: StepCurve | None = None,
        rule: Rule = Rule.TOKEN,
        switches: bool = True,
        ahead: int = 0,
    ):
        if isinstance(policy, EarlyStop | TwoStep) and curve is None:
            raise ValueError(f"scheduler: {type(policy).__name__} needs a step curve; without one use FixedLength")
        self._policy, self._block, self._curve, self._rule = policy, block, curve, rule
        self._switches, self._ahead = switches, ahead
        # Means of a_k, and of a_(k-1) in the same rounds: those that drafted slot k.
        self._reached_K = _PRIOR_CONFIDENCE ** np.arange(1, block + 1)
        self._before_K = _PRIOR_CONFIDENCE ** np.arange(block)
        self._seen_K = np.full(block, _PRIOR_ROUNDS)
        self._prior_K = self._reached_K.copy()
        self._known: dict[tuple[int, int], list[_Option]] = {}
        self._chosen: dict[tuple[int, int], _Option] = {}
        self._last: tuple[RoundPlan, tuple[int, int, int]] | None = None
        self._age = self._left = self._lasts = 0
        self._guessed = self._probing = False
        self._since, self._patience = 0, _PATIENCE

    def plans(self, rows: int) -> tuple[RoundPlan, ...]:
        """Every plan that may be chosen for a state of so many rows."""
        match self._policy:
            case FixedLength(length=length):
                drafts = self._block if length is None else min(length, self._block)
                return (RoundPlan(drafts=drafts, rule=self._rule),)
            case Threshold() | EarlyStop():
                sizes = switch_sizes(rows, self._block) if self._switches else ()
                return (RoundPlan(policy=self._policy, sizes=sizes, rule=self._rule),)
            case TwoStep():
                return tuple(plan for plan, _ in two_step_plans(rows, self._block, self._policy, self._rule))

    def plan(self, span: int, outlooks: Outlooks) -> RoundPlan:
        """The plan of the next round of a state of this span, for the requests in its rows."""
        rows = len(outlooks.live_B)
        if not isinstance(self._policy, TwoStep):
            return self.plans(rows)[0]
        # A pinned request that comes is not to wait.
        facts = rows, span, int(np.count_nonzero(outlooks.live_B & outlooks.pinned_B))
        self._age, self._left = self._age + 1, self._left - 1
        if self._last is None or self._last[1] != facts or self._left <= 0:
            option = self._budget(span, outlooks, self._policy)
            self._last = option.plan, facts
            # What was decided mostly without knowing the requests is not to last.
            unknown = np.count_nonzero(outlooks.live_B & ~outlooks.known_B)
            self._guessed = bool(unknown * 2 > np.count_nonzero(outlooks.live_B))
            self._lasts = max(self._policy.every, math.ceil(_DECIDING / (_SHARE * option.seconds)))
            self._age, self._left = 0, 1 if self._guessed else self._lasts
        return self._probe() or self._last[0]

    @property
    def watches(self) -> bool:
        """Whether the round planned last is one to `learn` from: the newest that is read before the next budget."""
        if not isinstance(self._policy, TwoStep):
            return False
        return self._probing or self._guessed or self._left == min(self._lasts, 1 + self._ahead)

    def _probe(self) -> RoundPlan | None:
        """Whole blocks until one was seen, and where for long none was drafted: what is never drafted would else be
        judged for ever by what was once expected of it. A probe that changes nothing doubles the time to the next."""
        assert self._last is not None
        whole = self._last[0].drafts == self._block
        self._since = 0 if whole else self._since + 1
        late = self._since > self._patience
        self._probing = not whole and (late or (self._guessed and int(self._seen_K[-1]) == _PRIOR_ROUNDS))
        if late:
            self._since, self._patience = 0, min(2 * self._patience, _LONGEST_PATIENCE)
        return RoundPlan(drafts=self._block, rule=self._rule) if self._probing else None

    def _budget(self, span: int, outlooks: Outlooks, policy: TwoStep) -> _Option:
        rows = len(outlooks.live_B)
        drafting_B = self._drafting(outlooks)
        without, *options = self._options(rows, span)
        if not drafting_B.any() or not options:
            return without
        requests, pinned_B = int(np.sum(outlooks.live_B)), drafting_B & outlooks.pinned_B
        pinned = int(np.sum(pinned_B))
        if pinned:
            needed = requests + self._block * pinned
            options = [o for o in options if o.plan.drafts == self._block and o.tokens >= needed]
        survival_BK = np.where(outlooks.known_B[:, None], outlooks.survival_BK, self._prior_K)
        certain = requests + float(np.sum(survival_BK[pinned_B]))
        # Whoever rests is drafted along with the others.
        survival_BK = survival_BK[outlooks.live_B & ~pinned_B]
        # Drafts kept of shorter blocks, and of the drafts that rank highest.
        kept_K = np.cumsum(survival_BK.sum(axis=0)).tolist()
        ranked_N = np.cumsum(np.sort(survival_BK, axis=None)[::-1])

        def rate(option: _Option) -> float:
            if option is without:
                return requests / option.seconds
            if not option.plan.sizes:
                return (certain + kept_K[(option.plan.drafts or 0) - 1]) / option.seconds
            budget = min(option.tokens - requests - self._block * pinned, len(ranked_N))
            return (certain + (ranked_N[budget - 1] if budget > 0 else 0.0)) / option.seconds

        # Below the knee nothing pays but verifying everything, at the least cost. And budgets that promise about as
        # much should not take turns.
        allowed = options if pinned else [without, *options]
        best = self._chosen.get((rows, span), options[-1])
        if best not in allowed:
            best = options[-1]
        promising = max(allowed, key=rate)
        if rate(promising) > rate(best) * (1 + policy.min_gain):
            best, self._patience = promising, _PATIENCE
        self._chosen[rows, span] = best
        if best is without:
            outlooks.resting_B[drafting_B] = policy.rest
        return best

    def learn(self, outlooks: Outlooks, picked: Sequence[int], confidence_RK: np.ndarray, rows: int, span: int) -> None:
        """Take in confidences that a round in a state of (rows, span) had of the requests that are now in the picked
        rows; K = 0 after a round without drafts. Worth a call for rounds that the planner `watches`."""
        # A request whose confidences are no numbers says nothing of others.
        sound = np.flatnonzero(np.isfinite(confidence_RK).all(axis=1)).tolist()
        picked, confidence_RK = [picked[index] for index in sound], confidence_RK[sound]
        known = confidence_RK.shape[1]
        if not (isinstance(self._policy, TwoStep) and len(picked) and known):
            return
        survival_RK = np.cumprod(confidence_RK, axis=1, dtype=np.float64)
        self._learn_prior(survival_RK)
        # Slots that were not drafted fall off as they do on average.
        rest_RK = survival_RK[:, -1:] * (self._prior_K[known:] / self._prior_K[known - 1])
        survival_RK = np.concatenate([survival_RK, rest_RK], axis=1)
        gain_R, before_R = survival_RK.sum(axis=1), outlooks.gain_B[picked]
        gain_R = np.where(before_R == 0, gain_R, _FRESHNESS * gain_R + (1 - _FRESHNESS) * before_R)
        outlooks.survival_BK[picked], outlooks.known_B[picked], outlooks.gain_B[picked] = survival_RK, True, gain_R
        idle_R = gain_R < self._break_even(rows, span)
        outlooks.resting_B[picked] = np.where(idle_R, self._policy.rest, outlooks.resting_B[picked])

    def _learn_prior(self, survival_RK: np.ndarray) -> None:
        """Means of all that was seen of a slot, and once that is much, of the newest."""
        requests, known = survival_RK.shape
        before_RK = np.concatenate([np.ones((requests, 1)), survival_RK[:, :-1]], axis=1)
        newest = 1 - (1 - _PRIOR_FRESHNESS) ** requests
        freshness_K = np.maximum(requests / (self._seen_K[:known] + requests), newest)
        for mean_K, found_RK in ((self._reached_K, survival_RK), (self._before_K, before_RK)):
            mean_K[:known] += freshness_K * (found_RK.mean(axis=0) - mean_K[:known])
        self._seen_K[:known] += requests
        self._prior_K = np.cumprod(self._reached_K / self._before_K)

    def rates(self, rows: int, span: int) -> np.ndarray | None:
        """Rounds per second that verify n = 0..rows*(K+1) tokens, for the policy that needs them on the device."""
        if not isinstance(self._policy, EarlyStop):
            return None
        assert self._curve is not None
        if not self._switches:
            whole = rows * (self._block + 1)
            return np.full(whole + 1, 1 / self._curve.seconds(rows, span, whole, self._block), np.float32)
        return self._curve.rates(rows, span, switch_sizes(rows, self._block), interpolate=self._policy.interpolate)

    def _drafting(self, outlooks: Outlooks) -> np.ndarray:
        """Which rows hold a request that asks for drafts from now on; the others have rested since the last budget."""
        resting_B = outlooks.live_B & (outlooks.resting_B > 0)
        outlooks.resting_B[resting_B] = np.maximum(outlooks.resting_B[resting_B] - self._age, 0)
        # What a request showed before it rested is old; it is tried again as one of whom nothing is known.
        ended_B = resting_B & (outlooks.resting_B == 0)
        outlooks.known_B[ended_B], outlooks.gain_B[ended_B] = False, 0.0
        return outlooks.live_B & (outlooks.pinned_B | ~resting_B)

    def _break_even(self, rows: int, span: int) -> float:
        """Drafts a round, at most one, that a request must keep for the cheapest drafting to pay."""
        without, *options = self._options(rows, span)
        return min([1.0] + [option.seconds / without.seconds - 1 for option in options[:1]])

    def _options(self, rows: int, span: int) -> list[_Option]:
        """Rounds without drafts, then budgets from the smallest to every draft of every row."""
        curve = self._curve
        assert curve is not None
        if (rows, span) not in self._known:
            self._known[rows, span] = [
                _Option(plan, tokens, curve.seconds(rows, span, tokens, plan.drafts or 0))
                for plan, tokens in two_step_plans(rows, self._block, self._policy, self._rule)
            ]
        return self._known[rows, span]


def two_step_plans(rows: int, block: int, policy: Policy, rule: Rule) -> list[tuple[RoundPlan, int]]:
    """(plan, tokens it verifies) of every budget a state of so many rows may be given, by rising tokens.

    A budget can be spent in two ways: on the drafts that rank highest of whole blocks, or on shorter blocks of which
    every draft is verified. The first keeps more of them and the second costs less.
    """
    sizes = verify_sizes(rows, block)
    plans = [(RoundPlan(drafts=0, rule=rule), rows)]
    for size in sizes[1:]:
        drafts = size // rows - 1
        plans.append((RoundPlan(drafts=drafts, rule=rule), size))
        # One row has no others to take a budget from.
        if drafts < block and rows > 1:
            plans.append((RoundPlan(policy=policy, drafts=block, sizes=(size,), rule=rule), size))
    return plans
