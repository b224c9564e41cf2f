"""The target against the reference implementation, and its cached pass against its causal one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.nn.block import LayerSpec
from dspark_jax.nn.layers import VocabularySpec
from dspark_jax.ops.rope import RopeSpec
from dspark_jax.targets.model import Target, TargetSpec

TAPS = (0, 1, 2, 3, 4)
encode = jax.jit(lambda target, tokens, taps: target.encode(tokens, taps), static_argnums=2)
extend = jax.jit(lambda target, cache, tokens, start: target.extend(cache, tokens, start, TAPS))


@pytest.fixture(scope="module")
def reference(golden):
    return np.load(golden / "targets" / "llama_tiny" / "reference.npz")


@pytest.fixture(scope="module")
def encoded(tiny_target, reference):
    return encode(tiny_target, reference["input_ids"], TAPS)


def test_parity_with_the_reference(tiny_target, reference, encoded):
    assert tuple(reference["layer_ids"]) == TAPS
    hidden = reference["hidden_states"]
    np.testing.assert_allclose(encoded.features_BTE, hidden.reshape(*hidden.shape[:2], -1), atol=2e-4)
    np.testing.assert_allclose(encoded.hidden_BTD, reference["last_hidden_state"], atol=2e-4)
    np.testing.assert_allclose(tiny_target.vocabulary.logits(encoded.hidden_BTD), reference["logits"], atol=2e-4)


def test_greedy_text_of_the_reference(tiny_target, reference):
    text = reference["greedy_output"]
    prompt = reference["greedy_prompt"].shape[1]
    hidden = encode(tiny_target, text, TAPS).hidden_BTD
    predicted = np.argmax(tiny_target.vocabulary.logits(hidden), axis=-1)
    np.testing.assert_array_equal(predicted[:, prompt - 1 : -1], text[:, prompt:])


def test_passes_over_pieces_equal_one_pass_with_rows_at_different_positions(tiny_target, reference, encoded):
    """Row 1 is one piece behind row 0; what it writes first sits where later tokens overwrite it."""
    tokens = jnp.asarray(reference["input_ids"])
    cache = tiny_target.init_cache(2, 40, jnp.float32)
    for start in (0, 8, 16, 24):
        starts = np.array([min(start, 16), max(start - 8, 0)], np.int32)
        piece = jnp.stack([tokens[row, at : at + 8] for row, at in enumerate(starts)])
        out = extend(tiny_target, cache, piece, starts)
        cache = out.cache
        for row, at in enumerate(starts):
            for found, expected in ((out.hidden_BTD, encoded.hidden_BTD), (out.features_BTE, encoded.features_BTE)):
                np.testing.assert_allclose(found[row], expected[row, at : at + 8], atol=1e-4)


class Writes(nnx.Module):
    """A layer whose output is a constant."""

    def __init__(self, value):
        self.value = value

    def __call__(self, x_BTD, positions_BT, attend):
        batch, length, _ = x_BTD.shape
        queries, keys = jnp.zeros((batch, length, 2, 4)), jnp.zeros((batch, 1, length, 4))
        _, carry = attend(queries, keys, keys)
        return jnp.full_like(x_BTD, self.value), carry


def test_taps_name_the_outputs_of_layers_in_the_order_asked_for(built):
    layer = LayerSpec(d_model=8, ffw=8, heads=2, kv_heads=1, head_dim=4, rope=RopeSpec(), norm_eps=1e-5)
    spec = TargetSpec(
        family="llama",
        vocabulary=VocabularySpec(size=11, d_model=8, tied=True),
        layers=(layer,) * 4,
        norm_eps=1e-5,
        max_len=16,
    )
    target = built(lambda: Target(spec, rngs=nnx.Rngs(0)))
    target.layers = nnx.List([Writes(100.0 + index) for index in range(4)])
    tokens = jnp.array([[3, 5, 3]])

    @jax.jit
    def features():
        cached = target.extend(target.init_cache(1, 6, jnp.float32), tokens, jnp.array([2]), (2, 0, -1))
        outs = target.encode(tokens, (2, 0, -1)), cached, target.encode(tokens, ())
        return [out.features_BTE for out in outs]

    *tapped, untapped = features()
    for features_BTE in tapped:
        last, first, embedded = np.split(np.asarray(features_BTE), 3, axis=-1)
        assert (last == 102).all()
        assert (first == 100).all()
        np.testing.assert_array_equal(embedded, target.vocabulary.embed(tokens))
    assert untapped.shape == (1, 3, 0)
