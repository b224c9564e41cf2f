"""Files of a drafter that drafts from part of the vocabulary, seen as if it knew all of it (speculators' t2d, d2t)."""

import numpy as np
from jaxtyping import Shaped

from dspark_jax.interop.tensor_files import TensorFiles

_T2D, _D2T, _LM_HEAD, _W2 = "t2d", "d2t", "lm_head.weight", "markov_head.markov_w2.weight"
DRAFT_BIAS = "draft_bias"


class ReducedVocabulary:
    """A TensorSource over `files`: missing tokens have rows of zeros, and a `draft_bias` that keeps them undrafted.

    `draft_ids`: the target's token of every draft token. `d2t` holds what to add to the draft token; `t2d` marks the
    target's tokens that have one, and must agree.
    """

    def __init__(self, files: TensorFiles, *, vocab_size: int, draft_size: int):
        self._files, self._vocab_size = files, vocab_size
        for name in (_T2D, _D2T, _LM_HEAD):
            if name not in files.names:
                raise ValueError(f"{files.where()}: missing the tensor {name} of a reduced vocabulary")
        self.draft_ids = np.arange(draft_size) + self._integers(_D2T, draft_size)
        known = np.flatnonzero(self._integers(_T2D, vocab_size))
        if not np.array_equal(np.sort(self.draft_ids), known):
            raise ValueError(f"{files.where(_D2T)}: d2t and t2d contradict each other")

    @property
    def names(self) -> frozenset[str]:
        return (self._files.names - {_T2D, _D2T}) | {DRAFT_BIAS}

    def where(self, name: str | None = None) -> str:
        return self._files.where(_D2T if name == DRAFT_BIAS else name)

    def shape(self, name: str) -> tuple[int, ...]:
        if name == DRAFT_BIAS:
            return (self._vocab_size,)
        shape = self._files.shape(name)
        return (self._vocab_size, *shape[1:]) if name == _W2 and shape[0] == len(self.draft_ids) else shape

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        if name == DRAFT_BIAS:
            bias = np.full(self._vocab_size, -np.inf, np.float32)
            bias[self.draft_ids] = 0.0
            return bias
        stored = self._files.read(name)
        if name != _W2:
            return stored
        whole = np.zeros((self._vocab_size, *stored.shape[1:]), stored.dtype)
        whole[self.draft_ids] = stored
        return whole

    def _integers(self, name: str, size: int) -> np.ndarray:
        if self._files.shape(name) != (size,):
            raise ValueError(
                f"{self._files.where(name)}: tensor {name} has shape {list(self._files.shape(name))}, "
                f"config.json needs [{size}]"
            )
        return self._files.read_integers(name)
