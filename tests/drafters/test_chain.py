"""Chain drafters: Eagle3 against the reference, and both kinds against a loop without a cache."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.drafters.base import Drafter
from dspark_jax.drafters.chain_objective import chain_loss, chain_objective
from dspark_jax.drafters.eagle3 import Eagle3, Eagle3Config
from dspark_jax.drafters.mtp import Mtp, MtpConfig
from dspark_jax.ops.masks import document_starts
from dspark_jax.ops.sampling import SamplingLaw

FOLDER = "drafters/eagle3_qwen3"
GREEDY = SamplingLaw(
    temperature_B=jnp.zeros(1),
    top_k_B=jnp.zeros(1, jnp.int32),
    top_p_B=jnp.ones(1),
    keys_B=jax.random.split(jax.random.key(0), 1),
)


@pytest.fixture(scope="module")
def eagle(golden_drafter):
    return golden_drafter("eagle3_qwen3")


@pytest.fixture(scope="module")
def lent(golden_target):
    return golden_target("qwen3").vocabulary


@pytest.fixture(scope="module")
def reference(golden_folder):
    return np.load(golden_folder(FOLDER) / "train_reference.npz")


@pytest.fixture(scope="module")
def outcome(eagle, lent, reference):
    """((loss, (terms, logits of every step)), gradients), positions in chunks that do not divide the sequence."""
    inputs = {
        "tokens_BT": jnp.asarray(reference["input_ids"]),
        "starts_BT": document_starts(jnp.asarray(reference["attention_mask"])),
        "features_BTE": jnp.asarray(reference["target_hidden_states"]),
    }
    others = {
        "loss_mask_BT": jnp.asarray(reference["loss_mask"], bool),
        "hidden_BTD": jnp.asarray(reference["target_last_hidden_states"]),
    }

    @jax.jit
    def run(drafter, vocabulary):
        def loss(drafter):
            terms = chain_objective(drafter, vocabulary, **inputs, **others, chunk=7)
            ordered = (inputs["tokens_BT"], inputs["features_BTE"], inputs["starts_BT"])
            logits = vocabulary.logits(drafter.unrolled(vocabulary, *ordered, 3))
            return chain_loss(terms, drafter.config.step_decay), (terms, logits)

        return jax.value_and_grad(loss, has_aux=True)(drafter)

    return run(eagle, lent)


def test_the_training_time_test_of_the_reference(outcome, reference):
    (loss, (terms, logits)), _ = outcome
    assert loss == pytest.approx(float(reference["loss"]), rel=1e-5)
    np.testing.assert_allclose(terms.ce_K.value, reference["step_losses"], rtol=1e-5)
    np.testing.assert_array_equal(terms.accept_K.count, reference["position_masks"].sum(axis=(1, 2)))
    # Elsewhere the shifted sequence has ended, and what stands there is each side's own.
    counted = reference["position_masks"] > 0
    np.testing.assert_allclose(logits[counted], reference["draft_logits"][counted], atol=2e-4)


def test_gradients_of_the_reference(outcome, reference):
    _, grads = outcome
    ours = {
        "fc/weight": grads.fc[...].T,
        "layers/0/self_attn/k_proj/weight": grads.layer.attention.kv[...][:, 0].reshape(128, -1).T,
        "layers/0/mlp/down_proj/weight": grads.layer.mlp.down[...].T,
    }
    assert {f"grad:{name}" for name in ours} == {name for name in reference if name.startswith("grad:")}
    for name, found in ours.items():
        expected = reference[f"grad:{name}"]
        assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected), name


@jax.jit
def drafted(drafter, vocabulary, features_BTE, tokens_BT, anchor_B):
    """(the proposal, the output of the last committed entry); the anchor follows the tokens."""
    length = tokens_BT.shape[1]
    start_B, end_B = jnp.zeros(1, jnp.int32), jnp.full(1, length, jnp.int32)
    next_BT = jnp.concatenate([tokens_BT[:, 1:], anchor_B[:, None]], axis=1)
    state = drafter.init_state(1, length + drafter.block_size, jnp.float32)
    state = drafter.extend(state, vocabulary, features_BTE, next_BT, start_B, end_B)
    return drafter.propose(vocabulary, state, anchor_B, end_B, GREEDY)[0], state.hidden_BD


def test_drafts_of_the_reference(eagle, lent, golden_folder):
    reference = np.load(golden_folder(FOLDER) / "draft_reference.npz")
    anchor_B = jnp.asarray(reference["anchor_id"])[None]
    context = jnp.asarray(reference["context_hidden_states"]), jnp.asarray(reference["context_ids"])
    proposal, hidden_BD = drafted(eagle, lent, *context, anchor_B)
    np.testing.assert_allclose(hidden_BD, reference["draft_hidden"][:, 0], atol=2e-4)
    np.testing.assert_array_equal(proposal.tokens_BK, reference["greedy_draft_tokens"])
    assert (np.asarray(proposal.probs_BKV).max(axis=-1) == 1).all()
    assert (jax.nn.sigmoid(proposal.logit_BK) == 1).all()


def mtp(built, layer, block):
    config = MtpConfig(vocab_size=20, layer=layer, num_target_layers=3, block_size=block)
    return built(lambda: Mtp(config, rngs=nnx.Rngs(0)), seed=4)


def small_eagle(built, layer, block):
    config = Eagle3Config(vocab_size=20, layer=layer, num_target_layers=3, tapped_layers=(0, -1), block_size=block)
    return built(lambda: Eagle3(config, rngs=nnx.Rngs(0)), seed=5)


LONGEST = 5


def plain_chain(drafter, vocabulary, features_TE, next_T, drafts):
    """Greedy drafts, everything computed anew for each: entry i is (hidden i, token i + 1) at position i, and the
    last entry's own output stands in for the features that do not exist. Arrays keep one length, so that little
    compiles: nobody sees the entries after the last."""
    hidden, tokens, found = np.asarray(drafter.fuse(features_TE[None])[0]), list(next_T), []
    length = LONGEST + drafts
    group = drafter.spec.heads // drafter.spec.kv_heads

    def attend(q_BTHC, k_BJTC, v_BJTC):
        q, k, v = (np.asarray(x[0], np.float64) for x in (q_BTHC, k_BJTC, v_BJTC))
        mixed = np.zeros(q.shape)
        for t, h in np.ndindex(*q.shape[:2]):
            scores = k[h // group, : t + 1] @ q[t, h] * drafter.spec.head_dim**-0.5
            weights = np.exp(scores - scores.max())
            mixed[t, h] = (weights / weights.sum()) @ v[h // group, : t + 1]
        return jnp.asarray(mixed[None], jnp.float32), None

    while True:
        last = len(tokens) - 1
        embedded = vocabulary.embed(jnp.asarray(np.pad(tokens, (0, length - len(tokens)))))[None]
        padded = jnp.asarray(np.pad(hidden, ((0, length - len(hidden)), (0, 0))))[None]
        residual, attention_input = drafter.inputs(embedded, padded)
        out, _ = drafter.layer(residual, jnp.arange(length)[None], attend, attention_input=attention_input)
        logits = vocabulary.logits(drafter.norm(out))[0, last]
        found.append(int(jnp.argmax(logits)))
        if len(found) == drafts:
            return found
        hidden = np.concatenate([hidden, out[0, last : last + 1]])
        tokens.append(found[-1])


@pytest.mark.parametrize(("make", "block"), [(small_eagle, 4), (mtp, 3)], ids=["eagle3", "mtp-3"])
def test_d_12_every_draft_of_a_chain_is_that_of_a_plain_loop(built, small_config, vocabulary, make, block):
    drafter, rng = make(built, small_config.layer, block), np.random.default_rng(1)
    assert isinstance(drafter, Drafter)
    seen = set()
    for length in (1, LONGEST):
        features_BTE = jnp.asarray(rng.normal(size=(1, length, 16 * len(drafter.tapped_layers))), jnp.float32)
        tokens = rng.integers(0, 19, length + 1)
        proposal, _ = drafted(
            drafter, vocabulary, features_BTE, jnp.asarray(tokens[None, :-1]), jnp.asarray(tokens[-1:])
        )
        expected = plain_chain(drafter, vocabulary, features_BTE[0], tokens[1:], block)
        assert proposal.tokens_BK[0].tolist() == expected
        seen |= set(expected)
    assert len(seen) > 1


def test_a_link_of_training_sees_what_the_drafted_one_sees(built, small_config, vocabulary):
    """Step z of the training-time test at entry i is the z-th link after i + 1 committed entries."""
    drafter, rng, length = small_eagle(built, small_config.layer, 3), np.random.default_rng(2), 6
    tokens_BT = jnp.asarray(rng.integers(0, 19, (1, length + 4)), jnp.int32)
    features_BTE = jnp.asarray(rng.normal(size=(1, length + 4, 32)), jnp.float32)
    starts_BT = jnp.zeros((1, length + 4), jnp.int32)

    @jax.jit
    def both():
        trained = drafter.unrolled(vocabulary, tokens_BT, features_BTE, starts_BT, 3)[:, 0, length - 1]
        state, links = drafter.init_state(1, 16, jnp.float32), []
        start_B, end_B = jnp.zeros(1, jnp.int32), jnp.full(1, length, jnp.int32)
        context = features_BTE[:, :length], tokens_BT[:, 1 : length + 1]
        state = drafter.extend(state, vocabulary, *context, start_B, end_B)
        cache, hidden_BTD = state.cache, state.hidden_BD[:, None]
        for step in range(3):
            links.append(drafter.norm(hidden_BTD)[0, 0])
            token = tokens_BT[:, length + step + 1 : length + step + 2]
            hidden_BTD, cache = drafter._cached(cache, vocabulary, hidden_BTD, token, end_B + step)
        return trained, jnp.stack(links)

    trained, links = both()
    np.testing.assert_allclose(trained, links, atol=1e-5)


@pytest.mark.parametrize("taps", [(0, 2), (3,), (-2,)])
def test_d_15_eagle3_refuses_the_last_layer(small_config, taps):
    config = Eagle3Config(vocab_size=20, layer=small_config.layer, num_target_layers=3, tapped_layers=(0, 1))
    with pytest.raises(ValueError, match="its last layer cannot be tapped"):
        replace(config, tapped_layers=taps)


def test_mtp_reads_the_last_layer_and_nothing_else(small_config):
    assert MtpConfig(vocab_size=20, layer=small_config.layer, num_target_layers=3).tapped_layers == (2,)
