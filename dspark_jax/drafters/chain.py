"""Drafters that draft one token after another through one transformer layer (Eagle3, MTP).

Entry i of the chain pairs the target's features of position i with the embedding of token i + 1, at rotary position i,
and predicts token i + 2. Entries of committed positions stay in a cache; drafting goes on from the last of them with
the layer's own output in place of features nobody has yet.
"""

from abc import abstractmethod

import jax
import jax.numpy as jnp
from jax import lax

from dspark_jax.core.arrays import Array, DType, Float, Int, Shaped, pytree
from dspark_jax.drafters.base import CERTAIN, Proposal, top_two
from dspark_jax.nn.block import Block, LayerSpec
from dspark_jax.nn.cache import Caching, KVCache, init_cache
from dspark_jax.nn.layers import RMSNorm, Vocabulary
from dspark_jax.ops.attention import attention
from dspark_jax.ops.long_attention import block_attention, span_attention
from dspark_jax.ops.masks import causal_mask, first_seen
from dspark_jax.ops.sampling import Draws, SamplingLaw, law_probs, sample, two_largest


@pytree
class ChainState:
    """The cache of entries before the anchor, and the last one's output."""

    cache: KVCache
    hidden_BD: Float[Array, "B D"]


class ChainDrafter(Caching):
    """What Eagle3 and MTP share: a subclass says how features and embeddings become the layer's input."""

    layer: Block
    norm: RMSNorm

    @property
    @abstractmethod
    def spec(self) -> LayerSpec: ...

    @property
    @abstractmethod
    def block_size(self) -> int: ...

    @property
    @abstractmethod
    def tapped_layers(self) -> tuple[int, ...]: ...

    @abstractmethod
    def fuse(self, features_BTE: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        """Target features in the width and place of the layer's own output."""

    @abstractmethod
    def inputs(
        self, embedded_BTD: Float[Array, "B T D"], hidden_BTD: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T W"] | None]:
        """(residual, attention input or None) of the layer, as `Block` takes them."""

    # Decoding.

    def init_state(self, batch: int, span: int, dtype: DType) -> ChainState:
        return ChainState(
            cache=init_cache((self.spec,), batch, span, dtype), hidden_BD=jnp.zeros((batch, self.spec.d_model), dtype)
        )

    def extend(
        self,
        state: ChainState,
        vocabulary: Vocabulary,
        features_BTE: Float[Array, "B T E"],
        next_tokens_BT: Int[Array, "B T"],
        start_B: Int[Array, "B"],
        count_B: Int[Array, "B"],
    ) -> ChainState:
        """Add the entries of positions start_B.., of which the first count_B are committed."""
        out_BTD, cache = self._cached(state.cache, vocabulary, self.fuse(features_BTE), next_tokens_BT, start_B)
        last = jnp.maximum(count_B - 1, 0)[:, None, None]
        last_BD = jnp.take_along_axis(out_BTD, last, axis=1)[:, 0].astype(state.hidden_BD.dtype)
        return ChainState(cache=cache, hidden_BD=jnp.where((count_B > 0)[:, None], last_BD, state.hidden_BD))

    def propose(
        self,
        vocabulary: Vocabulary,
        state: ChainState,
        anchor_B: Int[Array, "B"],
        start_B: Int[Array, "B"],
        law: SamplingLaw,
        drafts: int | None = None,
    ) -> tuple[Proposal, ChainState]:
        """Draft K tokens; entries made of drafts pass through the cache as scratch from start_B on."""
        links = self.block_size if drafts is None else drafts

        def draw(hidden_BD: Array, offset: Array) -> tuple[Array, Array, Array]:
            logits_B1V = vocabulary.logits(self.norm(hidden_BD[:, None]))
            peaks = two_largest(logits_B1V)
            probs_BV = law_probs(logits_B1V, law, peaks)[:, 0]
            keys_B = jax.vmap(lambda key: jax.random.fold_in(key, offset))(law.keys_B)
            return sample(probs_BV, keys_B, law.draws), probs_BV, top_two(logits_B1V, peaks)[:, 0]

        def link(carry: tuple[KVCache, Array, Array], offset: Array):
            cache, hidden_BD, token_B = carry
            # The entry before the first draft is the last committed one, so this one sits at start + offset - 1.
            out_BTD, cache = self._cached(cache, vocabulary, hidden_BD[:, None], token_B[:, None], start_B + offset - 1)
            hidden_BD = out_BTD[:, 0].astype(hidden_BD.dtype)
            drawn = draw(hidden_BD, offset)
            return (cache, hidden_BD, drawn[0]), drawn

        first = draw(state.hidden_BD, jnp.zeros((), jnp.int32))
        carry = (state.cache, state.hidden_BD, first[0])
        unroll = max(1, links - 1) if law.draws is not Draws.ANY else 1
        (cache, _, _), others = lax.scan(link, carry, jnp.arange(1, links), unroll=unroll)
        tokens_BK, probs_BKV, top_BK2 = (
            jnp.concatenate([one[:, None], more.swapaxes(0, 1)], axis=1)
            for one, more in zip(first, others, strict=True)
        )
        return Proposal(
            tokens_BK=tokens_BK,
            probs_BKV=probs_BKV,
            logit_BK=jnp.full(tokens_BK.shape, CERTAIN, jnp.float32),
            top_BK2=top_BK2,
        ), ChainState(cache=cache, hidden_BD=state.hidden_BD)

    def _cached(
        self,
        cache: KVCache,
        vocabulary: Vocabulary,
        hidden_BTD: Float[Array, "B T D"],
        tokens_BT: Int[Array, "B T"],
        start_B: Int[Array, "B"],
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        length, span = tokens_BT.shape[1], cache.keys[0].shape[2]
        mask = causal_mask(start_B, length, span, self.spec.window)

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, KVCache]:
            keys, values = self.write((cache.keys[0], cache.values[0]), (k, v), start_B)
            mixed = attention(q, keys, values, mask, scale=self.spec.attention_scale)
            return mixed, KVCache(keys=(keys,), values=(values,))

        positions_BT = start_B[:, None] + jnp.arange(length)
        embedded_BTD = vocabulary.embed(tokens_BT).astype(hidden_BTD.dtype)
        residual, attention_input = self.inputs(embedded_BTD, hidden_BTD)
        return self.layer(residual, positions_BT, attend, attention_input=attention_input)

    # Training.

    def unrolled(
        self,
        vocabulary: Vocabulary,
        tokens_BT: Int[Array, "B T"],
        features_BTE: Float[Array, "B T E"],
        starts_BT: Int[Array, "B T"],
        steps: int,
    ) -> Float[Array, "Z B T D"]:
        """Normed outputs of `steps` training-time steps (Eagle3's test, arXiv 2503.01840).

        Step z stands for the z-th link of every chain: its token ids are shifted z further left, its hidden states are
        the step before's outputs, its rotary positions i + z. Entry i sees the entries of step 0 up to itself and its
        own of every step since, as it would while drafting. `starts_BT`: where each token's document begins; nothing
        of another is seen, and positions count from there.
        """
        batch, length = tokens_BT.shape
        index_BT = jnp.broadcast_to(jnp.arange(length), (batch, length))
        first_BT, scale = first_seen(starts_BT, index_BT, self.spec.window), self.spec.attention_scale

        # The attention scores of all steps together are the bulk of the memory, so the backward pass makes them anew.
        @jax.checkpoint
        def link(embedded_BTD: Array, hidden_BTD: Array, positions_BT: Array, past: list[tuple[Array, Array]]):
            def attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
                if not past:
                    return span_attention(q, k, v, first_BT, index_BT, scale=scale), (k, v)
                (context_k, context_v), *own = *past, (k, v)
                own_k, own_v = (jnp.stack(parts, axis=3) for parts in zip(*own, strict=True))
                first_BT1, last_BT1 = first_BT[..., None], index_BT[..., None]
                mixed = block_attention(
                    q[:, :, None], context_k, context_v, own_k, own_v, first_BT1, last_BT1, scale=scale
                )
                return mixed[:, :, 0], (k, v)

            residual, attention_input = self.inputs(embedded_BTD, hidden_BTD)
            return self.layer(residual, positions_BT, attend, attention_input=attention_input)

        hidden_BTD, outputs, past = self.fuse(features_BTE), [], []
        for step in range(steps):
            # A chain that has left its document sees only itself, and nobody sees or counts it.
            embedded_BTD = vocabulary.embed(ahead(tokens_BT, step + 1)).astype(hidden_BTD.dtype)
            hidden_BTD, pair = link(embedded_BTD, hidden_BTD, index_BT - starts_BT + step, past)
            past = [*past, pair]
            outputs.append(self.norm(hidden_BTD))
        return jnp.stack(outputs)


def ahead(x: Shaped[Array, "B T *X"], by: int) -> Shaped[Array, "B T *X"]:
    """What lies `by` positions further on in each row; zeros past its end."""
    return jnp.pad(x[:, by:], ((0, 0), (0, min(by, x.shape[1])), *[(0, 0)] * (x.ndim - 2)))
