"""The exact law, by enumeration: vocabulary 3, two drafts, every sequence and every decision."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.rejection import Rule, judge, next_token_probs
from dspark_jax.decoding.scheduler import EarlyStop, FixedLength, Guide, Threshold, TwoStep, verified_lengths

VOCAB, BLOCK = 3, 2
SEQUENCES = np.array(list(np.ndindex(*(VOCAB,) * BLOCK)), np.int32)


@partial(jax.jit, static_argnames="rule")
def judged(tokens, draft, target, lengths, uniforms, rule=Rule.TOKEN):
    """`judge` of rows that all have a law for every slot."""
    first_B = jnp.arange(target.shape[0]) * target.shape[1]
    return judge(rule, tokens, draft, target.reshape(-1, target.shape[-1]), first_B, lengths, uniforms)


class Laws:
    """Random laws of both models: first token, second given the first, third given both (the target's only)."""

    def __init__(self, seed, *, holes=False, alike=False):
        rng = np.random.default_rng(seed)

        def law(*shape):
            weights = rng.dirichlet(np.ones(VOCAB), shape) * (rng.random((*shape, VOCAB)) > 0.3 * holes)
            weights[..., 0] += weights.sum(axis=-1) == 0
            return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)

        self.target = [law(), law(VOCAB), law(VOCAB, VOCAB)]
        self.draft = self.target[:BLOCK] if alike else [law(), law(VOCAB)]
        self.confidence = rng.random(), rng.random(VOCAB)

    def along(self, tables):
        """The laws met along each sequence, [sequence, slot, token]."""
        return jnp.asarray(np.stack([[table[tuple(x[:k])] for k, table in enumerate(tables)] for x in SEQUENCES]))

    def confidences(self):
        first, second = self.confidence
        return jnp.asarray([[first, second[x[0]]] for x in SEQUENCES], jnp.float32)

    def joint(self):
        one, two, three = (table.astype(np.float64) for table in self.target)
        return one[:, None, None] * two[:, :, None] * three


def chances(rule, draft, target, lengths):
    """[sequence, slot]: the chance of its uniform to let a slot pass, found by bisection; no other one in the way."""
    out = np.zeros((len(SEQUENCES), BLOCK))
    others = {Rule.TOKEN: 0.0, Rule.BLOCK: np.nextafter(np.float32(1), np.float32(0))}[rule]
    for slot in range(BLOCK):
        low, high = np.zeros(len(SEQUENCES)), np.ones(len(SEQUENCES))
        for _ in range(30):
            middle = (low + high) / 2
            uniforms = np.where(np.arange(BLOCK) == slot, middle[:, None], others).astype(np.float32)
            passes = np.asarray(judged(SEQUENCES, draft, target, lengths, uniforms, rule)[0]) > slot
            low, high = np.where(passes, middle, low), np.where(passes, high, middle)
        out[:, slot] = low
    return out


def kept_chances(rule, chance_K, length):
    """[n]: the chance that exactly n of the judged drafts survive."""
    passes = np.where(np.arange(BLOCK) < length, chance_K, 0)
    if rule is Rule.TOKEN:
        reached = np.concatenate([[1], np.cumprod(passes)])
        return reached * (1 - np.append(passes, 0))
    # The longest prefix that passes: none after it does.
    none_after = np.append(np.cumprod(1 - passes[::-1])[::-1], 1)
    return np.concatenate([[1], passes]) * none_after


def committed_law(laws, lengths, rule=Rule.TOKEN):
    """(law of the next three tokens: what a round commits, then the target on its own; expected drafts kept)."""
    draft, target = laws.along(laws.draft), laws.along(laws.target)
    chance = chances(rule, draft, target, lengths)
    _, two, three = laws.target
    joint, kept = np.zeros((VOCAB,) * 3), 0.0
    after = [after_prefix(rule, draft, target, lengths, n) for n in range(BLOCK + 1)]
    for row, (x1, x2) in enumerate(SEQUENCES):
        drawn = float(laws.draft[0][x1]) * float(laws.draft[1][x1, x2])
        for n, kept_chance in enumerate(kept_chances(rule, chance[row], lengths[row])):
            if drawn * kept_chance > 0:
                next_law = drawn * kept_chance * after[n][row] / after[n][row].sum()
                kept += n * drawn * kept_chance
                if n == 0:
                    joint += next_law[:, None, None] * two[:, :, None] * three
                elif n == 1:
                    joint[x1] += next_law[:, None] * three[x1]
                else:
                    joint[x1, x2] += next_law
    return joint, kept


def after_prefix(rule, draft, target, lengths, n):
    """[sequence, token]: the law of what follows when uniforms let exactly n drafts survive, where they can."""
    nearly_one = np.nextafter(np.float32(1), np.float32(0))
    uniforms = np.full((len(SEQUENCES), BLOCK), nearly_one, np.float32)
    uniforms[:, max(n - 1, 0) if rule is Rule.BLOCK else 0 : n] = 0
    return np.asarray(judged(SEQUENCES, draft, target, lengths, uniforms, rule)[1], np.float64)


def lengths_of(policy, laws):
    """The lengths that a policy gives each sequence beside a request whose drafts are even.

    The curve falls, so that early stop ends at different places; TwoStep's budget is two drafts for both.
    """
    guide = Guide.unguided(2, BLOCK).replace(rates_N=jnp.array([9, 9, 9, 8.5, 7.5, 6.5, 5.0]))
    neighbour = jnp.array([0.5, 0.9])
    return np.stack([schedule(policy, jnp.stack([row, neighbour]), guide)[0] for row in laws.confidences()])


schedule = jax.jit(lambda policy, *args: verified_lengths(policy, *args, (4,)), static_argnums=0)


@pytest.mark.parametrize(
    "policy",
    [
        FixedLength(length=0),
        FixedLength(length=1),
        FixedLength(length=2),
        FixedLength(),
        Threshold(confidence=0.3),
        Threshold(confidence=0.6),
        EarlyStop(fill=False),
        TwoStep(),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [{}, {"holes": True}, {"alike": True}], ids=str)
@pytest.mark.parametrize("rule", Rule)
def test_what_a_round_commits_follows_the_targets_law(policy, kind, rule):
    seen = set()
    for seed in range(4):
        laws = Laws(seed, **kind)
        lengths = lengths_of(policy, laws)
        seen |= set(lengths.tolist())
        joint, _ = committed_law(laws, lengths, rule)
        np.testing.assert_allclose(joint, laws.joint(), atol=2e-6)
    if isinstance(policy, FixedLength):
        assert seen == {2 if policy.length is None else policy.length}
    else:
        assert len(seen) > 1


def test_d_19_looking_ahead_biases_the_law_and_our_policies_do_not():
    """Appendix A: verifying a draft because of what it turned out to be gives .85/.15 where the target says .7/.3."""
    laws = Laws(0)
    laws.target = [np.array([0.7, 0.3, 0]), np.tile([0.7, 0.3, 0], (3, 1)), np.tile([0.7, 0.3, 0], (3, 3, 1))]
    laws.target = [table.astype(np.float32) for table in laws.target]
    laws.draft = [np.array([0.5, 0.5, 0], np.float32), np.tile(np.array([0.5, 0.5, 0], np.float32), (3, 1))]

    def first_token(lengths):
        return committed_law(laws, np.asarray(lengths, np.int32))[0].sum(axis=(1, 2))

    look_ahead = SEQUENCES[:, 0] == 0
    np.testing.assert_allclose(first_token(look_ahead), [0.85, 0.15, 0], atol=1e-6)
    laws.confidence = 0.6, np.array([0.9, 0.1, 0.5])
    for policy in (FixedLength(), FixedLength(length=1), Threshold(confidence=0.5), EarlyStop(fill=False), TwoStep()):
        lengths = lengths_of(policy, laws)
        np.testing.assert_allclose(first_token(lengths), [0.7, 0.3, 0], atol=1e-6)


def one_row(draft, target, tokens, uniforms, length, rule=Rule.TOKEN):
    rows = (jnp.asarray(x)[None] for x in (tokens, draft, target, length, uniforms))
    return int(judged(*rows, rule)[0][0])


def following(draft_probs, target_probs, accepted, lengths):
    """The law after so many accepted drafts, each token by token."""
    first_B = jnp.arange(target_probs.shape[0]) * target_probs.shape[1]
    flat = jnp.asarray(target_probs).reshape(-1, target_probs.shape[-1])
    return next_token_probs(jnp.asarray(draft_probs), flat, first_B, accepted, lengths, jnp.ones(len(first_B)))


@pytest.mark.parametrize("rule", Rule)
def test_a_draft_without_target_mass_never_passes(rule):
    draft, target = np.full((2, 3), 1 / 3, np.float32), np.array([[0, 0.5, 0.5]] * 3, np.float32)
    assert one_row(draft, target, np.array([0, 1]), np.zeros(2, np.float32), 2, rule) == 0
    assert one_row(draft, target, np.array([1, 0]), np.zeros(2, np.float32), 2, rule) == 1


def test_nothing_after_the_first_rejection_or_past_the_length_is_accepted():
    draft, target = np.array([[0.9, 0.05, 0.05]] * 2, np.float32), np.array([[0.1, 0.45, 0.45]] * 3, np.float32)
    low, high = np.float32(0.0), np.float32(0.5)
    tokens = np.zeros(2, np.int32)
    assert one_row(draft, target, tokens, np.array([high, low]), 2) == 0
    assert one_row(draft, target, tokens, np.array([low, high]), 2) == 1
    assert [one_row(draft, target, tokens, np.array([low, low]), length) for length in range(3)] == [0, 1, 2]


def test_equal_laws_never_reject_and_an_empty_residual_falls_back_to_the_target():
    law = np.array([[0.2, 0.3, 0.5]] * 3, np.float32)
    nearly_one = np.full(2, np.nextafter(np.float32(1), np.float32(0)))
    for tokens in SEQUENCES:
        assert one_row(law[:2], law, tokens, nearly_one, 2) == 2
    probs = following(law[None, :2], law[None], jnp.array([0]), jnp.array([2]))
    np.testing.assert_array_equal(probs[0], law[0])


def test_a_rejection_resamples_from_what_the_draft_left_over_and_a_full_pass_from_the_target():
    draft = np.array([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]], np.float32)
    target = np.array([[[0.2, 0.4, 0.4], [0.6, 0.3, 0.1], [0.3, 0.3, 0.4]]], np.float32)

    def after(count, length):
        return following(draft, target, jnp.array([count]), jnp.array([length]))[0]

    np.testing.assert_allclose(after(0, 2), [0, 0.1, 0.2], atol=1e-7)
    np.testing.assert_allclose(after(1, 2), [0.5, 0.2, 0], atol=1e-7)
    np.testing.assert_array_equal(after(0, 0), target[0, 0])
    np.testing.assert_array_equal(after(1, 1), target[0, 1])
    np.testing.assert_array_equal(after(2, 2), target[0, 2])


def test_without_drafts_the_next_token_is_the_targets():
    target = np.array([[[0.2, 0.3, 0.5]]], np.float32)
    nothing, zero = jnp.zeros((1, 0, 3)), jnp.array([0])
    for rule in Rule:
        count, probs = judged(jnp.zeros((1, 0), jnp.int32), nothing, target, zero, jnp.zeros((1, 0)), rule)
        assert count.tolist() == [0]
        np.testing.assert_array_equal(probs, target[:, 0])


def test_blocks_keep_no_less_than_tokens_and_at_times_more():
    """Theorem 2 of arXiv 2403.10444."""
    gains = []
    for seed in range(6):
        laws = Laws(seed)
        full = np.full(len(SEQUENCES), BLOCK, np.int32)
        (_, by_block), (_, by_token) = (committed_law(laws, full, rule) for rule in (Rule.BLOCK, Rule.TOKEN))
        gains.append(by_block - by_token)
    assert min(gains) > -1e-6
    assert max(gains) > 0.01
