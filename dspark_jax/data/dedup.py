"""Deduplication of prompts: exact up to case, punctuation and spacing, and near duplicates by word shingles.

Near duplicates are found with MinHash signatures in bands (Broder 1997) and then confirmed by the true Jaccard
similarity of their shingle sets, so that nothing is dropped by a hash alone.
"""

import zlib

import numpy as np

from dspark_jax.data.words import normalised_words

_BANDS, _ROWS = 32, 4
_SHINGLE = 3


class Deduplicator:
    """Remembers the texts it was shown.

    Texts whose 3-word shingles have at least a Jaccard similarity of `threshold` count as one; above 1 only exact
    duplicates do. `exact_only` texts (templates with new numbers) skip that test.
    """

    def __init__(self, threshold: float):
        self._threshold = threshold
        self._exact: set[str] = set()
        self._shingles: list[np.ndarray] = []
        self._bands: dict[bytes, list[int]] = {}
        random = np.random.default_rng(0)
        self._multiply = random.integers(0, 2**63, (_BANDS * _ROWS, 1), np.uint64) * np.uint64(2) + np.uint64(1)
        self._add = random.integers(0, 2**63, (_BANDS * _ROWS, 1), np.uint64)

    def is_new(self, text: str, *, exact_only: bool = False) -> bool:
        """True when nothing like it was shown before; it is then remembered."""
        words = normalised_words(text)
        key = " ".join(words)
        if key in self._exact:
            return False
        if not exact_only and self._threshold <= 1:
            shingles = _shingle_hashes(words)
            bands = self._signature(shingles)
            rivals = {rival for band in bands for rival in self._bands.get(band, ())}
            if any(jaccard(shingles, self._shingles[rival]) >= self._threshold for rival in rivals):
                return False
            for band in bands:
                self._bands.setdefault(band, []).append(len(self._shingles))
            self._shingles.append(shingles)
        self._exact.add(key)
        return True

    def _signature(self, shingles: np.ndarray) -> list[bytes]:
        """One key for each band: its number and the minima of its rows' hashes (multiply-shift, 32 bits)."""
        hashes = (self._multiply * shingles.astype(np.uint64) + self._add) >> np.uint64(32)
        minima = hashes.min(axis=1).astype(np.uint32).reshape(_BANDS, _ROWS)
        return [bytes([number]) + row.tobytes() for number, row in enumerate(minima)]


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Size of the intersection over size of the union of two arrays of distinct values."""
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / (len(a) + len(b) - shared)


def _shingle_hashes(words: list[str]) -> np.ndarray:
    """The distinct hashes of all runs of three words; a shorter text is one shingle."""
    runs = range(max(1, len(words) - _SHINGLE + 1))
    hashes = {zlib.crc32(" ".join(words[i : i + _SHINGLE]).encode()) for i in runs}
    return np.fromiter(hashes, np.uint32, len(hashes))
