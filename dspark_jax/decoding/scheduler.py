"""How many drafts of each request the target verifies.

Every policy is non-anticipating: admission of draft k looks at confidences c_1..c_k only, each known before token k
is sampled. That is what keeps a data-dependent length lossless (Appendix A).
"""

from dataclasses import dataclass

import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Float, Int


@dataclass(frozen=True, kw_only=True)
class FixedLength:
    """The first `length` drafts of every block; None verifies them all."""

    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 0:
            raise ValueError(f"scheduler: a fixed length cannot be negative, got {self.length}")


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """The drafts before the first whose confidence is under `confidence`."""

    confidence: float

    def __post_init__(self) -> None:
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"scheduler: a confidence threshold lies in 0..1, got {self.confidence}")


Policy = FixedLength | Threshold


def verified_lengths(policy: Policy, confidence_BK: Float[Array, "B K"]) -> Int[Array, "B"]:
    """Number of drafts to verify in each row, 0..K."""
    batch, block = confidence_BK.shape
    match policy:
        case FixedLength(length=length):
            return jnp.full(batch, block if length is None else min(length, block), jnp.int32)
        case Threshold(confidence=threshold):
            admitted_BK = (confidence_BK >= threshold).astype(jnp.int32)
            return jnp.sum(jnp.cumprod(admitted_BK, axis=1), axis=1)
