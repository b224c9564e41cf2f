"""The three loss terms and the per-slot metrics against loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.ops.losses import Mean, block_terms, compare

BLOCKS, BLOCK, VOCAB, DECAY = 4, 3, 6, 2.5
RNG = np.random.default_rng(0)
DRAFT, TARGET = RNG.normal(size=(2, BLOCKS, BLOCK, VOCAB)).astype(np.float32) * 2
LABELS = RNG.integers(0, VOCAB, (BLOCKS, BLOCK)).astype(np.int32)
CONFIDENCE = RNG.normal(size=(BLOCKS, BLOCK)).astype(np.float32)
MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)


@jax.jit
def jitted(draft_logits, target_logits, labels, mask, confidence_logits):
    return block_terms(compare(draft_logits, target_logits, labels), mask, confidence_logits, decay=DECAY)


TERMS = ("ce", "l1", "confidence")


def softmax(logits):
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def oracle():
    sums, counts = dict.fromkeys(TERMS, 0.0), dict.fromkeys(TERMS, 0.0)
    accept, top1, supervised = np.zeros((3, BLOCK))
    for a, k in np.ndindex(BLOCKS, BLOCK):
        if not MASK[a, k]:
            continue
        weight = np.exp(-k / DECAY)
        draft, target = softmax(DRAFT[a, k]), softmax(TARGET[a, k])
        l1 = np.abs(draft - target).sum()
        c = 1 / (1 + np.exp(-np.float64(CONFIDENCE[a, k])))
        accepted = np.minimum(draft, target).sum()
        values = {
            "ce": -np.log(draft[LABELS[a, k]]),
            "l1": l1,
            "confidence": -(accepted * np.log(c) + (1 - accepted) * np.log(1 - c)),
        }
        for name, value in values.items():
            sums[name] += weight * value
            counts[name] += weight
        accept[k] += accepted
        top1[k] += draft.argmax() == target.argmax()
        supervised[k] += 1
    return sums, counts, accept, top1, supervised


def terms(**changes):
    arguments = {
        "draft_logits": DRAFT,
        "target_logits": TARGET,
        "labels": LABELS,
        "mask": MASK,
        "confidence_logits": CONFIDENCE,
    } | changes
    return jitted(**{name: jnp.asarray(value) for name, value in arguments.items()})


def test_terms_and_metrics_equal_the_oracle():
    found, (sums, counts, accept, top1, supervised) = terms(), oracle()
    for name in TERMS:
        term = getattr(found, name)
        assert term.sum == pytest.approx(sums[name], rel=1e-5), name
        assert term.count == pytest.approx(counts[name], rel=1e-5), name
    np.testing.assert_allclose(found.accept_K.sum, accept, rtol=1e-5)
    np.testing.assert_allclose(found.top1_K.sum, top1)
    np.testing.assert_array_equal(found.accept_K.count, supervised)
    np.testing.assert_array_equal(found.top1_K.count, supervised)


def test_what_is_not_supervised_does_not_count_even_when_it_is_not_finite():
    broken = np.where(MASK[..., None], DRAFT, np.nan)
    expected, found = terms(), terms(draft_logits=broken)
    for left, right in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_confidence_term_moves_the_confidence_head_only():
    def confidence(draft_logits, confidence_logits):
        return terms(draft_logits=draft_logits, confidence_logits=confidence_logits).confidence.value

    to_draft, to_head = jax.grad(confidence, argnums=(0, 1))(DRAFT, CONFIDENCE)
    assert not np.any(to_draft)
    assert np.any(to_head)


def test_without_a_confidence_head_there_is_no_confidence_term():
    found = terms(confidence_logits=np.full_like(CONFIDENCE, np.inf))
    assert found.confidence.sum == 0
    assert found.confidence.count == 0
    assert found.ce.sum == terms().ce.sum


def test_a_broken_confidence_head_is_not_hidden():
    assert np.isnan(terms(confidence_logits=np.full_like(CONFIDENCE, np.nan)).confidence.value)


def test_means_add_before_they_divide():
    total = Mean(sum=jnp.array(3.0), count=jnp.array(1.0)) + Mean(sum=jnp.array(1.0), count=jnp.array(3.0))
    assert total.value == 1.0
    assert Mean(sum=jnp.array(0.0), count=jnp.array(0.0)).value == 0.0
