"""The host's half of the scheduler: which compiled round runs next, decided before it starts.

What a budget is decided from was read in rounds that are over (the asynchronous variant of section 3.3), so a global
optimum over the jagged curve anticipates nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dspark_jax.decoding.buckets import switch_sizes, verify_sizes
from dspark_jax.decoding.profile import StepCurve
from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.round import RoundPlan
from dspark_jax.decoding.scheduler import EarlyStop, FixedLength, Policy, Threshold, TwoStep

# How much the newest round counts in what is expected of the next.
_FRESHNESS = 0.5
_PRIOR_FRESHNESS = 0.02
_PRIOR_CONFIDENCE = 0.7


@dataclass(eq=False)
class Outlook:
    """What is expected of one request's next drafts."""

    pinned: bool = False
    survival_K: np.ndarray | None = None
    """a_1..a_K of its last drafted block; None before the first was read."""
    gain: float = 0.0
    """Drafts a round it can expect to keep."""
    resting: int = 0
    """Rounds it still goes without drafts."""


class _Option(NamedTuple):
    plan: RoundPlan
    tokens: int
    seconds: float


class Planner:
    """Chooses a plan for every round. Policies other than TwoStep always run one plan a batch size."""

    def __init__(self, policy: Policy, *, block: int, curve: StepCurve | None = None, rule: Rule = Rule.TOKEN):
        if isinstance(policy, EarlyStop | TwoStep) and curve is None:
            raise ValueError(f"scheduler: {type(policy).__name__} needs a step curve; without one use FixedLength")
        self._policy, self._block, self._curve, self._rule = policy, block, curve, rule
        self._prior_K = _PRIOR_CONFIDENCE ** np.arange(1, block + 1)
        self._known: dict[tuple[int, int], list[_Option]] = {}

    def plans(self, rows: int) -> tuple[RoundPlan, ...]:
        """Every plan that may be chosen for a state of so many rows."""
        match self._policy:
            case FixedLength(length=length):
                drafts = self._block if length is None else min(length, self._block)
                return (RoundPlan(drafts=drafts, rule=self._rule),)
            case Threshold() | EarlyStop():
                return (RoundPlan(policy=self._policy, sizes=switch_sizes(rows, self._block), rule=self._rule),)
            case TwoStep():
                return tuple(plan for plan, _ in two_step_plans(rows, self._block, self._policy, self._rule))

    def plan(self, rows: int, span: int, requests: Sequence[Outlook]) -> RoundPlan:
        """The plan of the next round of a state of this shape for these requests."""
        if not isinstance(self._policy, TwoStep):
            return self.plans(rows)[0]
        drafting = [request for request in requests if request.pinned or not request.resting]
        for request in requests:
            request.resting = max(request.resting - 1, 0)
        without, *options = self._options(rows, span)
        if not drafting or not options:
            return without.plan
        pinned = [request for request in drafting if request.pinned]
        if pinned:
            needed = len(requests) + self._block * len(pinned)
            options = [o for o in options if o.plan.drafts == self._block and o.tokens >= needed]
        others = [self._survival(request) for request in drafting if not request.pinned]
        survival_BK = np.stack(others) if others else np.zeros((0, self._block))
        # Small batches may draft less than a block: expected gains by how much is drafted, the likeliest first.
        gains = {
            drafts: np.concatenate([[0.0], np.cumsum(np.sort(survival_BK[:, :drafts].ravel())[::-1])])
            for drafts in {option.plan.drafts for option in options}
        }
        certain = len(requests) + sum(float(np.sum(self._survival(request))) for request in pinned)

        def rate(option: _Option) -> float:
            if option is without:
                return len(requests) / option.seconds
            budget = option.tokens - len(requests) - self._block * len(pinned)
            expected_N = gains[option.plan.drafts]
            return (certain + expected_N[min(max(budget, 0), len(expected_N) - 1)]) / option.seconds

        best = without if not pinned else options[0]
        for option in options:
            if rate(option) > rate(best) * (1 + self._policy.min_gain):
                best = option
        if best is without:
            for request in drafting:
                request.resting = self._policy.rest
        return best.plan

    def learn(self, requests: Sequence[Outlook], confidence_BK: np.ndarray, rows: int, span: int) -> None:
        """Take in a finished round's confidences, a row for each request; K = 0 after a round without drafts."""
        known = confidence_BK.shape[1]
        if not (isinstance(self._policy, TwoStep) and requests and known):
            return
        survival_BK = np.cumprod(confidence_BK, axis=1, dtype=np.float64)
        # Slots that were not drafted fall off as they do on average.
        rest_BK = survival_BK[:, -1:] * self._prior_K[known:] / self._prior_K[known - 1]
        survival_BK = np.concatenate([survival_BK, rest_BK], axis=1)
        freshness = 1 - (1 - _PRIOR_FRESHNESS) ** len(requests)
        self._prior_K = (1 - freshness) * self._prior_K + freshness * survival_BK.mean(axis=0)
        break_even = self._break_even(rows, span)
        for request, survival_K, gain in zip(requests, survival_BK, survival_BK.sum(axis=1).tolist(), strict=True):
            request.survival_K = survival_K
            first_time = request.gain == 0
            request.gain = gain if first_time else _FRESHNESS * gain + (1 - _FRESHNESS) * request.gain
            if request.gain < break_even:
                request.resting = self._policy.rest

    def rates(self, rows: int, span: int) -> np.ndarray | None:
        """Rounds per second that verify n = 0..rows*(K+1) tokens, for the policy that needs them on the device."""
        if not isinstance(self._policy, EarlyStop):
            return None
        assert self._curve is not None
        return self._curve.rates(rows, span, switch_sizes(rows, self._block), interpolate=self._policy.interpolate)

    def _survival(self, request: Outlook) -> np.ndarray:
        return self._prior_K if request.survival_K is None else request.survival_K

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
    """(plan, tokens it verifies) of every budget a state of so many rows may be given."""
    sizes = verify_sizes(rows, block)
    plans = [(RoundPlan(drafts=0, rule=rule), rows)]
    for size in sizes[1:]:
        drafts = min(block, size - rows)
        # Where the budget is all that was drafted, there is nothing to rank.
        whole = size == rows * (drafts + 1)
        plan = RoundPlan(drafts=drafts, rule=rule)
        plans.append((plan if whole else RoundPlan(policy=policy, drafts=drafts, sizes=(size,), rule=rule), size))
    return plans
