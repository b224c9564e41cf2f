"""Parts of attention, merged, against attention over all keys at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.ops.attention import attention
from dspark_jax.ops.attention_parts import attention_part, merged, own_part
from dspark_jax.ops.masks import causal_mask

BATCH, HEADS, KV_HEADS, TOKENS, KEYS, CHANNELS = 3, 4, 2, 3, 12, 8
START = jnp.array([0, 4, 9])


def arrays():
    # Scores up to some tens, so that parts differ in mass by many orders.
    keys = jax.random.split(jax.random.key(0), 3)
    q = 6 * jax.random.normal(keys[0], (BATCH, HEADS, TOKENS, CHANNELS))
    return q, *(jax.random.normal(key, (BATCH, KV_HEADS, KEYS, CHANNELS)) for key in keys[1:])


def own(x):
    return jnp.stack([x[row, :, start : start + TOKENS] for row, start in enumerate(np.asarray(START))])


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("of_own", [own_part, lambda *x, scale: attention_part(*x, scale=scale, causal=True)])
def test_pieces_of_a_context_and_new_tokens_make_one_softmax(pieces, of_own):
    q, k, v = arrays()
    length = KEYS // pieces
    parts = [of_own(q, own(k), own(v), scale=0.5)]
    for piece in range(pieces):
        here = slice(piece * length, (piece + 1) * length)
        count = jnp.clip(START - here.start, 0, length)
        parts.append(attention_part(q, k[:, :, here], v[:, :, here], count, scale=0.5))
    whole = attention(q.swapaxes(1, 2), k, v, causal_mask(START, TOKENS, KEYS), scale=0.5)
    np.testing.assert_allclose(merged(parts), whole.swapaxes(1, 2), atol=2e-6)


def test_a_part_says_how_much_mass_its_keys_have():
    q, k, v = arrays()
    grouped = np.repeat(np.asarray(k, np.float64), HEADS // KV_HEADS, axis=1)
    mass = np.log(np.exp(np.einsum("bhtc,bhsc->bhts", q, grouped)[..., :4] * 0.5).sum(-1))
    mixed, found = attention_part(q, k, v, jnp.array([4, 4, 0]), scale=0.5)
    np.testing.assert_allclose(found[:2], mass[:2], rtol=1e-5)
    assert np.isneginf(found[2]).all()
    assert np.isfinite(mixed).all()
