"""The target against the reference implementation, and its cached pass against its causal one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.nn.block import LayerSpec
from dspark_jax.nn.layers import VocabularySpec
from dspark_jax.ops.packing import packing
from dspark_jax.ops.rope import RopeSpec
from dspark_jax.targets.model import Target, TargetSpec

TAPS = (0, 1, 2, 3, 4)
encode = jax.jit(lambda target, tokens, taps: target.encode(tokens, taps), static_argnums=2)
extend = jax.jit(lambda target, cache, tokens, start: target.extend(cache, tokens, start, TAPS))


FAMILIES = ("llama", "qwen3", "gemma4")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def target(golden_target, family):
    return golden_target(family)


@pytest.fixture(scope="module")
def reference(golden_folder, family):
    return np.load(golden_folder(f"targets/{family}_tiny") / "reference.npz")


@pytest.fixture(scope="module")
def encoded(target, reference):
    return encode(target, reference["input_ids"], TAPS)


def test_parity_with_the_reference(target, reference, encoded):
    assert tuple(reference["layer_ids"]) == TAPS
    hidden = reference["hidden_states"]
    np.testing.assert_allclose(encoded.features_BTE, hidden.reshape(*hidden.shape[:2], -1), atol=2e-4)
    np.testing.assert_allclose(encoded.hidden_BTD, reference["last_hidden_state"], atol=2e-4)
    np.testing.assert_allclose(target.vocabulary.logits(encoded.hidden_BTD), reference["logits"], atol=2e-4)


def test_greedy_text_of_the_reference(target, reference):
    text = reference["greedy_output"]
    prompt = reference["greedy_prompt"].shape[1]
    hidden = encode(target, text, TAPS).hidden_BTD
    predicted = np.argmax(target.vocabulary.logits(hidden), axis=-1)
    np.testing.assert_array_equal(predicted[:, prompt - 1 : -1], text[:, prompt:])


def test_passes_over_pieces_equal_one_pass_with_rows_at_different_positions(target, reference, encoded):
    """Row 1 is one piece behind row 0; what it writes first sits where later tokens overwrite it."""
    tokens = jnp.asarray(reference["input_ids"])
    cache = target.init_cache(2, 40, jnp.float32)
    for start in (0, 8, 16, 24):
        starts = np.array([min(start, 16), max(start - 8, 0)], np.int32)
        piece = jnp.stack([tokens[row, at : at + 8] for row, at in enumerate(starts)])
        out = extend(target, cache, piece, starts)
        cache = out.cache
        for row, at in enumerate(starts):
            for found, expected in ((out.hidden_BTD, encoded.hidden_BTD), (out.features_BTE, encoded.features_BTE)):
                np.testing.assert_allclose(found[row], expected[row, at : at + 8], atol=1e-4)


@pytest.mark.parametrize(
    ("family", "counts", "size"),
    # Gemma's sliding and global layers hold every kind of mask.
    [
        *(("gemma4", counts, size) for counts, size in [((3, 5), 8), ((0, 8), 8), ((8, 8), 16), ((0, 0), 2)]),
        *((family, (3, 5), 13) for family in FAMILIES),
    ],
    indirect=["family"],
    scope="module",
)
def test_d_33_packed_rows_compute_what_whole_ones_do(target, reference, counts, size):
    """At, under and over the edge of a size; 8 tokens a row after 12 cached ones, some of which the window cuts."""
    tokens, starts = jnp.asarray(reference["input_ids"])[:, :20], np.array([12, 12], np.int32)
    cache = extend(target, target.init_cache(2, 24, jnp.float32), tokens[:, :12], np.zeros(2, np.int32)).cache
    whole = extend(target, cache, tokens[:, 12:], starts)
    packed, place = extend_packed(target, cache, tokens[:, 12:], starts, np.int32(counts), size)
    for row, count in enumerate(counts):
        entries = np.asarray(place.first_B)[row] + np.arange(count)
        np.testing.assert_allclose(packed.hidden_BTD[0, entries], whole.hidden_BTD[row, :count], atol=1e-5)
        np.testing.assert_allclose(packed.features_BTE[0, entries], whole.features_BTE[row, :count], atol=1e-5)
        for found, expected in zip(jax.tree.leaves(packed.cache), jax.tree.leaves(whole.cache), strict=True):
            np.testing.assert_allclose(found[row, :, : 12 + count], expected[row, :, : 12 + count], atol=1e-5)


@partial(jax.jit, static_argnums=5)
def extend_packed(target, cache, tokens, start, counts, size):
    place = packing(counts, tokens.shape[1], size)
    return target.extend(cache, tokens, start, TAPS, place), place


def test_a_wrapped_checkpoint_is_the_bare_one(golden_target, golden_folder):
    """gemma4_unified_tiny holds the weights of gemma4_tiny under a text_config and prefixed names."""
    from dspark_jax.interop.huggingface import load_target

    folder = golden_folder("targets/gemma4_unified_tiny")
    wrapped, bare = load_target(folder, "float32"), golden_target("gemma4")
    assert wrapped.spec == bare.spec
    for found, expected in zip(jax.tree.leaves(wrapped), jax.tree.leaves(bare), strict=True):
        np.testing.assert_array_equal(found, expected)
    reference = np.load(folder / "reference.npz")
    hidden = encode(wrapped, reference["input_ids"], ()).hidden_BTD
    np.testing.assert_allclose(wrapped.vocabulary.logits(hidden), reference["logits"], atol=2e-4)


class Writes(nnx.Module):
    """A layer whose output is a constant."""

    def __init__(self, value):
        self.value = value

    def __call__(self, x_BTD, positions_BT, attend):
        batch, length, _ = x_BTD.shape
        queries, keys = jnp.zeros((batch, length, 2, 4)), jnp.zeros((batch, 1, length, 4))
        _, carry = attend(queries, keys, keys)
        return jnp.full_like(x_BTD, self.value), carry


def test_d_04_taps_name_the_outputs_of_layers_in_the_order_asked_for(built):
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
