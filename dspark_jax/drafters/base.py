"""What every drafter offers the decode round, and the drafter that never drafts."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from dspark_jax.core.arrays import Array, DType, Float, Int, pytree
from dspark_jax.nn.layers import Vocabulary
from dspark_jax.ops.sampling import SamplingLaw


@pytree
class Proposal:
    """One drafted block a row."""

    tokens_BK: Int[Array, "B K"]
    probs_BKV: Float[Array, "B K V"]
    """The float32 law each token was sampled from."""
    confidence_BK: Float[Array, "B K"]
    """c_k = P(token k accepted | tokens before it accepted); known before token k is sampled. 1 without a head."""


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
        features_BTE: Float[Array, "B T E"],
        next_tokens_BT: Int[Array, "B T"],
        start_B: Int[Array, "B"],
    ) -> Any:
        """Take in the target's features of positions start_B.., each paired with the token that follows it."""
        ...

    def propose(
        self,
        vocabulary: Vocabulary,
        state: Any,
        anchor_B: Int[Array, "B"],
        start_B: Int[Array, "B"],
        law: SamplingLaw,
    ) -> tuple[Proposal, Any]:
        """Draft the block_size tokens that follow the anchor."""
        ...


@jax.tree_util.register_static
@dataclass(frozen=True)
class NoDrafter:
    """Proposes nothing: the round becomes plain autoregressive decoding, the oracle of every lossless test."""

    block_size: int = 0
    tapped_layers: tuple[int, ...] = ()

    def init_state(self, batch: int, span: int, dtype: DType) -> tuple[()]:
        return ()

    def extend(self, state: tuple[()], features_BTE: Array, next_tokens_BT: Array, start_B: Array) -> tuple[()]:
        return state

    def propose(
        self, vocabulary: Vocabulary, state: tuple[()], anchor_B: Array, start_B: Array, law: SamplingLaw
    ) -> tuple[Proposal, tuple[()]]:
        batch, vocab = anchor_B.shape[0], vocabulary.embedding.shape[0]
        nothing = jnp.zeros((batch, 0), jnp.float32)
        return Proposal(
            tokens_BK=nothing.astype(jnp.int32), probs_BKV=jnp.zeros((batch, 0, vocab)), confidence_BK=nothing
        ), state
