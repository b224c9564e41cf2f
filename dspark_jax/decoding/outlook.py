"""What is expected of the next drafts of live requests: host arrays with a row for each row of the decode state."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclass(eq=False, kw_only=True)
class Outlooks:
    """Rows without a request are neither live nor of any meaning."""

    live_B: Bool[np.ndarray, "B"]
    pinned_B: Bool[np.ndarray, "B"]
    known_B: Bool[np.ndarray, "B"]
    """Whether a drafted block of the request was read since it came, or since it last rested."""
    survival_BK: Float[np.ndarray, "B K"]
    """a_1..a_K of its last drafted block."""
    gain_B: Float[np.ndarray, "B"]
    """Drafts a round it can expect to keep."""
    resting_B: Int[np.ndarray, "B"]
    """Rounds it still goes without drafts."""

    @classmethod
    def empty(cls, rows: int, block: int) -> "Outlooks":
        """Of a state without requests."""
        return cls(
            live_B=np.zeros(rows, bool),
            pinned_B=np.zeros(rows, bool),
            known_B=np.zeros(rows, bool),
            survival_BK=np.zeros((rows, block)),
            gain_B=np.zeros(rows),
            resting_B=np.zeros(rows, np.int32),
        )

    def enter(self, row: int, *, pinned: bool) -> None:
        """A request of which nothing is known takes this row."""
        self.live_B[row], self.pinned_B[row], self.known_B[row] = True, pinned, False
        self.gain_B[row] = self.resting_B[row] = 0

    def leave(self, row: int) -> None:
        """The row's request is gone."""
        self.live_B[row] = False

    def moved(self, picked: Sequence[int], rows: int) -> "Outlooks":
        """The picked rows, first in a state of so many."""
        other = Outlooks.empty(rows, self.survival_BK.shape[1])
        for field in fields(self):
            getattr(other, field.name)[: len(picked)] = getattr(self, field.name)[list(picked)]
        return other
