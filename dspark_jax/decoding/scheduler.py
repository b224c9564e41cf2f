"""How many drafts of each request the target verifies.

Every policy is non-anticipating: admission of draft k looks at confidences c_1..c_k of its own request only, each
known before token k is sampled, and at other requests. That is what keeps a data-dependent length lossless
(Appendix A).
"""

from dataclasses import dataclass

import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Bool, Float, Int, pytree
from dspark_jax.decoding.confidence import Estimator


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


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """Algorithm 1: admit drafts in the order of their survival while expected tokens per second rise.

    With `fill` the bucket the last of them falls in is then filled in the same order: its other places would be
    computed for nothing. Where the filling starts is known from drafts that rank before the filled ones, so it
    anticipates nothing either. With `interpolate` the steps of the curve are smoothed away, at whose first edge the
    rise would often end.
    """

    fill: bool = True
    interpolate: bool = False


@dataclass(frozen=True, kw_only=True)
class TwoStep:
    """The asynchronous variant: before the round, the budget of verification tokens that is best over all buckets,
    from confidences of rounds already read; inside it, the drafts that rank highest by live survival.

    `min_gain`: what another budget must promise over the one in use (at first that of every draft), as a fraction of
    tokens per second. `rest`: rounds for which a request whose drafts do not pay asks for none, before it is tried
    again; while all rest nothing is drafted, and who rests among others is drafted along with them.
    `every`: rounds that a budget lasts at least, since what speaks for it changes slowly and looking at it takes the
    host time; short rounds so many that this is a hundredth of them.
    """

    min_gain: float = 0.02
    rest: int = 8
    every: int = 8

    def __post_init__(self) -> None:
        if not (self.min_gain >= 0 and self.rest >= 0):
            raise ValueError(f"scheduler: min_gain and rest cannot be negative, got {self.min_gain} and {self.rest}")
        if self.every < 1:
            raise ValueError(f"scheduler: a budget lasts at least one round, not {self.every}")


Policy = FixedLength | Threshold | EarlyStop | TwoStep


@pytree
class Guide:
    """What a round needs to know beside its state to choose lengths."""

    estimator: Estimator
    live_B: Bool[Array, "B"]
    """Rows that hold a request; the others verify no drafts."""
    pinned_B: Bool[Array, "B"]
    """Rows whose drafts are all verified whatever the policy, so that load does not change what a seed says."""
    rates_N: Float[Array, "N"] | None = None
    """Rounds per second that verify n tokens, n = 0..B*(K+1), SPS of section 3.3; Algorithm 1 alone needs them."""

    @classmethod
    def unguided(cls, batch: int, block: int) -> "Guide":
        """Every row live, none pinned, the confidence head taken at its word."""
        nobody_B = jnp.zeros(batch, bool)
        return cls(estimator=Estimator.raw(block), live_B=~nobody_B, pinned_B=nobody_B)


def verified_lengths(
    policy: Policy, confidence_BK: Float[Array, "B K"], guide: Guide, sizes: tuple[int, ...]
) -> Int[Array, "B"]:
    """Number of drafts to verify in each row, 0..K.

    `sizes` are the token counts a round may verify, rising; the last one is TwoStep's budget.
    """
    batch, block = confidence_BK.shape
    survival_BK = jnp.cumprod(confidence_BK, axis=1)
    match policy:
        case FixedLength(length=length):
            lengths_B = jnp.full(batch, block if length is None else min(length, block), jnp.int32)
        case Threshold(confidence=threshold):
            admitted_BK = (confidence_BK >= threshold).astype(jnp.int32)
            lengths_B = jnp.sum(jnp.cumprod(admitted_BK, axis=1), axis=1)
        case EarlyStop(fill=fill):
            return ranked_lengths(survival_BK, guide, _early_stop(survival_BK, guide, sizes if fill else ()))
        case TwoStep():
            return ranked_lengths(survival_BK, guide, sizes[-1] - jnp.sum(guide.live_B))
    lengths_B = jnp.where(guide.pinned_B, block, lengths_B)
    return jnp.where(guide.live_B, lengths_B, 0)


def ranked_lengths(survival_BK: Float[Array, "B K"], guide: Guide, admitted: Int[Array, ""]) -> Int[Array, "B"]:
    """Lengths that take the `admitted` drafts of live rows that rank highest: pinned rows', then by survival."""
    batch, block = survival_BK.shape
    order = _ranking(survival_BK, guide)
    taken = jnp.zeros(batch * block, jnp.int32).at[order].set((jnp.arange(batch * block) < admitted).astype(jnp.int32))
    return jnp.where(guide.live_B, jnp.sum(taken.reshape(batch, block), axis=1), 0)


def _ranking(survival_BK: Float[Array, "B K"], guide: Guide) -> Int[Array, "B*K"]:
    """Drafts from first to last: pinned rows, live rows by falling survival, dead rows; ties by row, then slot.

    Survival never rises along a row and the sort is stable, so a draft ranks after the drafts before it.
    """
    rank_BK = jnp.where(guide.pinned_B[:, None], 2.0, survival_BK)
    rank_BK = jnp.where(guide.live_B[:, None], rank_BK, -1.0)
    return jnp.argsort(-rank_BK.reshape(-1), stable=True)


def _early_stop(survival_BK: Float[Array, "B K"], guide: Guide, sizes: tuple[int, ...]) -> Int[Array, ""]:
    """Drafts that Algorithm 1 admits."""
    if guide.rates_N is None:
        raise ValueError("scheduler: early stop needs a step curve")
    order = _ranking(survival_BK, guide)
    live_K = jnp.broadcast_to(guide.live_B[:, None], survival_BK.shape).reshape(-1)[order]
    pinned_K = jnp.broadcast_to(guide.pinned_B[:, None], survival_BK.shape).reshape(-1)[order]
    requests = jnp.sum(guide.live_B)
    tokens = requests + jnp.arange(1, order.shape[0] + 1)
    expected = requests + jnp.cumsum(survival_BK.reshape(-1)[order])
    throughput = expected * guide.rates_N[tokens]
    before = jnp.concatenate([(requests * guide.rates_N[requests])[None], throughput[:-1]])
    goes_on = ((throughput > before) | pinned_K) & live_K
    admitted = jnp.sum(jnp.cumprod(goes_on.astype(jnp.int32)))
    if not sizes:
        return admitted
    edges = jnp.asarray(sizes)
    bucket = edges[jnp.searchsorted(edges, requests + admitted)]
    return jnp.where(admitted > 0, bucket - requests, 0)
