"""Block drafters: their two readings (training and decoding) against each other, and what a block may see."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters.base import CERTAIN
from dspark_jax.drafters.heads import GatedMarkov, RnnMarkov
from dspark_jax.nn.block import LayerSpec
from dspark_jax.ops.rope import RopeSpec
from dspark_jax.ops.sampling import SamplingLaw, law_probs, sample

LAYER = LayerSpec(d_model=16, ffw=24, heads=2, kv_heads=1, head_dim=8, rope=RopeSpec(), norm_eps=1e-5, qk_norm=True)
ROWS, LENGTH = 64, 8
RNG = np.random.default_rng(0)


def law_of(rows, temperature):
    return SamplingLaw(
        temperature_B=jnp.full(rows, temperature, jnp.float32),
        top_k_B=jnp.zeros(rows, jnp.int32),
        top_p_B=jnp.ones(rows, jnp.float32),
        keys_B=jax.random.split(jax.random.key(0), rows),
    )


@jax.jit
def draft(drafter, vocabulary, features_BTE, anchor_B, start_B, law):
    """(hidden states of the block, the proposal, the state) after taking in the features from position 0 on."""
    batch, length, _ = features_BTE.shape
    state = drafter.init_state(batch, length + drafter.config.input_slots, jnp.float32)
    zeros_B, nothing = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, length), jnp.int32)
    state = drafter.extend(state, vocabulary, features_BTE, nothing, zeros_B, zeros_B + length)
    hidden_BKD, _ = drafter.cached_block(vocabulary, state, anchor_B, start_B)
    proposal, after = drafter.propose(vocabulary, state, anchor_B, start_B, law)
    return hidden_BKD, proposal, state, after


train = jax.jit(lambda drafter, *arguments: drafter.training_blocks(*arguments))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_size": 2, "num_layers": 1, "confidence_with_markov": False},
        {"block_size": 1, "num_layers": 1, "confidence": False, "tapped_layers": (1,)},
        {"markov_head": GatedMarkov(rank=4), "layer": replace(LAYER, window=2), "num_layers": 1},
        {"markov_head": RnnMarkov(rank=4), "layer": replace(LAYER, v_norm=True, k_is_v=True), "num_layers": 1},
        {"markov_head": None, "confidence_with_markov": False, "num_layers": 1},
        {"markov_head": None, "confidence": False, "slot_predicts_itself": True},
    ],
    ids=["whole", "short", "single", "gated-window", "rnn-k-is-v", "rank-0-confidence", "dflash-itself"],
)
def test_d_13_a_decoded_block_is_the_trained_one_and_its_draws_follow_the_trained_heads(small, vocabulary, changes):
    drafter = small(**changes)
    features_BTE = jnp.asarray(RNG.normal(size=(ROWS, LENGTH, 16 * len(drafter.tapped_layers))), jnp.float32)
    tokens_BT = jnp.asarray(RNG.integers(0, 19, (ROWS, LENGTH)), jnp.int32)
    start_B = jnp.arange(ROWS) % LENGTH
    anchor_B = jnp.take_along_axis(tokens_BT, start_B[:, None], axis=1)[:, 0]
    law = law_of(ROWS, 0.8)
    hidden_BKD, proposal, before, after = draft(drafter, vocabulary, features_BTE, anchor_B, start_B, law)

    trained = train(drafter, vocabulary, tokens_BT, features_BTE, start_B[:, None])[:, 0]
    np.testing.assert_allclose(hidden_BKD, trained, atol=1e-5)

    previous = jnp.concatenate([anchor_B[:, None], proposal.tokens_BK[:, :-1]], axis=1)
    logits, confidence = drafter.head_logits(vocabulary, trained, previous)
    np.testing.assert_allclose(proposal.probs_BKV, law_probs(logits, law), atol=1e-5)
    np.testing.assert_allclose(jax.nn.sigmoid(proposal.logit_BK), jax.nn.sigmoid(confidence), atol=1e-5)
    assert (confidence == CERTAIN).all() == (drafter.confidence_head is None)
    # The block's own entries are scratch: what was committed before the anchor is untouched.
    for row, start in enumerate(start_B[:LENGTH]):
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(old[row, :, :start], new[row, :, :start])


def test_drafts_are_drawn_from_the_very_numbers_they_are_judged_by(small, vocabulary):
    """Drawn again from the reported float32 probabilities, every one of 11,520 tokens is the same."""
    drafter, redraw = small(), jax.jit(jax.vmap(sample, in_axes=(1, 1), out_axes=1))
    features_BTE = jnp.asarray(RNG.normal(size=(ROWS, LENGTH, 32)), jnp.float32)
    anchor_B, start_B = jnp.arange(ROWS, dtype=jnp.int32) % 19, jnp.arange(ROWS) % LENGTH
    law = law_of(ROWS, 0.8)
    for seed in range(60):
        law = law.replace(keys_B=jax.random.split(jax.random.key(seed), ROWS))
        _, proposal, _, _ = draft(drafter, vocabulary, features_BTE, anchor_B, start_B, law)
        keys_BK = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(law.keys_B, jnp.arange(3))
        np.testing.assert_array_equal(proposal.tokens_BK, redraw(proposal.probs_BKV, keys_BK))


def test_a_block_depends_on_its_own_context_and_anchor_only(small, vocabulary):
    """By gradient: exactly zero to features at and after its anchor and to other blocks' anchors."""
    drafter, anchors = small(), [2, 3, 6]
    features_BTE = jnp.asarray(RNG.normal(size=(1, LENGTH, 32)), jnp.float32)
    tokens_BT = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    mixer = jnp.asarray(RNG.normal(size=(3, 16)), jnp.float32)

    def of_block(features_BTE, embedding, chosen_A):
        lent = jax.tree.map(lambda leaf: leaf, vocabulary)
        lent.embedding[...] = embedding
        blocks = drafter.training_blocks(lent, tokens_BT, features_BTE, jnp.array([anchors]))
        return jnp.sum(jnp.sum(blocks[0] * mixer, axis=(1, 2)) * chosen_A)

    grads = jax.jit(jax.vmap(jax.grad(of_block, argnums=(0, 1)), in_axes=(None, None, 0)))
    to_features, to_embedding = grads(features_BTE, vocabulary.embedding[...], jnp.eye(3))
    for block, anchor in enumerate(anchors):
        touched = np.abs(np.asarray(to_features[block, 0])).max(axis=-1)
        assert (touched[:anchor] > 0).all()
        assert (touched[anchor:] == 0).all()
        rows = np.flatnonzero(np.abs(np.asarray(to_embedding[block])).max(axis=-1))
        assert rows.tolist() == [anchor, 19]


def test_d_10_slot_0_holds_the_committed_token_and_the_others_the_mask(small, vocabulary, monkeypatch):
    drafter, seen = small(num_layers=1), []
    block = type(drafter.layers[0])
    original = block.__call__

    def spy(self, x_BTD, positions_BT, attend):
        seen.append((x_BTD, positions_BT))
        return original(self, x_BTD, positions_BT, attend)

    @jax.jit
    def inputs_of_the_first_layer():
        state = drafter.init_state(2, LENGTH, jnp.float32)
        drafter.cached_block(vocabulary, state, jnp.array([5, 7]), jnp.array([4, 0]))
        drafter.training_blocks(vocabulary, jnp.arange(LENGTH)[None], jnp.zeros((1, LENGTH, 32)), jnp.array([[1, 6]]))
        return seen

    monkeypatch.setattr(block, "__call__", spy)
    (cached, cached_positions), (trained, trained_positions) = inputs_of_the_first_layer()
    embedding = np.asarray(vocabulary.embedding[...])
    np.testing.assert_array_equal(cached, embedding[[[5, 19, 19], [7, 19, 19]]])
    np.testing.assert_array_equal(cached_positions, [[4, 5, 6], [0, 1, 2]])
    np.testing.assert_array_equal(trained[0], embedding[[1, 19, 19, 6, 19, 19]])
    np.testing.assert_array_equal(trained_positions[0], [1, 2, 3, 6, 7, 8])


def test_confidence_k_is_known_before_token_k_is_drawn(small, vocabulary):
    """Rows differ only in their keys: c_0 is one number, c_k a function of token k-1."""
    features_BTE = jnp.broadcast_to(jnp.asarray(RNG.normal(size=(1, LENGTH, 32)), jnp.float32), (ROWS, LENGTH, 32))
    anchor_B, start_B = jnp.full(ROWS, 5, jnp.int32), jnp.full(ROWS, 4, jnp.int32)
    _, proposal, _, _ = draft(small(), vocabulary, features_BTE, anchor_B, start_B, law_of(ROWS, 1.5))
    tokens, confidence = np.asarray(proposal.tokens_BK), np.asarray(jax.nn.sigmoid(proposal.logit_BK))
    assert len(np.unique(confidence[:, 0])) == 1
    for slot in (1, 2):
        values = {}
        for previous, c in zip(tokens[:, slot - 1], confidence[:, slot], strict=True):
            values.setdefault(previous, set()).add(c)
        assert len(values) > 5
        assert all(len(found) == 1 for found in values.values())
        assert len(set().union(*values.values())) == len(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tapped_layers": (0, 2)}, r"tapped_layers \(0, 2\) must lie in -1\.\.1"),
        ({"tapped_layers": (-2,)}, r"tapped_layers \(-2,\) must lie in"),
        ({"mask_token_id": 20}, "mask_token_id 20 is outside the vocabulary of 20"),
    ],
)
def test_d_15_a_config_that_cannot_work_is_refused_before_training(small_config, change, message):
    with pytest.raises(ValueError, match=message):
        replace(small_config, **change)


def test_layers_computed_again_give_the_same_gradient_and_keep_less(small, vocabulary):
    drafter = small()
    features_BTE = jnp.asarray(RNG.normal(size=(1, LENGTH, 32)), jnp.float32)
    tokens_BT, anchors_BA = jnp.arange(LENGTH, dtype=jnp.int32)[None], jnp.array([[1, 2, 3, 5]])

    def loss(drafter, remat):
        blocks = drafter.training_blocks(vocabulary, tokens_BT, features_BTE, anchors_BA, None, remat)
        return jnp.sum(blocks**3)

    kept, again = (jax.jit(jax.grad(partial(loss, remat=remat))).lower(drafter).compile() for remat in (False, True))
    for ours, theirs in zip(jax.tree.leaves(again(drafter)), jax.tree.leaves(kept(drafter)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert again.memory_analysis().temp_size_in_bytes < kept.memory_analysis().temp_size_in_bytes
