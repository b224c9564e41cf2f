"""What the target said about drafted blocks, as the calibration of confidences wants it: host arrays, a row a round."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from dspark_jax.decoding.slots import SlotRound


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """Rounds of decoding: what was known before each draft, how many drafts were verified, how many of them kept.

    Drafts count from 0. A policy decides how many are verified by the evidence alone, so what happens to a draft that
    is verified has the same law, given its evidence, as if all were.
    """

    evidence_BKF: Float[np.ndarray, "B K F"]
    """Logit of the confidence head, log-probability of the drafter's likeliest token, its lead over the second."""
    verified_B: Int[np.ndarray, "B"]
    accepted_B: Int[np.ndarray, "B"]
    prompt_B: Int[np.ndarray, "B"]
    """Which prompt the round belongs to."""

    @classmethod
    def of(cls, rounds: Sequence[SlotRound], prompts: Sequence[int]) -> "Outcomes":
        """Rounds as the slots give them (one or more), and the number of the prompt that each belongs to."""
        return cls(
            evidence_BKF=np.asarray([each.evidence for each in rounds], np.float64),
            verified_B=np.asarray([each.verified for each in rounds]),
            accepted_B=np.asarray([each.accepted for each in rounds]),
            prompt_B=np.asarray(prompts, np.int64),
        )

    @property
    def rounds(self) -> int:
        return len(self.verified_B)

    @property
    def block_size(self) -> int:
        return self.evidence_BKF.shape[1]

    @property
    def has_head(self) -> bool:
        """Whether the drafter says anything about its confidence: without a head the logit is a constant."""
        return bool(np.ptp(self.evidence_BKF[..., 0]) > 0)

    def judged(self, k: int) -> Bool[np.ndarray, "B"]:
        """Rounds in which draft k was verified, after accepted drafts or not: what survival a_k speaks of."""
        return self.verified_B > k

    def reached(self, k: int) -> Bool[np.ndarray, "B"]:
        """Rounds in which draft k was verified after every draft before it was kept: what c_k speaks of."""
        return self.judged(k) & (self.accepted_B >= k)

    def kept(self, k: int) -> Bool[np.ndarray, "B"]:
        """Rounds whose draft k was kept, and so all before it."""
        return self.accepted_B > k

    def take(self, rows_B: Bool[np.ndarray, "B"]) -> "Outcomes":
        """Some of the rounds."""
        return Outcomes(
            evidence_BKF=self.evidence_BKF[rows_B],
            verified_B=self.verified_B[rows_B],
            accepted_B=self.accepted_B[rows_B],
            prompt_B=self.prompt_B[rows_B],
        )

    def halves(self, seed: int) -> "tuple[Outcomes, Outcomes]":
        """Two disjoint halves of the prompts, with all their rounds: rounds of one text are too alike to be split."""
        prompts = np.random.default_rng(seed).permutation(np.unique(self.prompt_B))
        first_B = np.isin(self.prompt_B, prompts[: (len(prompts) + 1) // 2])
        return self.take(first_B), self.take(~first_B)
