"""Drafter and target compared over the vocabulary without the logits of all positions at once.

Both passes run over chunks of positions. The forward pass keeps a few numbers a position; the backward pass computes a
chunk's logits again and turns them into gradients at once, in the dtype of the weights. Embedding and LM head are the
target's and frozen: no gradient of their size exists.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from dspark_jax.core.arrays import Array, Float, Int, pytree
from dspark_jax.core.mesh import constrain, gathered, ways
from dspark_jax.nn.layers import Vocabulary
from dspark_jax.ops.losses import Compared, compare


@pytree
class Trained:
    """The drafter's own part in its logits: `w2 latent + draft_bias`, either of which may be absent."""

    w2_VR: Float[Array, "V R"] | None
    draft_bias_V: Float[Array, "V"] | None


@pytree
class Positions:
    """B rows of N positions: the drafter's normed hidden states and latents, and the target's hidden states."""

    hidden_BND: Float[Array, "B N D"]
    latent_BNR: Float[Array, "B N R"] | None
    aligned_BND: Float[Array, "B N D"]
    labels_BN: Int[Array, "B N"] | None
    """Tokens that the cross-entropy is taken to; None is the target's law."""


def compare_laws(vocabulary: Vocabulary, trained: Trained, positions: Positions, *, chunk: int = 64) -> Compared:
    """Cross-entropy, L1 distance and agreement at every position [B, N]; logits exist for `chunk` positions a row."""
    length = positions.hidden_BND.shape[1]
    chunk = min(chunk, length)
    padding = -length % chunk

    def chunked(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    compared = _over_chunks(gathered(vocabulary), trained, jax.tree.map(chunked, positions))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1)[:, :length], compared)


def plainly_compare_laws(vocabulary: Vocabulary, trained: Trained, positions: Positions) -> Compared:
    """The slow twin: all logits at once, and JAX's own gradient."""
    base, bias = _draft_logits(vocabulary, trained, positions)
    return compare(base + bias, vocabulary.logits(positions.aligned_BND), positions.labels_BN)


@jax.custom_vjp
def _over_chunks(vocabulary: Vocabulary, trained: Trained, chunks: Positions) -> Compared:
    return lax.map(partial(plainly_compare_laws, vocabulary, trained), chunks)


def _forward(vocabulary: Vocabulary, trained: Trained, chunks: Positions):
    return _over_chunks(vocabulary, trained, chunks), (vocabulary, trained, chunks)


def _backward(kept: tuple[Vocabulary, Trained, Positions], cotangents: Compared):
    vocabulary, trained, chunks = kept
    # Devices that share the rows add up what they have after the last chunk, not after each.
    shares = ways("batch")

    def by_share(x: Array) -> Array:
        return x.reshape(shares, -1, *x.shape[1:])

    def one(total: Trained, part: tuple[Positions, Compared]) -> tuple[Trained, Positions]:
        positions, given = part
        base, bias = _draft_logits(vocabulary, trained, positions)
        wide = _to_logits(base + bias, vocabulary.logits(positions.aligned_BND), positions.labels_BN, given)
        # As products of the forward pass are: in the dtype of the weights, summed in float32.
        dtype = positions.hidden_BND.dtype
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        narrow, to_latent, to_w2 = wide.astype(dtype), None, None
        if trained.w2_VR is not None and positions.latent_BNR is not None:
            to_latent = product("bnv,vr->bnr", narrow, trained.w2_VR).astype(dtype)
            to_w2 = product("sbnv,sbnr->svr", by_share(narrow), by_share(positions.latent_BNR))
        to_bias = None if trained.draft_bias_V is None else jnp.sum(by_share(wide), axis=(1, 2))
        if (cap := vocabulary.spec.soft_cap) is not None:
            narrow = (wide * (1 - (base / cap) ** 2)).astype(dtype)
        head, axes = (vocabulary.embedding, "vd") if vocabulary.head is None else (vocabulary.head, "dv")
        to_hidden = product(f"bnv,{axes}->bnd", narrow, head[...]).astype(dtype)
        total = jax.tree.map(jnp.add, total, Trained(w2_VR=to_w2, draft_bias_V=to_bias))
        total = constrain(total, "batch", "vocab")
        # None is the gradient of what has none.
        return total, Positions(
            hidden_BND=to_hidden,
            latent_BNR=to_latent,
            aligned_BND=None,  # pyrefly: ignore[bad-argument-type]
            labels_BN=None,
        )

    start = jax.tree.map(lambda leaf: jnp.zeros((shares, *leaf.shape), jnp.float32), trained)
    total, to_chunks = lax.scan(one, start, (chunks, cotangents))
    to_trained = jax.tree.map(lambda sums, leaf: jnp.sum(sums, axis=0).astype(leaf.dtype), total, trained)
    return None, to_trained, to_chunks


_over_chunks.defvjp(_forward, _backward)


def _draft_logits(vocabulary: Vocabulary, trained: Trained, positions: Positions) -> tuple[Array, Array | float]:
    """The vocabulary's logits, and what the drafter adds to them."""
    bias: Array | float = 0.0
    if trained.w2_VR is not None:
        bias = jnp.einsum("bnr,vr->bnv", positions.latent_BNR, trained.w2_VR, preferred_element_type=jnp.float32)
    if trained.draft_bias_V is not None:
        bias = bias + trained.draft_bias_V.astype(jnp.float32)
    return vocabulary.logits(positions.hidden_BND), bias


def _to_logits(draft_logits: Array, target_logits: Array, labels: Array | None, given: Compared) -> Array:
    """The gradient to the draft logits: of softmax(draft) p, cross-entropy gives p - label (or p - p_target), L1
    p (s - sum(p s)) with s the sign of p - p_target."""
    draft_probs, target_probs = jax.nn.softmax(draft_logits), jax.nn.softmax(target_logits)
    sign = jnp.sign(draft_probs - target_probs)
    spread = draft_probs * (sign - jnp.sum(draft_probs * sign, axis=-1, keepdims=True))
    aim = target_probs if labels is None else jnp.arange(draft_probs.shape[-1]) == labels[..., None]
    return given.ce[..., None] * (draft_probs - aim) + given.l1[..., None] * spread
