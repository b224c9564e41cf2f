"""Repetition: how much of a sequence repeats itself, and where a generation falls into a loop."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class LoopRule:
    """What counts as a loop in generated tokens: a stretch of `window` n-grams of which most were there before.

    Cutting keeps one window of the loop: drafters meet loops when they serve, so one turn of it is worth learning.
    An answer that loops before `min_tokens` tokens is dropped.
    """

    ngram: int = 8
    window: int = 64
    repeated: float = 0.8
    min_tokens: int = 16

    def __post_init__(self) -> None:
        if self.ngram < 1 or self.window < 1 or not 0 < self.repeated <= 1:
            raise ValueError("a loop rule needs ngram >= 1, window >= 1 and 0 < repeated <= 1")


def repeated_fraction(items: Sequence[Hashable], ngram: int) -> float:
    """The share of n-grams that already occurred earlier in the sequence; 0 when it is shorter than one."""
    grams = [tuple(items[i : i + ngram]) for i in range(len(items) - ngram + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def loop_start(tokens: Sequence[int], rule: LoopRule) -> int | None:
    """Where the first window of the rule that is mostly repetition begins; None when there is none."""
    seen = _seen_before(np.asarray(tokens, np.int64), rule.ngram)
    if len(seen) < rule.window:
        return None
    counts = np.concatenate([[0], np.cumsum(seen)])
    in_window = counts[rule.window :] - counts[: -rule.window]
    looping = np.flatnonzero(in_window >= rule.repeated * rule.window)
    return int(looping[0]) if looping.size else None


def _seen_before(tokens: np.ndarray, ngram: int) -> np.ndarray:
    """For each n-gram, whether an equal one starts earlier. Equality is exact: rows are compared, not hashed."""
    if len(tokens) < ngram:
        return np.zeros(0, bool)
    grams = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(tokens, ngram))
    rows = grams.view(np.dtype((np.void, grams.dtype.itemsize * ngram))).ravel()
    first, inverse = np.unique(rows, return_index=True, return_inverse=True)[1:]
    return first[inverse] != np.arange(len(rows))
