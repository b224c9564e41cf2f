"""The step curve: how long a round takes on this machine, by how much it verifies (SPS of section 3.3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """What decides the time of a round: rows of the state and their span, tokens verified over all rows, drafts
    made in each row (0: a round without drafting)."""

    rows: int
    span: int
    tokens: int
    drafts: int


@dataclass(frozen=True)
class StepCurve:
    """Seconds of a round, drafting included, for every measured shape.

    Between measured spans time is linear; beyond them, and between measured row counts, it is that of the nearest.
    """

    measured: Mapping[Shape, float]

    def __post_init__(self) -> None:
        if not self.measured:
            raise ValueError("step curve: it has no measured rounds")
        if not all(np.isfinite(seconds) and seconds > 0 for seconds in self.measured.values()):
            raise ValueError("step curve: the seconds of a round must be positive numbers")
        states = {(shape.rows, shape.span) for shape in self.measured}
        drafting = {(shape.rows, shape.span, shape.drafts > 0) for shape in self.measured}
        for rows, span in states:
            for drafts, kind in ((True, "with drafts"), (False, "without drafts")):
                if (rows, span, drafts) not in drafting:
                    raise ValueError(f"step curve: no round {kind} was measured for {rows} rows of {span} positions")

    def seconds(self, rows: int, span: int, tokens: int, drafts: int) -> float:
        """Seconds of a round of this shape."""
        held = min({shape.rows for shape in self.measured}, key=lambda other: (abs(other - rows), -other))
        tokens = round(tokens * held / rows)
        spans = sorted({s.span for s in self.measured if s.rows == held})
        return float(np.interp(span, spans, [self._at(held, other, tokens, drafts) for other in spans]))

    def rates(self, rows: int, span: int, sizes: Sequence[int], *, interpolate: bool = False) -> np.ndarray:
        """Rounds per second that verify n = 0..sizes[-1] tokens: a staircase over the compiled sizes, or the straight
        lines between its edges."""
        drafts = sizes[-1] // rows - 1
        seconds = [self.seconds(rows, span, size, drafts) for size in sizes]
        tokens = np.arange(sizes[-1] + 1)
        if interpolate:
            return (1 / np.interp(tokens, sizes, seconds)).astype(np.float32)
        return (1 / np.asarray(seconds))[np.searchsorted(sizes, tokens)].astype(np.float32)

    def _at(self, rows: int, span: int, tokens: int, drafts: int) -> float:
        """Time never falls as more is verified of as many drafts; what was not measured for so many drafts costs what
        the next measured size does."""
        points = sorted(
            (shape.tokens, seconds, shape.drafts)
            for shape, seconds in self.measured.items()
            if (shape.rows, shape.span) == (rows, span) and (shape.drafts > 0) == (drafts > 0)
        )
        if any((size, made) == (tokens, drafts) for size, _, made in points):
            points = [point for point in points if point[2] == drafts]
        worst = 0.0
        for size, seconds, _ in points:
            worst = max(worst, seconds)
            if size >= tokens:
                return worst
        return worst
