"""Which conversations share a row: first-fit over their lengths, decided before anything is read."""

from dataclasses import dataclass

import numpy as np

_OPEN = 256


@dataclass(frozen=True, kw_only=True)
class Packs:
    """A sequence of groups of store rows; those of group i lie between bounds[i] and bounds[i + 1]."""

    rows: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, group: int | np.integer) -> np.ndarray:
        return self.rows[self.bounds[group] : self.bounds[group + 1]]


def alone(rows: np.ndarray) -> Packs:
    """Every row for itself."""
    return Packs(rows=rows, bounds=np.arange(len(rows) + 1))


def first_fit(rows: np.ndarray, lengths: np.ndarray, length: int) -> Packs:
    """Each row, in the order given, joins the first group that has room for it; groups hold `length` tokens.

    `lengths` are those of `rows`; longer ones count as `length`. Of the groups with room left only so many stay open
    that the time is linear in the rows; the fullest one closes first.
    """
    open_groups: list[list[int]] = []
    room = np.full(_OPEN + 1, -1, np.int64)
    closed: list[list[int]] = []
    for row, size in zip(rows.tolist(), np.minimum(lengths, length).tolist(), strict=True):
        fitting = room >= size
        place = int(np.argmax(fitting))
        if not fitting[place]:
            if len(open_groups) == _OPEN:
                full = int(np.argmin(room[:_OPEN]))
                closed.append(open_groups.pop(full))
                room[full:-1] = room[full + 1 :]
            place = len(open_groups)
            open_groups.append([])
            room[place] = length
        open_groups[place].append(row)
        room[place] -= size
    groups = closed + open_groups
    bounds = np.cumsum([0, *map(len, groups)])
    return Packs(rows=np.asarray([row for group in groups for row in group], rows.dtype), bounds=bounds)
