"""An estimator that goes on learning from the rounds a server runs.

Decoding stays lossless whatever it learns: a refitted estimator is a function of rounds that are over.
"""

from collections.abc import Iterable

import numpy as np

from dspark_jax.decoding.confidence import HEAD_AND_DRAFT
from dspark_jax.decoding.fitted import Fitted
from dspark_jax.decoding.logistic import logistic_regression
from dspark_jax.decoding.slots import SlotRound


class OnlineEstimator:
    """Keeps the last `memory` rounds, each counting half as much after `half_life` further ones.

    `refit` combines all evidence by logistic regression a position, drawn towards `start` as strongly as `prior`
    outcomes would (in units of the evidence's own spread): with little seen, or in positions that schedules seldom
    reach, it stays what it was. The rounds must come with all evidence, so the slots begin with the first `refit`, too.
    Not thread-safe: the thread that runs the rounds owns it.
    """

    def __init__(
        self, start: Fitted, *, every: int = 1000, memory: int = 20_000, half_life: float = 5e3, prior: float = 20.0
    ):
        if every < 1 or memory < 1 or half_life <= 0 or prior <= 0:
            raise ValueError(
                "an online estimator needs every >= 1, memory >= 1, half_life > 0 and prior > 0, "
                f"got {every}, {memory}, {half_life} and {prior}"
            )
        missing = HEAD_AND_DRAFT - start.weights_KF.shape[1]
        self._start = Fitted(weights_KF=np.pad(start.weights_KF, ((0, 0), (0, missing))), bias_K=start.bias_K)
        self._every, self._half_life, self._prior = every, half_life, prior
        # A ring: the round that was seen as number n lies at n modulo its length.
        self._evidence_RKF = np.zeros((memory, *self._start.weights_KF.shape), np.float32)
        self._verified_R = np.zeros(memory, np.int64)
        self._accepted_R = np.zeros(memory, np.int64)
        self._seen = self._fitted = 0

    @property
    def due(self) -> bool:
        """Whether `every` rounds have been seen since the last fit."""
        return self._seen - self._fitted >= self._every

    @property
    def kept(self) -> int:
        """Rounds in memory."""
        return min(self._seen, len(self._verified_R))

    def observe(self, rounds: Iterable[SlotRound]) -> None:
        """Takes in rounds that are over. One that verified nothing, or whose evidence is no number or not all there,
        teaches nothing."""
        for each in rounds:
            evidence_KF = np.asarray(each.evidence, np.float32)
            whole = evidence_KF.shape[1:] == self._evidence_RKF.shape[2:]
            if not each.verified or not whole or not np.isfinite(evidence_KF).all():
                continue
            at = self._seen % len(self._verified_R)
            # A round may draft less than a block: what it verified is never more than what it drafted.
            self._evidence_RKF[at, : len(evidence_KF)] = evidence_KF
            self._verified_R[at], self._accepted_R[at] = each.verified, each.accepted
            self._seen += 1

    def refit(self) -> Fitted:
        """The estimator as of now. It costs some tens of milliseconds; when to pay them is the caller's choice."""
        self._fitted = self._seen
        size = self.kept
        age_R = (self._seen - 1 - np.arange(size)) % max(1, len(self._verified_R))
        weight_R = 0.5 ** (age_R / self._half_life)
        verified_R, accepted_R = self._verified_R[:size], self._accepted_R[:size]
        weights_KF, bias_K = self._start.weights_KF.copy(), self._start.bias_K.copy()
        for k in range(len(bias_K)):
            rows_R = (verified_R > k) & (accepted_R >= k)
            if rows_R.any():
                weights_KF[k], bias_K[k] = logistic_regression(
                    self._evidence_RKF[:size][rows_R, k].astype(np.float64),
                    accepted_R[rows_R] > k,
                    prior=(self._start.weights_KF[k], float(self._start.bias_K[k])),
                    weight_B=weight_R[rows_R],
                    ridge=self._prior,
                )
        return Fitted(weights_KF=weights_KF, bias_K=bias_K)
