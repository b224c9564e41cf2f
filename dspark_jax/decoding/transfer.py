"""What a round gives, on its way to the host: one array, since each costs the host of a GPU some 0.1 ms."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax

from dspark_jax.core.arrays import Array, Float, Int
from dspark_jax.decoding.round import RoundOutput


@dataclass(frozen=True, kw_only=True)
class HostRound:
    """A `RoundOutput` on the host."""

    tokens_BN: Int[np.ndarray, "B N"]
    count_B: Int[np.ndarray, "B"]
    verified_B: Int[np.ndarray, "B"]
    confidence_BK: Float[np.ndarray, "B K"]
    evidence_BKF: Float[np.ndarray, "B K F"]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A round's output on the device."""

    words_BW: Int[Array, "B W"]
    """Tokens, count and verified drafts of every row, then the bits of its confidences and evidence."""
    features: int
    """F, numbers of evidence a draft."""

    def read(self) -> HostRound:
        """Waits until the round is over."""
        words_BW = np.asarray(self.words_BW)
        block = (words_BW.shape[1] - 3) // (2 + self.features)
        tokens_BN, rest_BW = np.split(words_BW, [block + 1], axis=1)
        numbers_BW = np.ascontiguousarray(rest_BW[:, 2:]).view(np.float32)
        return HostRound(
            tokens_BN=tokens_BN,
            count_B=rest_BW[:, 0],
            verified_B=rest_BW[:, 1],
            confidence_BK=numbers_BW[:, :block],
            evidence_BKF=numbers_BW[:, block:].reshape(len(words_BW), block, self.features),
        )


def packed(out: RoundOutput) -> Int[Array, "B W"]:
    """The words of `Sent`."""
    evidence_BW = out.evidence_BKF.reshape(len(out.count_B), -1)
    integers = out.tokens_BN, out.count_B[:, None], out.verified_B[:, None]
    return jnp.concatenate([*integers, _bits(out.confidence_BK), _bits(evidence_BW)], axis=1)


def _bits(numbers_BW: Float[Array, "B W"]) -> Int[Array, "B W"]:
    return lax.bitcast_convert_type(numbers_BW.astype(jnp.float32), jnp.int32)
