"""Estimators of acceptance fitted to outcomes: sequential temperature scaling, and all evidence combined.

Both keep the form sigmoid(w evidence + b) a position, so whatever is fitted, evidence alone decides: nothing of the
draft itself or of later ones enters.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from dspark_jax.decoding.fitted import Fitted
from dspark_jax.decoding.logistic import logistic_regression, sigmoid
from dspark_jax.decoding.outcomes import Outcomes
from dspark_jax.decoding.reliability import equal_mass_error

MIN_OUTCOMES = 100
"""A position that fewer drafts reached is not fitted."""

# From a tenth to ten times, in steps of 12 %; an odd number, so that 1 is among them.
_COARSE = np.geomspace(0.1, 10, 41)
_REFINEMENTS, _FINE = 2, 11
# Neighbouring positions differ little, and few drafts reach the late ones.
_RIDGE = 15.0


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """What was fitted, and the positions that too few drafts reached: they took over what the one before them has."""

    raw: Fitted
    """The head's own confidence, for comparison; always 1 where there is no head."""
    temperature_K: Float[np.ndarray, "K"] | None
    """Of sequential temperature scaling; None without a head."""
    combined: Fitted
    borrowed: tuple[int, ...]

    def by_name(self) -> dict[str, Fitted]:
        """The estimators there are."""
        sts = {} if self.temperature_K is None else {"sts": Fitted.tempered(self.temperature_K)}
        return {"raw": self.raw} | sts | {"combined": self.combined}


def calibrate(outcomes: Outcomes) -> Calibrated:
    """Fits both estimators."""
    raw = Fitted.tempered(np.ones(outcomes.block_size))
    return Calibrated(
        raw=raw,
        temperature_K=temperatures(raw, outcomes) if outcomes.has_head else None,
        combined=combined(outcomes),
        borrowed=tuple(k for k in range(outcomes.block_size) if outcomes.reached(k).sum() < MIN_OUTCOMES),
    )


def combined(outcomes: Outcomes) -> Fitted:
    """Logistic regression a position on all evidence.

    It is calibrated as it is: a temperature on top only adds the noise of its own search. A position is drawn
    towards the one before it, and the first towards the head.
    """
    block, features = outcomes.block_size, outcomes.evidence_BKF.shape[2]
    weights_KF, bias_K = np.zeros((block, features)), np.zeros(block)
    weights_F, bias = np.eye(features)[0] * outcomes.has_head, 0.0
    for k in range(block):
        reached_B = outcomes.reached(k)
        if reached_B.sum() >= MIN_OUTCOMES:
            weights_F, bias = logistic_regression(
                outcomes.evidence_BKF[reached_B, k], outcomes.kept(k)[reached_B], prior=(weights_F, bias), ridge=_RIDGE
            )
        weights_KF[k], bias_K[k] = weights_F, bias
    return Fitted(weights_KF=weights_KF, bias_K=bias_K)


def temperatures(estimator: Fitted, outcomes: Outcomes) -> Float[np.ndarray, "K"]:
    """One divisor a position, left to right: each makes the survival so far best calibrated (the paper's STS).

    By grid search on the calibration error, coarse first and then finer around the best. What was chosen for earlier
    positions stays as it is. A position with too few outcomes takes its neighbour's.
    """
    logit_BK = estimator.logits(outcomes.evidence_BKF)
    survival_B, chosen, temperature_K = np.ones(outcomes.rounds), 1.0, np.ones(outcomes.block_size)
    for k in range(outcomes.block_size):
        if outcomes.reached(k).sum() >= MIN_OUTCOMES:
            rows_B = outcomes.judged(k)
            chosen = _best_temperature(logit_BK[rows_B, k], survival_B[rows_B], outcomes.kept(k)[rows_B])
        temperature_K[k] = chosen
        survival_B = survival_B * sigmoid(logit_BK[:, k] / chosen)
    return temperature_K


def _best_temperature(logit_B: np.ndarray, survival_B: np.ndarray, kept_B: np.ndarray) -> float:
    def error(temperature: float) -> float:
        return equal_mass_error(survival_B * sigmoid(logit_B / temperature), kept_B)

    best, step = _least(error, _COARSE), _COARSE[1] / _COARSE[0]
    for _ in range(_REFINEMENTS):
        best = _least(error, best * np.geomspace(1 / step, step, _FINE))
        step = step ** (2 / (_FINE - 1))
    return best


def _least(error: Callable[[float], float], candidates: np.ndarray) -> float:
    """The candidate of least error; among equal ones, the one that changes least."""
    return min(candidates.tolist(), key=lambda each: (error(each), abs(np.log(each))))
