"""A frozen decoder-only target: embedding, blocks, norm, LM head, with tapped hidden states."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.arrays import Array, DType, Float, Int, pytree
from dspark_jax.nn.block import Block, LayerSpec
from dspark_jax.nn.cache import Cache, Caching, KVCache
from dspark_jax.nn.layers import RMSNorm, Vocabulary, VocabularySpec
from dspark_jax.nn.paged_cache import CacheForm, InRows, PagedCache
from dspark_jax.nn.row_attention import PlainRows
from dspark_jax.ops.long_attention import span_attention
from dspark_jax.ops.masks import first_seen
from dspark_jax.ops.packing import Packing, whole

Attend = Callable[[int, Array, Array, Array], tuple[Array, Any]]
"""attend(layer, q, k, v) -> (mixed, what the layer's cache then is)."""


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """What a family's config file says, in our words."""

    family: str
    vocabulary: VocabularySpec
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_len: int

    @property
    def d_model(self) -> int:
        return self.vocabulary.d_model

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size


@pytree
class TargetOutput:
    """One pass over T tokens."""

    hidden_BTD: Float[Array, "B T D"]
    """After the final norm: what the LM head reads."""
    features_BTE: Float[Array, "B T E"]
    """Outputs of the tapped layers, concatenated in the order of the taps."""
    cache: Cache | None


class Target(Caching):
    """Layers are unrolled, each with its own arrays: measured faster than a scan over stacked ones where decoding
    is bound by launches or memory (CPU 42 against 65 ms a step of SmolLM2-135M; GPU 3 against 7 ms at 4B).

    `cache_form`: what its cache is; None is rows.
    """

    cache_form: CacheForm | None = None

    def __init__(self, spec: TargetSpec, *, rngs: nnx.Rngs, dtype: DType = jnp.float32):
        self.spec = spec
        self.vocabulary = Vocabulary(spec.vocabulary, rngs=rngs, dtype=dtype)
        self.layers = nnx.List([Block(layer, rngs=rngs, dtype=dtype) for layer in spec.layers])
        self.norm = RMSNorm(spec.d_model, "model", eps=spec.norm_eps, dtype=dtype)

    def with_cache_form(self, cache_form: CacheForm) -> "Target":
        """This target, the same parameters, its caches of that form."""
        other = copy(self)
        other.cache_form = cache_form
        return other

    def init_cache(self, batch: int, span: int, dtype: DType) -> Cache:
        return (self.cache_form or InRows())(self.spec.layers, batch, span, dtype)

    def encode(
        self, tokens_BT: Int[Array, "B T"], taps: tuple[int, ...], starts_BT: Int[Array, "B T"] | None = None
    ) -> TargetOutput:
        """A causal pass without a cache, as training needs it. Taps are 0-based layers; -1 is the embedding.

        Where a row holds several documents, `starts_BT` says where each token's begins: it sees no other one.
        """
        length = tokens_BT.shape[1]
        starts_BT = jnp.zeros_like(tokens_BT) if starts_BT is None else starts_BT
        index_BT = jnp.broadcast_to(jnp.arange(length), tokens_BT.shape)
        first_BT = {window: first_seen(starts_BT, index_BT, window) for window in self._windows()}

        def attend(index: int, q: Array, k: Array, v: Array) -> tuple[Array, None]:
            spec = self.spec.layers[index]
            return span_attention(q, k, v, first_BT[spec.window], index_BT, scale=spec.attention_scale), None

        hidden, features, _ = self._run(tokens_BT, index_BT - starts_BT, taps, attend)
        return TargetOutput(hidden_BTD=hidden, features_BTE=features, cache=None)

    def extend(
        self,
        cache: Cache,
        tokens_BT: Int[Array, "B T"],
        start_B: Int[Array, "B"],
        taps: tuple[int, ...],
        packing: Packing | None = None,
    ) -> TargetOutput:
        """Tokens at positions start_B..start_B+T-1 of each row, after what the cache holds before start_B.

        With a packing only the tokens on its axis are computed, and outputs are [1, N, ...]. What the cache then holds
        of the other tokens is scratch.
        """
        batch, width = tokens_BT.shape
        if isinstance(cache, PagedCache):
            # Without a packing rows are full and lie side by side.
            attend = self._over_pages(cache, start_B, whole(batch, width) if packing is None else packing)
        else:
            assert isinstance(cache, KVCache)
            attend = self._over_rows(cache, start_B, packing)
        positions_BT = start_B[:, None] + jnp.arange(width)
        if packing is not None:
            tokens_BT, positions_BT = packing.pack(tokens_BT)[None], packing.pack(positions_BT)[None]
        hidden, features, layers = self._run(tokens_BT, positions_BT, taps, attend)
        return TargetOutput(hidden_BTD=hidden, features_BTE=features, cache=cache.with_layers(layers))

    def _over_rows(self, cache: KVCache, start_B: Int[Array, "B"], packing: Packing | None) -> Attend:
        """With a packing, rows are whole again inside attention."""
        attention = self.cache_form.attention if isinstance(self.cache_form, InRows) else PlainRows()

        def attend(index: int, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
            if packing is not None:
                q = packing.unpack(q[0])
                k, v = (packing.unpack(x[0].swapaxes(0, 1)).swapaxes(1, 2) for x in (k, v))
            pair = self.write((cache.keys[index], cache.values[index]), (k, v), start_B)
            mixed = attention(self.spec.layers[index], q, (k, v), pair, start_B, causal=True)
            return mixed if packing is None else packing.pack(mixed)[None], pair

        return attend

    def _over_pages(self, cache: PagedCache, start_B: Int[Array, "B"], packing: Packing) -> Attend:
        """Rows are never whole."""

        def attend(index: int, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            return cache.extended(index, self.spec.layers[index], q, (k, v), start_B, packing)

        return attend

    def _windows(self) -> set[int | None]:
        return {spec.window for spec in self.spec.layers}

    def _run(self, tokens_BT, positions_BT, taps, attend):
        x_BTD = self.vocabulary.embed(tokens_BT)
        tapped, carries = {-1: x_BTD}, []
        for index, block in enumerate(self.layers):
            x_BTD, carry = block(x_BTD, positions_BT, lambda q, k, v, i=index: attend(i, q, k, v))
            carries.append(carry)
            if index in taps:
                tapped[index] = x_BTD
        empty = x_BTD[..., :0]
        features_BTE = jnp.concatenate([tapped[tap] for tap in taps], axis=-1) if taps else empty
        return self.norm(x_BTD), features_BTE, carries
