"""A round between its start on the device and the host's reading of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dspark_jax.decoding.admission import Sampling
from dspark_jax.decoding.transfer import HostRound, Sent


class SlotRound(NamedTuple):
    """What one round gave one request: accepted drafts, then the bonus or resampled token."""

    handle: int
    tokens: tuple[int, ...]
    proposed: int
    verified: int
    accepted: int
    confidence: np.ndarray
    """[K], of its drafts: the estimator's word, in rounds that nothing is decided from the confidence head's."""
    evidence: np.ndarray = np.zeros((0, 0), np.float32)
    """[K, F]: what they were estimated from."""


@dataclass(eq=False)
class Live:
    """A request in its slot."""

    handle: int
    sampling: Sampling
    length: int
    """Tokens known to be committed."""
    in_flight: int = 0
    """Rounds started and not finished."""


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A round on its way: its output on the device, and who sat in which row of which shape when it started."""

    out: Sent
    span: int
    held_rows: int
    watched: bool
    """Whether the planner learns from it."""
    rows: tuple[tuple[int, Live], ...]

    def read(self) -> HostRound:
        """The output on the host; waits until the round is over. Every rider then knows what it committed."""
        out = self.out.read()
        for row, live in self.rows:
            live.in_flight -= 1
            live.length += int(out.count_B[row])
        return out


def slot_rounds(out: HostRound, rows: Sequence[tuple[int, Live]]) -> list[SlotRound]:
    """What the round, read, gave these requests. Many requests wait for this: only tokens become Python's own."""
    tokens, counts, verified = out.tokens_BN.tolist(), out.count_B.tolist(), out.verified_B.tolist()
    return [
        SlotRound(
            live.handle,
            tuple(tokens[row][: counts[row]]),
            out.confidence_BK.shape[1],
            verified[row],
            counts[row] - 1,
            out.confidence_BK[row],
            out.evidence_BKF[row],
        )
        for row, live in rows
    ]
