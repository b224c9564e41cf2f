"""Rounds of real models on thousands of rows: whatever drafts, the text follows the target's law."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from scipy.stats import chisquare

from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.round import RoundPlan, decode_round, init_state, prefill
from dspark_jax.decoding.scheduler import EarlyStop, FixedLength, Guide, Threshold, TwoStep
from dspark_jax.drafters.mtp import Mtp, MtpConfig
from dspark_jax.ops.sampling import SamplingLaw

WHOLE = RoundPlan()
PROMPT = (3, 1, 2)
ROUNDS = 3
ROWS_OF_A_LAW = 2560
# (temperature, top_k, top_p)
LAWS = [
    (0.0, 0, 1.0),
    *((temperature, 0, 1.0) for temperature in (0.3, 0.7, 1.0, 1.5)),
    (0.3, 0, 0.9),
    (0.7, 3, 1.0),
    (1.0, 0, 0.8),
    (1.5, 4, 0.8),
]
ALL_ROWS = len(LAWS) * ROWS_OF_A_LAW


# Unlike elsewhere most of the time here is running, so these programs are compiled with optimisations.
OPTIMISED = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": False}


@partial(jax.jit, static_argnums=(2, 5), compiler_options=OPTIMISED)
def rounds(target, drafter, plan, law, prompt_T, number):
    """The outputs of so many rounds after the prompt in every row of `law`."""
    batch, length = law.temperature_B.shape[0], len(prompt_T)
    tokens_BT = jnp.broadcast_to(prompt_T, (batch, length))
    zeros_B = jnp.zeros(batch, jnp.int32)
    state = init_state(target, drafter, batch, length + number * (drafter.block_size + 1), jnp.float32)
    state = prefill(target, drafter, state, tokens_BT[:, :-1], tokens_BT[:, 1:], zeros_B, zeros_B + length - 1)
    state = state.replace(anchor_B=tokens_BT[:, -1], position_B=jnp.full(batch, length - 1, jnp.int32), law=law)
    # For Algorithm 1: a curve that falls fast enough for lengths to differ.
    rates = 1 / (batch + jnp.arange(batch * (drafter.block_size + 1) + 1.0))
    guide = Guide.unguided(batch, drafter.block_size).replace(rates_N=rates)
    return lax.scan(lambda state, _: decode_round(target, drafter, plan, state, guide), state, length=number)[1]


def mixed_law(laws, seed):
    """Every law in as many rows, all rows with keys of their own."""
    temperature, top_k, top_p = (np.repeat(values, ROWS_OF_A_LAW) for values in zip(*laws, strict=True))
    return SamplingLaw(
        temperature_B=jnp.asarray(temperature, jnp.float32),
        top_k_B=jnp.asarray(top_k, jnp.int32),
        top_p_B=jnp.asarray(top_p, jnp.float32),
        keys_B=jax.random.split(jax.random.key(seed), len(temperature)),
    )


def texts(out):
    """The first three tokens of every row: every round commits at least one."""
    tokens, counts = np.asarray(out.tokens_BN), np.asarray(out.count_B)
    committed = np.arange(tokens.shape[2]) < counts[..., None]
    order = np.argsort(~committed.swapaxes(0, 1).reshape(tokens.shape[1], -1), axis=1, kind="stable")
    return np.take_along_axis(tokens.swapaxes(0, 1).reshape(tokens.shape[1], -1), order, axis=1)[:, :3]


def expected_law(target, law, sorted_law):
    """The target's joint law of three tokens after PROMPT, [V, V, V], V small."""
    vocab = target.spec.vocab_size
    pairs = np.array(list(np.ndindex(vocab, vocab)))
    contexts = jnp.asarray([[*PROMPT, *pair] for pair in pairs], jnp.int32)
    logits = np.asarray(logits_of(target, contexts))[:, len(PROMPT) - 1 :]
    joint = np.zeros((vocab,) * 3)
    for (first, second), (one, two, three) in zip(pairs, logits, strict=True):
        laws = [sorted_law(row, *law)[0] for row in (one, two, three)]
        joint[first, second] = laws[0][first] * laws[1][second] * laws[2]
    return joint


logits_of = jax.jit(lambda target, tokens: target.vocabulary.logits(target.encode(tokens, ()).hidden_BTD))


def assert_follows(counts, probs, name):
    """Chi-square over the cells, those that expect fewer than 5 taken together; nothing in impossible cells."""
    counts, probs = counts.ravel(), probs.ravel()
    assert counts[probs == 0].sum() == 0, name
    expected = probs * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1] * observed[:-1].sum() / expected[:-1].sum()
    if len(observed) > 1:
        assert chisquare(observed, expected).pvalue > 1e-5, name


def check(target, drafter, plan, sorted_law, laws=LAWS):
    """The law of every request of a mixed batch; returns the outputs."""
    out = jax.device_get(rounds(target, drafter, plan, mixed_law(laws, seed=1), jnp.array(PROMPT), ROUNDS))
    drawn = texts(out)
    for law in set(laws):
        rows = np.repeat([other == law for other in laws], ROWS_OF_A_LAW)
        counts, probs = np.zeros((5, 5, 5)), expected_law(target, law, sorted_law)
        np.add.at(counts, tuple(drawn[rows].T), 1)
        for rest in ((1, 2), (2,), ()):
            assert_follows(counts.sum(axis=rest), probs.sum(axis=rest), law)
    return out


@pytest.mark.parametrize(
    ("shift", "plan"),
    [
        (0, WHOLE),
        (1, WHOLE),
        (1, RoundPlan(policy=Threshold(confidence=0.5))),
        (None, RoundPlan(policy=EarlyStop(fill=False), rule=Rule.BLOCK)),
        (None, RoundPlan(policy=TwoStep(), sizes=(2 * ALL_ROWS,))),
    ],
    ids=["perfect", "adversarial", "adversarial-threshold", "mixed-early-stop-block", "mixed-two-step"],
)
def test_d_17_text_follows_the_target_whatever_an_oracle_drafts(five, oracle_of, sorted_law, shift, plan):
    """TwoStep's and Algorithm 1's rows share a budget; the packed axis holds two tokens a row."""
    target, _ = five
    out = check(target, oracle_of(target, block=2, shift=shift), plan, sorted_law)
    accepted, verified = out.count_B - 1, out.verified_B
    assert verified.sum() > 0
    if shift == 0:
        assert (accepted == verified).mean() > 0.9999
    else:
        assert 0 < accepted.sum() < verified.sum()
    if shift == 1:
        assert accepted[:, :ROWS_OF_A_LAW].sum() == 0
    if not isinstance(plan.policy, FixedLength):
        assert set(np.unique(verified)) == {0, 1, 2}


def test_text_follows_the_target_with_a_drafter_that_knows_nothing(five, sorted_law):
    laws = [(1.0, 0, 1.0)] * 4 + [(0.7, 0, 0.8)] * 2 + [(1.5, 4, 1.0)] * 3
    out = check(*five, WHOLE, sorted_law, laws=laws)
    assert 0 < (out.count_B - 1).sum() < out.verified_B.sum()


def test_d_16_near_ties_are_told_apart(five, sorted_law):
    """Logits that bfloat16 could not tell apart, in the target and in the drafter, which itself is in bfloat16: what it
    draws from and what it is judged by are the same float32 numbers."""
    target, drafter = (jax.tree.map(lambda leaf: leaf, model) for model in five)
    rng = np.random.default_rng(3)
    common = rng.normal(size=(16, 1)) * 6
    target.vocabulary.head[...] = jnp.asarray(common + rng.normal(size=(16, 5)) * 0.03, jnp.float32)
    drafter.markov_head.w2[...] = drafter.markov_head.w2[...] * 0.1
    drafter = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), drafter)
    logits = np.asarray(logits_of(target, jnp.array([PROMPT])))[0, -1]
    steps = np.abs(np.diff(np.sort(logits)))
    assert (steps < np.abs(logits).max() / 256).any()
    out = check(target, drafter, WHOLE, sorted_law, laws=[(0.3, 0, 1.0)] * len(LAWS))
    assert 0 < (out.count_B - 1).sum() < out.verified_B.sum()


@pytest.mark.parametrize("block", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_text_follows_the_target_with_mtp(five, built, sorted_law, block):
    target, dspark = five
    config = MtpConfig(vocab_size=5, layer=dspark.config.layer, num_target_layers=1, block_size=block)
    drafter = built(lambda: Mtp(config, rngs=nnx.Rngs(0)), seed=6)
    out = check(target, drafter, WHOLE, sorted_law)
    assert 0 < (out.count_B - 1).sum() < out.verified_B.sum()


GOLDEN = (
    ("dspark_vanilla_llama", Threshold(confidence=0.5)),
    ("dspark_vanilla_qwen3", FixedLength()),
    ("dspark_vanilla_gemma4", Threshold(confidence=0.5)),
    ("dspark_gated_qwen3", FixedLength()),
    ("dspark_rnn_qwen3", Threshold(confidence=0.5)),
    ("dflash_qwen3", FixedLength()),
    ("dflash_gemma4", FixedLength()),
    ("eagle3_qwen3", FixedLength()),
)
FEW_LAWS = [(0.0, 0, 1.0), (1.0, 3, 1.0), (0.7, 4, 0.9), (1.5, 4, 1.0)]
ROWS_OF_A_FEW = 512


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), GOLDEN, ids=[name for name, _ in GOLDEN])
def test_text_follows_the_target_with_every_trained_drafter(
    golden_target, golden_drafter, golden_folder, sorted_law, name, policy
):
    """Two tokens of rows that ask for different laws, in one batch. Few tokens pass each law, so cells are full."""
    target, drafter = golden_target(name.split("_")[-1]), golden_drafter(name)
    records = json.loads((golden_folder(f"drafters/{name}") / "decode_reference.json").read_text(encoding="utf-8"))
    prompt = records[0]["output_ids"][:11]
    temperature, top_k, top_p = (np.repeat(values, ROWS_OF_A_FEW) for values in zip(*FEW_LAWS, strict=True))
    laws = SamplingLaw(
        temperature_B=jnp.asarray(temperature, jnp.float32),
        top_k_B=jnp.asarray(top_k, jnp.int32),
        top_p_B=jnp.asarray(top_p, jnp.float32),
        keys_B=jax.random.split(jax.random.key(1), len(temperature)),
    )
    out = jax.device_get(rounds(target, drafter, RoundPlan(policy=policy), laws, jnp.asarray(prompt), 2))
    accepted, verified = out.count_B - 1, out.verified_B
    assert 0 < accepted.sum() < verified.sum()
    found = texts(out)[:, :2].reshape(len(FEW_LAWS), ROWS_OF_A_FEW, 2)
    first = np.asarray(logits_of(target, jnp.asarray([prompt])))[0, -1]
    followers = np.argsort(first)[::-1][:4]
    contexts = jnp.asarray([[*prompt, token] for token in followers], jnp.int32)
    second = dict(zip(followers.tolist(), np.asarray(logits_of(target, contexts))[:, -1], strict=True))
    for law, drawn in zip(FEW_LAWS, found, strict=True):
        law_of_first, _ = sorted_law(first, *law)
        assert set(np.flatnonzero(law_of_first)) <= set(second)
        joint = np.zeros((len(first), len(first)))
        for token, logits in second.items():
            joint[token] = law_of_first[token] * sorted_law(logits, *law)[0]
        counts = np.zeros(joint.shape)
        np.add.at(counts, tuple(drawn.T), 1)
        assert_follows(counts, joint, (name, law))
