"""The training objective against the reference implementation and against itself in other chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.drafters.objective import LossWeights, block_labels, block_objective, total_loss

WEIGHTS = LossWeights()


def test_the_published_weights_are_the_defaults():
    assert LossWeights(ce=0.1, l1=0.9, confidence=1.0, decay=4.0) == WEIGHTS


@pytest.fixture(scope="module")
def reference(golden):
    return np.load(golden / "drafters" / "dspark_vanilla_llama" / "train_reference.npz")


@pytest.fixture(scope="module")
def inputs(reference):
    return {
        "tokens_BT": jnp.asarray(reference["input_ids"]),
        "loss_mask_BT": jnp.asarray(reference["loss_mask"], bool),
        "features_BTE": jnp.asarray(reference["target_hidden_states"]),
        "hidden_BTD": jnp.asarray(reference["target_last_hidden_states"]),
        "anchors_BA": jnp.asarray(reference["anchor_positions"]),
        "keep_BA": jnp.asarray(reference["block_keep_mask"]),
    }


@pytest.fixture(scope="module")
def outcome(tiny_target, tiny_drafter, inputs):
    """((loss, terms), gradients) of the reference's batch, its 6 anchors in chunks of 4."""

    @jax.jit
    def run(drafter, vocabulary, inputs):
        def loss(drafter):
            terms = block_objective(drafter, vocabulary, **inputs, weights=WEIGHTS, chunk=4)
            return total_loss(terms, WEIGHTS), terms

        return jax.value_and_grad(loss, has_aux=True)(drafter)

    return run(tiny_drafter, tiny_target.vocabulary, inputs)


def test_labels_logits_and_confidences_of_the_reference(tiny_target, tiny_drafter, reference, inputs):
    tokens_BAN, mask_BAK = block_labels(
        inputs["tokens_BT"], inputs["loss_mask_BT"], inputs["anchors_BA"], inputs["keep_BA"], 5
    )
    expected_mask = reference["eval_mask"]
    np.testing.assert_array_equal(mask_BAK, expected_mask)
    np.testing.assert_array_equal(tokens_BAN[..., 1:][mask_BAK], reference["target_ids"][expected_mask])

    @jax.jit
    def heads(drafter, vocabulary):
        hidden = drafter.training_blocks(vocabulary, inputs["tokens_BT"], inputs["features_BTE"], inputs["anchors_BA"])
        return drafter.head_logits(vocabulary, hidden, tokens_BAN[..., :-1])

    logits, confidence = heads(tiny_drafter, tiny_target.vocabulary)
    np.testing.assert_allclose(logits[mask_BAK], reference["draft_logits"][expected_mask], atol=2e-4)
    np.testing.assert_allclose(confidence[mask_BAK], reference["confidence_logits"][expected_mask], atol=2e-4)


def test_loss_and_terms_of_the_reference(outcome, reference):
    (loss, terms), _ = outcome
    assert loss == pytest.approx(float(reference["loss"]), rel=1e-5)
    for name in ("ce", "l1", "confidence"):
        term = getattr(terms, name)
        assert term.sum == pytest.approx(float(reference[f"term_{name}_loss_num"]), rel=1e-5)
        assert term.count == pytest.approx(float(reference[f"term_{name}_loss_den"]), rel=1e-5)


def test_gradients_of_the_reference(outcome, reference):
    _, grads = outcome
    keys = grads.layers[0].attention.kv[...][:, 0]
    ours = {
        "layers/0/self_attn/k_proj/weight": keys.reshape(64, -1).T,
        "layers/1/mlp/down_proj/weight": grads.layers[1].mlp.down[...].T,
        "fc/weight": grads.fc[...].T,
        "markov_head/markov_w1/weight": grads.markov_head.w1[...],
        "markov_head/markov_w2/weight": grads.markov_head.w2[...],
        "confidence_head/proj/weight": grads.confidence_head.w[...][None],
        "confidence_head/proj/bias": grads.confidence_head.b[...][None],
    }
    assert {f"grad:{name}" for name in ours} == {name for name in reference if name.startswith("grad:")}
    for name, found in ours.items():
        expected = reference[f"grad:{name}"]
        assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected), name


def test_metrics_of_the_reference(outcome, reference):
    (_, terms), _ = outcome
    mask = reference["eval_mask"]

    def softmax(logits):
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True)

    draft, target = reference["draft_logits"], reference["aligned_target_logits"]
    accept = np.minimum(softmax(draft), softmax(target)).sum(axis=-1)
    top1 = draft.argmax(axis=-1) == target.argmax(axis=-1)
    for mean, values in ((terms.accept_K, accept), (terms.top1_K, top1)):
        np.testing.assert_allclose(mean.sum, (values * mask).sum(axis=(0, 1)), rtol=1e-4)
        np.testing.assert_array_equal(mean.count, mask.sum(axis=(0, 1)))


def test_chunks_change_nothing(small, vocabulary):
    """7 anchors in chunks of 1, 3 (which does not divide them), 7 and more."""
    rng = np.random.default_rng(0)
    inputs = {
        "tokens_BT": jnp.asarray(rng.integers(0, 19, (2, 12)), jnp.int32),
        "loss_mask_BT": jnp.asarray(rng.random((2, 12)) < 0.8),
        "features_BTE": jnp.asarray(rng.normal(size=(2, 12, 32)), jnp.float32),
        "hidden_BTD": jnp.asarray(rng.normal(size=(2, 12, 16)), jnp.float32),
        "anchors_BA": jnp.asarray(np.sort(rng.integers(0, 12, (2, 7)), axis=1), jnp.int32),
        "keep_BA": jnp.asarray(rng.random((2, 7)) < 0.8),
    }

    @jax.jit
    def run(drafter):
        return [
            block_objective(drafter, vocabulary, **inputs, weights=WEIGHTS, chunk=chunk) for chunk in (7, 1, 3, 100)
        ]

    whole, *others = run(small(num_layers=1))
    assert whole.ce.sum > 0
    for terms in others:
        for expected, found in zip(jax.tree.leaves(whole), jax.tree.leaves(terms), strict=True):
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


LENGTH, BLOCK = 6, 3
jitted = jax.jit(block_labels, static_argnums=4)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH),
    st.lists(st.tuples(st.integers(0, LENGTH - 1), st.booleans()), min_size=2, max_size=2),
)
def test_labels_are_supervised_as_a_prefix_inside_the_sequence(mask, blocks):
    anchors, keep = ([block[part] for block in blocks] for part in range(2))
    tokens = np.arange(LENGTH, dtype=np.int32)[None] + 10
    tokens_BAN, mask_BAK = jitted(tokens, np.array([mask]), np.array([anchors]), np.array([keep]), BLOCK)
    for a, (anchor, kept) in enumerate(blocks):
        assert tokens_BAN[0, a, 0] == anchor + 10
        supervised = kept
        for slot in range(BLOCK):
            position = anchor + slot + 1
            supervised = supervised and position < LENGTH and mask[position]
            assert mask_BAK[0, a, slot] == supervised
            if position < LENGTH:
                assert tokens_BAN[0, a, slot + 1] == position + 10
