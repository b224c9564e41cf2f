"""The exact law, by enumeration: vocabulary 3, two drafts, every sequence and every decision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.rejection import accepted_prefix, next_token_probs
from dspark_jax.decoding.scheduler import FixedLength, Threshold, verified_lengths

VOCAB, BLOCK = 3, 2
SEQUENCES = np.array(list(np.ndindex(*(VOCAB,) * BLOCK)), np.int32)
accepted = jax.jit(accepted_prefix)
following = jax.jit(next_token_probs)


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


def acceptance(draft, target, lengths):
    """[sequence, slot]: the probability of passing a slot once reached, found by bisecting its uniform."""
    out = np.zeros((len(SEQUENCES), BLOCK))
    for slot in range(BLOCK):
        low, high = np.zeros(len(SEQUENCES)), np.ones(len(SEQUENCES))
        for _ in range(30):
            middle = (low + high) / 2
            uniforms = np.where(np.arange(BLOCK) == slot, middle[:, None], 0).astype(np.float32)
            passes = np.asarray(accepted(SEQUENCES, draft, target, lengths, uniforms)) > slot
            low, high = np.where(passes, middle, low), np.where(passes, high, middle)
        out[:, slot] = low
    return out


def committed_law(laws, lengths):
    """The law of the next three tokens: what a round commits, then the target on its own."""
    draft, target = laws.along(laws.draft), laws.along(laws.target)
    pass_probability = acceptance(draft, target, lengths)
    after = [
        np.asarray(following(draft, target, jnp.full(len(SEQUENCES), n), lengths), np.float64) for n in range(BLOCK + 1)
    ]
    _, two, three = laws.target
    joint = np.zeros((VOCAB,) * 3)
    for row, (x1, x2) in enumerate(SEQUENCES):
        reached = float(laws.draft[0][x1]) * float(laws.draft[1][x1, x2])
        for n in range(lengths[row] + 1):
            stays = pass_probability[row, n] if n < lengths[row] else 0.0
            if reached * (1 - stays) > 0:
                next_law = reached * (1 - stays) * after[n][row] / after[n][row].sum()
                if n == 0:
                    joint += next_law[:, None, None] * two[:, :, None] * three
                elif n == 1:
                    joint[x1] += next_law[:, None] * three[x1]
                else:
                    joint[x1, x2] += next_law
            reached *= stays
    return joint


@pytest.mark.parametrize(
    "policy",
    [
        FixedLength(length=0),
        FixedLength(length=1),
        FixedLength(length=2),
        FixedLength(),
        Threshold(confidence=0.3),
        Threshold(confidence=0.6),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [{}, {"holes": True}, {"alike": True}], ids=str)
def test_what_a_round_commits_follows_the_targets_law(policy, kind):
    seen = set()
    for seed in range(4):
        laws = Laws(seed, **kind)
        lengths = np.asarray(verified_lengths(policy, laws.confidences()))
        seen |= set(lengths.tolist())
        np.testing.assert_allclose(committed_law(laws, lengths), laws.joint(), atol=1e-6)
    assert (
        seen == {policy.length if policy.length is not None else 2} if isinstance(policy, FixedLength) else seen > {0}
    )


def test_d_19_looking_ahead_biases_the_law_and_our_policies_do_not():
    """Appendix A: verifying a draft because of what it turned out to be gives .85/.15 where the target says .7/.3."""
    laws = Laws(0)
    laws.target = [np.array([0.7, 0.3, 0]), np.tile([0.7, 0.3, 0], (3, 1)), np.tile([0.7, 0.3, 0], (3, 3, 1))]
    laws.target = [table.astype(np.float32) for table in laws.target]
    laws.draft = [np.array([0.5, 0.5, 0], np.float32), np.tile(np.array([0.5, 0.5, 0], np.float32), (3, 1))]

    def first_token(lengths):
        return committed_law(laws, np.asarray(lengths, np.int32)).sum(axis=(1, 2))

    look_ahead = SEQUENCES[:, 0] == 0
    np.testing.assert_allclose(first_token(look_ahead), [0.85, 0.15, 0], atol=1e-6)
    laws.confidence = 0.6, np.array([0.9, 0.1, 0.5])
    for policy in (FixedLength(), FixedLength(length=1), Threshold(confidence=0.5)):
        lengths = verified_lengths(policy, laws.confidences())
        np.testing.assert_allclose(first_token(lengths), [0.7, 0.3, 0], atol=1e-6)


def one_row(draft, target, tokens, uniforms, length):
    rows = (jnp.asarray(x)[None] for x in (tokens, draft, target, length, uniforms))
    return int(accepted(*rows)[0])


def test_a_draft_without_target_mass_never_passes():
    draft, target = np.full((2, 3), 1 / 3, np.float32), np.array([[0, 0.5, 0.5]] * 3, np.float32)
    assert one_row(draft, target, np.array([0, 1]), np.zeros(2, np.float32), 2) == 0
    assert one_row(draft, target, np.array([1, 0]), np.zeros(2, np.float32), 2) == 1


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
    count = accepted(jnp.zeros((1, 0), jnp.int32), nothing, target, zero, jnp.zeros((1, 0)))
    assert count.tolist() == [0]
    np.testing.assert_array_equal(following(nothing, target, count, zero), target[:, 0])
