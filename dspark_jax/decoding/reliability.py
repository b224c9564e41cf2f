"""How far confidences can be trusted: expected calibration error, area under the ROC curve, Brier score.

Reported for c_k over the drafts that were reached, and for the survival a_k = c_0..c_k over all that were verified.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from dspark_jax.decoding.fitted import Fitted
from dspark_jax.decoding.outcomes import Outcomes

BINS = 15
"""Equal widths over 0..1, as is usual for the expected calibration error."""
MASSES = 10


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Predicted probabilities of a position against what happened.

    Sums and counts by bin are kept, so that results add and can be drawn. ece_if_true is the error that so many
    outcomes would show, on average, if every probability were exact: less than about that cannot be told apart from 0.
    """

    count_Q: Int[np.ndarray, "Q"]
    predicted_Q: Float[np.ndarray, "Q"]
    """Sum of the probabilities in the bin."""
    kept_Q: Int[np.ndarray, "Q"]
    squared_error: float
    ece_if_true: float
    auc: float | None
    """None where only one thing ever happened."""

    @property
    def count(self) -> int:
        return int(self.count_Q.sum())

    @property
    def ece(self) -> float | None:
        """Mean over outcomes of how far their bin's average probability is from its rate; None without outcomes."""
        return float(np.abs(self.predicted_Q - self.kept_Q).sum() / self.count) if self.count else None

    @property
    def brier(self) -> float | None:
        return self.squared_error / self.count if self.count else None


@dataclass(frozen=True, kw_only=True)
class Report:
    """One quality a position."""

    conditional: tuple[Quality, ...]
    """Of c_k."""
    cumulative: tuple[Quality, ...]
    """Of a_k."""


def report(estimator: Fitted, outcomes: Outcomes) -> Report:
    """The estimator against outcomes."""
    confidence_BK = estimator.confidences(outcomes.evidence_BKF)
    survival_BK = np.cumprod(confidence_BK, axis=1)
    conditional, cumulative = [], []
    for k in range(outcomes.block_size):
        reached_B, judged_B, kept_B = outcomes.reached(k), outcomes.judged(k), outcomes.kept(k)
        conditional.append(quality(confidence_BK[reached_B, k], kept_B[reached_B]))
        cumulative.append(quality(survival_BK[judged_B, k], kept_B[judged_B]))
    return Report(conditional=tuple(conditional), cumulative=tuple(cumulative))


def quality(probability_B: Float[np.ndarray, "B"], kept_B: Bool[np.ndarray, "B"]) -> Quality:
    """Of probabilities and what happened."""
    count_Q, predicted_Q, kept_Q = _bins(probability_B, kept_B)
    variance_Q = _sums(_bin(probability_B), probability_B * (1 - probability_B))
    # A bin's sum of errors is close to normal, whose mean absolute value is sqrt(2 / pi) standard deviations.
    noise = float(np.sqrt(2 / np.pi * variance_Q).sum()) / max(1, len(kept_B))
    return Quality(
        count_Q=count_Q,
        predicted_Q=predicted_Q,
        kept_Q=kept_Q.astype(np.int64),
        squared_error=float(np.sum((probability_B - kept_B) ** 2)),
        ece_if_true=noise,
        auc=area_under_roc(probability_B, kept_B),
    )


def equal_mass_error(probability_B: Float[np.ndarray, "B"], kept_B: Bool[np.ndarray, "B"]) -> float:
    """The calibration error over bins of equal numbers of outcomes, for searches.

    Survival of later drafts crowds near 0, where bins of equal width hardly tell one probability from another: a
    minimum over these is found more surely.
    """
    order_B = np.argsort(probability_B, kind="stable")
    excess_B = np.append(0, np.cumsum((probability_B - kept_B)[order_B]))
    edges_G = np.linspace(0, len(kept_B), MASSES + 1).astype(np.int64)
    return float(np.abs(np.diff(excess_B[edges_G])).sum()) / max(1, len(kept_B))


def area_under_roc(probability_B: Float[np.ndarray, "B"], kept_B: Bool[np.ndarray, "B"]) -> float | None:
    """P(a kept draft has the higher probability than one that was not), equal ones counting half."""
    kept, lost = int(kept_B.sum()), int((~kept_B).sum())
    if not kept or not lost:
        return None
    _, group_B, size_G = np.unique(probability_B, return_inverse=True, return_counts=True)
    rank_G = np.cumsum(size_G) - (size_G - 1) / 2
    return float((rank_G[group_B][kept_B].sum() - kept * (kept + 1) / 2) / (kept * lost))


def _bin(probability_B: Float[np.ndarray, "B"]) -> Int[np.ndarray, "B"]:
    return np.minimum((probability_B * BINS).astype(np.int64), BINS - 1)


def _bins(probability_B: Float[np.ndarray, "B"], kept_B: Bool[np.ndarray, "B"]) -> tuple[np.ndarray, ...]:
    bin_B = _bin(probability_B)
    return (
        np.bincount(bin_B, minlength=BINS),
        _sums(bin_B, probability_B),
        _sums(bin_B, kept_B),
    )


def _sums(bin_B: np.ndarray, value_B: np.ndarray) -> np.ndarray:
    # Without outcomes numpy would count in integers.
    return np.bincount(bin_B, weights=value_B, minlength=BINS).astype(np.float64)
