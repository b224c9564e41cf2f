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
    """Tokens, count and verified drafts of every row, then the bits of its confidences and evidence, then what an
    earlier round left."""
    free: list[Array]
    """Takes the words when they are read: a later round writes over them."""
    drafts: int
    """K of this round."""
    features: int
    """F, numbers of evidence a draft."""

    def read(self) -> HostRound:
        """Waits until the round is over. Once."""
        # A copy: under a view into it, on a CPU, a later round would be given other memory.
        words_BW, drafts = np.array(self.words_BW), self.drafts
        self.free.append(self.words_BW)
        tokens_BN, rest_BW = np.split(words_BW, [drafts + 1], axis=1)
        numbers_BW = np.ascontiguousarray(rest_BW[:, 2 : 2 + drafts * (1 + self.features)]).view(np.float32)
        return HostRound(
            tokens_BN=tokens_BN,
            count_B=rest_BW[:, 0],
            verified_B=rest_BW[:, 1],
            confidence_BK=numbers_BW[:, :drafts],
            evidence_BKF=numbers_BW[:, drafts:].reshape(len(words_BW), drafts, self.features),
        )


def words_shape(rows: int, most: int, features: int) -> tuple[int, int]:
    """[B, W] of the words of rounds of `most` drafts and fewer."""
    return rows, 3 + most * (2 + features)


def written(out: RoundOutput, over_BW: Int[Array, "B W"]) -> Int[Array, "B W"]:
    """The words of `Sent`, in place of those of a round that was read.

    A round that is given where to write takes no new memory, and what the next one takes stays where it was, whatever
    its kind. On a GPU all that moved is told to each kernel of a round, which takes the host as long as the round.
    """
    evidence_BW = out.evidence_BKF.reshape(len(out.count_B), -1)
    integers = out.tokens_BN, out.count_B[:, None], out.verified_B[:, None]
    words_BW = jnp.concatenate([*integers, _bits(out.confidence_BK), _bits(evidence_BW)], axis=1)
    return lax.dynamic_update_slice(over_BW, words_BW, (0, 0))


def _bits(numbers_BW: Float[Array, "B W"]) -> Int[Array, "B W"]:
    return lax.bitcast_convert_type(numbers_BW.astype(jnp.float32), jnp.int32)
