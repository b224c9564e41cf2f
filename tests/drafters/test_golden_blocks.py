"""Every block drafter of the parity files: one training forward with its gradients, and one draft step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters.base import CERTAIN
from dspark_jax.drafters.objective import LossWeights, block_labels, block_objective, total_loss
from dspark_jax.ops.sampling import SamplingLaw

NAMES = (
    "dspark_vanilla_llama",
    "dspark_vanilla_qwen3",
    "dspark_vanilla_gemma4",
    "dspark_gated_qwen3",
    "dspark_rnn_qwen3",
    "dflash_qwen3",
    "dflash_gemma4",
)


# These differ from the others in nothing but their numbers.
_SLOW = ("dspark_vanilla_qwen3", "dflash_gemma4")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in NAMES],
)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def weights(name):
    """DFlash trains with the cross-entropy alone."""
    return LossWeights(ce=1.0, l1=0.0, confidence=0.0) if name.startswith("dflash") else LossWeights()


@pytest.fixture(scope="module")
def drafter(golden_drafter, name):
    return golden_drafter(name)


@pytest.fixture(scope="module")
def vocabulary(golden_target, name):
    return golden_target(name.split("_")[-1]).vocabulary


@pytest.fixture(scope="module")
def reference(golden_folder, name):
    return np.load(golden_folder(f"drafters/{name}") / "train_reference.npz")


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
def outcome(drafter, vocabulary, inputs, weights):
    """((loss, (terms, draft and confidence logits)), gradients) of the reference's batch, slots in chunks of 4."""

    @jax.jit
    def run(drafter, vocabulary, inputs):
        tokens_BAN, _ = block_labels(*(inputs[part] for part in PARTS), one_document(inputs), drafter.block_size)

        def loss(drafter):
            terms = block_objective(drafter, vocabulary, **inputs, weights=weights, chunk=4)
            blocks = (inputs["tokens_BT"], inputs["features_BTE"], inputs["anchors_BA"])
            hidden = drafter.training_blocks(vocabulary, *blocks)
            return total_loss(terms, weights), (terms, drafter.head_logits(vocabulary, hidden, tokens_BAN[..., :-1]))

        return jax.value_and_grad(loss, has_aux=True)(drafter)

    return run(drafter, vocabulary, inputs)


PARTS = ("tokens_BT", "loss_mask_BT", "anchors_BA", "keep_BA")


def one_document(inputs):
    return jnp.zeros_like(inputs["tokens_BT"])


def test_labels_of_the_reference(drafter, inputs, reference):
    tokens_BAN, mask_BAK = block_labels(*(inputs[part] for part in PARTS), one_document(inputs), drafter.block_size)
    expected_mask = reference["eval_mask"]
    np.testing.assert_array_equal(mask_BAK, expected_mask)
    np.testing.assert_array_equal(tokens_BAN[..., 1:][mask_BAK], reference["target_ids"][expected_mask])


def test_logits_of_every_slot_and_confidences(outcome, reference):
    (_, (_, (logits, confidence))), _ = outcome
    mask = reference["eval_mask"]
    np.testing.assert_allclose(logits[mask], reference["draft_logits"][mask], atol=2e-4)
    if "confidence_logits" in reference:
        np.testing.assert_allclose(confidence[mask], reference["confidence_logits"][mask], atol=2e-4)
    else:
        assert (confidence == CERTAIN).all()


def test_loss_and_terms_of_the_reference(outcome, reference, weights):
    (loss, (terms, _)), _ = outcome
    assert loss == pytest.approx(float(reference["loss"]), rel=1e-5)
    for name in ("ce", "l1", "confidence"):
        if getattr(weights, name):
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
    }
    if (head := grads.markov_head) is not None:
        ours |= {"markov_head/markov_w1/weight": head.w1[...], "markov_head/markov_w2/weight": head.w2[...]}
        if head.mix is not None:
            part = "markov_head/gate_proj/" if len(head.mix.b[...]) == 16 else "markov_head/joint_proj/"
            ours |= {part + "weight": head.mix.w[...].T, part + "bias": head.mix.b[...]}
    if (head := grads.confidence_head) is not None:
        ours |= {"confidence_head/proj/weight": head.w[...][None], "confidence_head/proj/bias": head.b[...][None]}
    assert {f"grad:{name}" for name in ours} == {name for name in reference if name.startswith("grad:")}
    for name, found in ours.items():
        expected = reference[f"grad:{name}"]
        assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected), name


def test_metrics_of_the_reference(outcome, reference):
    (_, (terms, _)), _ = outcome
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


def test_d_01_every_slot_of_a_drafted_block_has_the_references_logits(drafter, vocabulary, golden_folder, name):
    """Acceptance that collapses after slot 0 shows here, slot by slot, under the reference's own context."""
    reference = np.load(golden_folder(f"drafters/{name}") / "draft_reference.npz")
    tokens, context = reference["greedy_draft_tokens"], jnp.asarray(reference["context_hidden_states"])
    length = context.shape[1]
    anchor_B = jnp.asarray(reference["anchor_id"])[None]
    greedy = SamplingLaw(
        temperature_B=jnp.zeros(1),
        top_k_B=jnp.zeros(1, jnp.int32),
        top_p_B=jnp.ones(1),
        keys_B=jax.random.split(jax.random.key(0), 1),
    )

    @jax.jit
    def draft(drafter, vocabulary):
        start_B, end_B = jnp.zeros(1, jnp.int32), jnp.full(1, length, jnp.int32)
        state = drafter.init_state(1, length + drafter.block_size, jnp.float32)
        state = drafter.extend(state, vocabulary, context, jnp.zeros((1, length), jnp.int32), start_B, end_B)
        hidden_BKD, _ = drafter.cached_block(vocabulary, state, anchor_B, end_B)
        proposal, _ = drafter.propose(vocabulary, state, anchor_B, end_B, greedy)
        previous = jnp.concatenate([anchor_B[:, None], proposal.tokens_BK[:, :-1]], axis=1)
        heads = drafter.head_logits(vocabulary, hidden_BKD, previous)
        return hidden_BKD, vocabulary.logits(hidden_BKD), proposal, heads

    hidden_BKD, base_BKV, proposal, (logits, confidence) = draft(drafter, vocabulary)
    np.testing.assert_array_equal(proposal.tokens_BK, tokens)
    np.testing.assert_allclose(hidden_BKD, reference["block_hidden"], atol=2e-4)
    np.testing.assert_allclose(base_BKV, reference["base_logits"], atol=2e-4)
    np.testing.assert_allclose(logits, reference["corrected_logits"], atol=2e-4)
    expected = np.ones(tokens.shape)
    if drafter.confidence_head is not None:
        np.testing.assert_allclose(confidence, reference["confidence_logits"], atol=2e-4)
        expected = 1 / (1 + np.exp(-reference["confidence_logits"]))
    np.testing.assert_allclose(jax.nn.sigmoid(proposal.logit_BK), expected, atol=2e-4)
