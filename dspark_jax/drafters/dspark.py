"""Block drafters: a parallel backbone over the target's features, then a sequential head (DSpark, section 3.1).

A block's inputs are the anchor's embedding and mask embeddings at positions anchor, anchor+1, ... In DSpark slot k
predicts the token at anchor+k+1, so K inputs give K drafts; in the original DFlash, which has no head, slot j predicts
its own position anchor+j and the anchor's slot is unused, so K drafts take K+1 inputs. In every layer keys and values
are those of the context features followed by the block's own, and the block attends to itself in both directions.
"""

from copy import copy
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from dspark_jax.core.arrays import Array, DType, Float, Int
from dspark_jax.drafters.base import CERTAIN, Proposal, check_sizes, check_taps, top_two
from dspark_jax.drafters.heads import ConfidenceHead, MarkovHead, MarkovSpec, VanillaMarkov
from dspark_jax.nn.block import Block, LayerSpec
from dspark_jax.nn.block_attention import BlockAttention, CachedBlocks
from dspark_jax.nn.cache import Caching, KVCache, init_cache
from dspark_jax.nn.layers import RMSNorm, Vocabulary, kernel
from dspark_jax.nn.training_attention import PlainTraining, TrainingAttention
from dspark_jax.ops.sampling import Draws, SamplingLaw, law_probs, sample, two_largest


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """A DSpark drafter, or a DFlash one: `markov_head` None and `confidence` False.

    `tapped_layers` are 0-based target layers (-1: the embedding), never the last one. `block_size` counts drafts.
    `slot_predicts_itself`: the original DFlash's alignment. `reduced_vocabulary`: some tokens are never drafted.
    """

    vocab_size: int
    layer: LayerSpec
    num_target_layers: int
    tapped_layers: tuple[int, ...]
    mask_token_id: int
    num_layers: int = 5
    block_size: int = 7
    markov_head: MarkovSpec | None = field(default_factory=VanillaMarkov)
    confidence: bool = True
    confidence_with_markov: bool = True
    slot_predicts_itself: bool = False
    reduced_vocabulary: bool = False

    def __post_init__(self) -> None:
        check_sizes(vocab_size=self.vocab_size, num_layers=self.num_layers, block_size=self.block_size)
        if self.markov_head is not None:
            check_sizes(markov_rank=self.markov_rank)
        check_taps(self.tapped_layers, self.num_target_layers)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"drafter: mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}"
            )
        if self.confidence and self.confidence_with_markov and self.markov_head is None:
            raise ValueError(
                "drafter: confidence_with_markov needs a Markov head; set it false or give markov_rank >= 1"
            )

    @property
    def input_slots(self) -> int:
        """Slots the backbone computes for a block."""
        return self.block_size + self.slot_predicts_itself

    @property
    def markov_rank(self) -> int:
        return 0 if self.markov_head is None else self.markov_head.rank

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return (self.layer,) * self.num_layers


class DSpark(Caching):
    """Parameters of one drafter; embedding and LM head are the target's, passed in as `vocabulary`.

    `block_attention`: how decoding attends; None, plainly, until somebody who knows the device chooses.
    """

    def __init__(self, config: DSparkConfig, *, rngs: nnx.Rngs, dtype: DType = jnp.float32):
        width, features = config.layer.d_model, config.layer.d_model * len(config.tapped_layers)
        eps = config.layer.norm_eps
        self.config = config
        self.block_attention: BlockAttention | None = None
        self.fc = kernel(rngs, (features, width), ("features", "model"), fan_in=features, dtype=dtype)
        self.hidden_norm = RMSNorm(width, "model", eps=eps, dtype=dtype)
        self.layers = nnx.List([Block(spec, rngs=rngs, dtype=dtype) for spec in config.layers])
        self.norm = RMSNorm(width, "model", eps=eps, dtype=dtype)
        # 0 for a token that may be drafted, -inf for one that never is.
        self.draft_bias = (
            nnx.Param(jnp.zeros(config.vocab_size, dtype), axes=("vocab",)) if config.reduced_vocabulary else None
        )
        self.markov_head = (
            MarkovHead(config.markov_head, vocab_size=config.vocab_size, d_model=width, rngs=rngs, dtype=dtype)
            if config.markov_head
            else None
        )
        markov_width = config.markov_rank if config.confidence_with_markov else 0
        self.confidence_head = (
            ConfidenceHead(width + markov_width, rngs=rngs, dtype=dtype) if config.confidence else None
        )

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        return self.config.tapped_layers

    def with_block_attention(self, block_attention: BlockAttention) -> "DSpark":
        """This drafter, the same parameters, decoding by `block_attention`."""
        other = copy(self)
        other.block_attention = block_attention
        return other

    # Decoding: the context's keys and values live in a cache.

    def init_state(self, batch: int, span: int, dtype: DType) -> KVCache:
        return init_cache(self.config.layers, batch, span, dtype)

    def extend(
        self,
        state: KVCache,
        vocabulary: Vocabulary,
        features_BTE: Float[Array, "B T E"],
        next_tokens_BT: Int[Array, "B T"],
        start_B: Int[Array, "B"],
        count_B: Int[Array, "B"],
    ) -> KVCache:
        """Project features of positions start_B.. into every layer's cache; nothing else is needed."""
        context_BTD = self.context(features_BTE)
        positions_BT = start_B[:, None] + jnp.arange(features_BTE.shape[1])
        pairs = [
            self.write(held, block.attention.keys_values(context_BTD, positions_BT), start_B)
            for held, block in zip(zip(state.keys, state.values, strict=True), self.layers, strict=True)
        ]
        keys, values = zip(*pairs, strict=True)
        return KVCache(keys=keys, values=values)

    def propose(
        self,
        vocabulary: Vocabulary,
        state: KVCache,
        anchor_B: Int[Array, "B"],
        start_B: Int[Array, "B"],
        law: SamplingLaw,
        drafts: int | None = None,
    ) -> tuple[Proposal, KVCache]:
        """Draft K tokens: one backbone pass over the whole block, then a scan of the Markov head over the slots."""
        hidden_BKD, state = self.cached_block(vocabulary, state, anchor_B, start_B)
        hidden_KBD = hidden_BKD[:, :drafts].swapaxes(0, 1)
        base_KBV = self.base_logits(vocabulary, hidden_KBD)
        carry = (anchor_B, self.markov_head.start(anchor_B.shape) if self.markov_head else None)

        def slot(
            carry: tuple[Array, Any], inputs: tuple[Array, Array, Array]
        ) -> tuple[tuple[Array, Any], tuple[Array, ...]]:
            (previous_B, markov), (hidden_BD, logits_BV, offset) = carry, inputs
            embedded_BR = None
            if self.markov_head:
                embedded_BR = self.markov_head.embed(previous_B)
                markov, latent_BR = self.markov_head.step(markov, hidden_BD, embedded_BR)
                logits_BV = logits_BV + self.markov_head.bias(latent_BR)
            logits_B1V = logits_BV[:, None]
            peaks = two_largest(logits_B1V)
            probs_BV = law_probs(logits_B1V, law, peaks)[:, 0]
            keys_B = jax.vmap(lambda key: jax.random.fold_in(key, offset))(law.keys_B)
            token_B = sample(probs_BV, keys_B, law.draws)
            logit_B = self.confidence_logits(hidden_BD, embedded_BR)
            return (token_B, markov), (token_B, probs_BV, logit_B, top_two(logits_B1V, peaks)[:, 0])

        slots = (hidden_KBD, base_KBV, jnp.arange(len(hidden_KBD)))
        # Without branches inside, the few slots run faster unrolled: a loop costs an accelerator a stall a turn.
        unroll = len(hidden_KBD) if law.draws is not Draws.ANY else 1
        _, (tokens, probs, logits, top) = lax.scan(slot, carry, slots, unroll=unroll)
        return Proposal(
            tokens_BK=tokens.swapaxes(0, 1),
            probs_BKV=probs.swapaxes(0, 1),
            logit_BK=logits.swapaxes(0, 1),
            top_BK2=top.swapaxes(0, 1),
        ), state

    def cached_block(
        self, vocabulary: Vocabulary, state: KVCache, anchor_B: Int[Array, "B"], start_B: Int[Array, "B"]
    ) -> tuple[Float[Array, "B K D"], KVCache]:
        """Normed hidden states of one block a row. Positions from start_B on are scratch in the cache."""
        slots, block_attention = self.config.input_slots, self.block_attention or CachedBlocks()

        def attend(index: int, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
            held = state.keys[index], state.values[index]
            return block_attention(self.config.layer, q, (k, v), held, start_B)

        x_BKD = self._block_inputs(vocabulary, anchor_B[:, None])[:, 0]
        positions_BK = start_B[:, None] + jnp.arange(slots)
        pairs = []
        for index, block in enumerate(self.layers):
            x_BKD, pair = block(x_BKD, positions_BK, lambda q, k, v, i=index: attend(i, q, k, v))
            pairs.append(pair)
        keys, values = zip(*pairs, strict=True)
        return self.norm(x_BKD)[:, slots - self.block_size :], KVCache(keys=keys, values=values)

    # Training: every block of a sequence at once.

    def training_blocks(
        self,
        vocabulary: Vocabulary,
        tokens_BT: Int[Array, "B T"],
        features_BTE: Float[Array, "B T E"],
        anchors_BA: Int[Array, "B A"],
        starts_BT: Int[Array, "B T"] | None = None,
        remat: bool = False,
        attention: TrainingAttention | None = None,
    ) -> Float[Array, "B A K D"]:
        """Normed hidden states of the block at every anchor; blocks see the context before it and themselves.

        Where a row holds several documents, `starts_BT` says where each token's begins: a block sees its anchor's.
        With `remat` the backward pass computes each layer again instead of keeping what it made. `attention`: how
        blocks attend; None is plainly.
        """
        (batch, length), num_anchors, block = tokens_BT.shape, anchors_BA.shape[1], self.config.input_slots
        attention = attention or PlainTraining()
        context_BTD = self.context(features_BTE)
        starts_BT = jnp.zeros_like(tokens_BT) if starts_BT is None else starts_BT
        starts_BA = jnp.take_along_axis(starts_BT, anchors_BA, axis=1)
        context_positions = jnp.arange(length) - starts_BT
        positions_BAK = (anchors_BA - starts_BA)[..., None] + jnp.arange(block)
        anchor_tokens_BA = jnp.take_along_axis(tokens_BT, anchors_BA, axis=1)
        x_BQD = self._block_inputs(vocabulary, anchor_tokens_BA).reshape(batch, num_anchors * block, -1)

        def through(layer: Block, x_BQD: Array) -> Array:
            context = layer.attention.keys_values(context_BTD, context_positions)

            def attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
                return attention(self.config.layer, q, context, (k, v), anchors_BA, starts_BA), None

            return layer(x_BQD, positions_BAK.reshape(batch, -1), attend)[0]

        for layer in self.layers:
            x_BQD = (jax.checkpoint(through) if remat else through)(layer, x_BQD)
        return self.norm(x_BQD).reshape(batch, num_anchors, block, -1)[:, :, block - self.block_size :]

    # Shared by both.

    def context(self, features_BTE: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        """Tapped target features as the drafter's context states."""
        return self.hidden_norm(features_BTE.astype(self.fc.dtype) @ self.fc[...])

    def head_logits(
        self, vocabulary: Vocabulary, hidden: Float[Array, "*B K D"], previous: Int[Array, "*B K"]
    ) -> tuple[Float[Array, "*B K V"], Float[Array, "*B K"]]:
        """(draft logits, confidence logits) of blocks whose previous tokens are given, as in training."""
        logits = self.base_logits(vocabulary, hidden)
        latents, confidence = self.head_inputs(hidden, previous)
        if self.markov_head is not None and latents is not None:
            logits = logits + self.markov_head.bias(latents)
        return logits, confidence

    def head_inputs(
        self, hidden: Float[Array, "*B K D"], previous: Int[Array, "*B K"]
    ) -> tuple[Float[Array, "*B K R"] | None, Float[Array, "*B K"]]:
        """(latents of the Markov head or None, confidence logits) of the same blocks: all but the vocabulary."""
        if self.markov_head is None:
            return None, self.confidence_logits(hidden, None)
        embedded = self.markov_head.embed(previous)
        return self.markov_head.latents(hidden, embedded), self.confidence_logits(hidden, embedded)

    def base_logits(self, vocabulary: Vocabulary, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Logits before the Markov bias; -inf for tokens that are never drafted."""
        logits = vocabulary.logits(hidden)
        return logits if self.draft_bias is None else logits + self.draft_bias[...].astype(jnp.float32)

    def confidence_logits(
        self, hidden: Float[Array, "*B D"], embedded: Float[Array, "*B R"] | None
    ) -> Float[Array, "*B"]:
        """Logits of c_k; CERTAIN where the drafter has no confidence head."""
        if self.confidence_head is None:
            return jnp.full(hidden.shape[:-1], CERTAIN, jnp.float32)
        if not self.config.confidence_with_markov:
            return self.confidence_head(hidden)
        assert embedded is not None
        inputs = jnp.concatenate([hidden, embedded], axis=-1)
        return self.confidence_head(inputs)

    def _block_inputs(self, vocabulary: Vocabulary, anchors_BA: Int[Array, "B A"]) -> Float[Array, "B A K D"]:
        """The committed token's embedding in slot 0, the mask token's in the others."""
        masks = jnp.full((*anchors_BA.shape, self.config.input_slots - 1), self.config.mask_token_id)
        tokens = jnp.concatenate([anchors_BA[..., None], masks], axis=-1)
        return vocabulary.embed(tokens).astype(self.fc.dtype)
