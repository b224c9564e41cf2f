"""What every drafter offers the decode round, and the drafter that never drafts."""

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from dspark_jax.core.arrays import Array, DType, Float, Int, pytree
from dspark_jax.nn.layers import Vocabulary
from dspark_jax.ops.sampling import Peaks, SamplingLaw


@pytree
class Proposal:
    """One drafted block a row."""

    tokens_BK: Int[Array, "B K"]
    probs_BKV: Float[Array, "B K V"]
    """The float32 law each token was sampled from."""
    logit_BK: Float[Array, "B K"]
    """The confidence head's word on P(token k accepted | tokens before it accepted); CERTAIN without a head."""
    top_BK2: Float[Array, "B K 2"]
    """Log-probabilities, at temperature 1, of the drafter's two likeliest tokens. Like the logit, they are known before
    token k is sampled: a length chosen by either stays lossless."""


CERTAIN = 30.0
"""A confidence logit whose sigmoid is 1 in float32."""


def top_two(logits_BTV: Float[Array, "B T V"], peaks: Peaks) -> Float[Array, "B T 2"]:
    """The two largest log-probabilities at temperature 1, of logits with these peaks; -inf for a second that does not
    exist."""
    first_BT, second_BT, _ = peaks
    mass_BT = jnp.sum(jnp.exp(logits_BTV - first_BT[..., None]), axis=-1)
    return jnp.stack([first_BT, second_BT], axis=-1) - (first_BT + jnp.log(mass_BT))[..., None]


def no_drafts(batch: int, vocab: int) -> Proposal:
    """A proposal of nothing."""
    return Proposal(
        tokens_BK=jnp.zeros((batch, 0), jnp.int32),
        probs_BKV=jnp.zeros((batch, 0, vocab)),
        logit_BK=jnp.zeros((batch, 0)),
        top_BK2=jnp.zeros((batch, 0, 2)),
    )


@runtime_checkable
class Drafter(Protocol):
    """A drafter borrows the target's vocabulary and keeps its own state of the committed context.

    State covers positions before `start_B`; the anchor (last committed token) sits at start_B and has no target
    features yet.
    """

    @property
    def block_size(self) -> int: ...

    @property
    def tapped_layers(self) -> tuple[int, ...]: ...

    def init_state(self, batch: int, span: int, dtype: DType) -> Any:
        """State for `batch` rows of `span` positions; a pytree whose arrays lead with the batch."""
        ...

    def extend(
        self,
        state: Any,
        vocabulary: Vocabulary,
        features_BTE: Float[Array, "B T E"],
        next_tokens_BT: Int[Array, "B T"],
        start_B: Int[Array, "B"],
        count_B: Int[Array, "B"],
    ) -> Any:
        """Take in the target's features of positions start_B.., each paired with the token that follows it.

        Only the first count_B of a row are committed; the others may be written as scratch.
        """
        ...

    def propose(
        self,
        vocabulary: Vocabulary,
        state: Any,
        anchor_B: Int[Array, "B"],
        start_B: Int[Array, "B"],
        law: SamplingLaw,
        drafts: int | None = None,
    ) -> tuple[Proposal, Any]:
        """Draft the `drafts` tokens that follow the anchor, block_size of them when None."""
        ...


def check_sizes(**sizes: int) -> None:
    """ValueError naming the first of a drafter's sizes that is no whole number from 1 up."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"drafter: {name} must be a whole number of at least 1, not {size!r}")


def check_step_decay(step_decay: float) -> None:
    """ValueError unless later steps weigh something."""
    if not 0.0 < step_decay < math.inf:
        raise ValueError(f"drafter: step_decay must be above 0, not {step_decay}")


def check_taps(tapped_layers: tuple[int, ...], num_target_layers: int) -> None:
    """ValueError unless there are taps, each once and each of a layer that a drafter can tap."""
    if not tapped_layers or len(set(tapped_layers)) < len(tapped_layers):
        raise ValueError(f"drafter: tapped_layers must be one or more different layers, not {tapped_layers}")
    if not all(-1 <= tap < num_target_layers - 1 for tap in tapped_layers):
        raise ValueError(
            f"drafter: tapped_layers {tapped_layers} must lie in -1..{num_target_layers - 2} "
            f"for a target of {num_target_layers} layers (its last layer cannot be tapped)"
        )


@jax.tree_util.register_static
@dataclass(frozen=True)
class NoDrafter:
    """Proposes nothing: the round becomes plain autoregressive decoding, the oracle of every lossless test."""

    block_size: int = 0
    tapped_layers: tuple[int, ...] = ()

    def init_state(self, batch: int, span: int, dtype: DType) -> tuple[()]:
        return ()

    def extend(
        self,
        state: tuple[()],
        vocabulary: Vocabulary,
        features_BTE: Array,
        next_tokens_BT: Array,
        start_B: Array,
        count_B: Array,
    ) -> tuple[()]:
        return state

    def propose(
        self,
        vocabulary: Vocabulary,
        state: tuple[()],
        anchor_B: Array,
        start_B: Array,
        law: SamplingLaw,
        drafts: int | None = None,
    ) -> tuple[Proposal, tuple[()]]:
        return no_drafts(anchor_B.shape[0], vocabulary.embedding.shape[0]), state
