"""From logits to the law a request asked for, and from a law to tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from dspark_jax.ops.sampling import Draws, SamplingLaw, law_probs, sample

VOCAB = 7
jitted = jax.jit(law_probs)
drawn = jax.jit(sample)


def law_of(rows):
    """SamplingLaw of (temperature, top_k, top_p) rows."""
    temperature, top_k, top_p = zip(*rows, strict=True)
    return SamplingLaw(
        temperature_B=jnp.asarray(temperature, jnp.float32),
        top_k_B=jnp.asarray(top_k, jnp.int32),
        top_p_B=jnp.asarray(top_p, jnp.float32),
        keys_B=jax.random.split(jax.random.key(0), len(rows)),
    )


def probs_of(logits_V, temperature=1.0, top_k=0, top_p=1.0):
    logits_BTV = np.asarray(logits_V, np.float32)[None, None]
    return np.asarray(jitted(logits_BTV, law_of([(temperature, top_k, top_p)]))[0, 0])


logits_of_a_row = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2 * VOCAB, max_size=2 * VOCAB)
row_of_a_law = st.tuples(
    st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5]),
    st.integers(0, VOCAB + 1),
    st.just(1.0) | st.floats(0.0625, 1.0, width=32),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(logits_of_a_row, row_of_a_law), min_size=4, max_size=4))
def test_law_equals_a_sorting_twin_whatever_the_other_rows_ask_for(sorted_law, rows):
    logits_BTV = np.array([logits for logits, _ in rows], np.float32).reshape(4, 2, VOCAB)
    probs_BTV = jitted(logits_BTV, law_of([law for _, law in rows]))
    assert probs_BTV.dtype == jnp.float32
    for row, (_, (temperature, top_k, top_p)) in enumerate(rows):
        for slot in range(2):
            expected, masses = sorted_law(logits_BTV[row, slot], temperature, top_k, np.float64(np.float32(top_p)))
            assume(top_p == 1 or np.all(np.abs(masses - top_p) > 1e-5))
            np.testing.assert_allclose(probs_BTV[row, slot], expected, atol=1e-6, rtol=1e-5)
            np.testing.assert_array_equal(probs_BTV[row, slot] > 0, expected > 0)


@pytest.mark.parametrize("law", [(1.0, 0, 1.0), (0.0, 0, 1.0), (0.7, 3, 1.0), (1.0, 0, 0.6), (1.3, 4, 0.8)])
def test_a_row_has_the_same_bits_alone_and_among_others(law):
    logits_BTV = jax.random.normal(jax.random.key(1), (4, 2, VOCAB)) * 3
    others = [(0.9, 2, 1.0), (1.0, 0, 0.5), (0.0, 0, 1.0)]
    alone = jitted(jnp.repeat(logits_BTV[:1], 4, axis=0), law_of([law] * 4))[0]
    np.testing.assert_array_equal(jitted(logits_BTV, law_of([law, *others]))[0], alone)


def test_ties_at_a_cut_are_all_kept():
    np.testing.assert_allclose(probs_of([1.0, 3.0, 2.0, 3.0], top_k=1), [0, 0.5, 0, 0.5])
    np.testing.assert_allclose(probs_of([1.0, 3.0, 2.0, 3.0], top_p=0.01), [0, 0.5, 0, 0.5])
    np.testing.assert_array_equal(probs_of([2.0, 1.0, 2.0, 1.0, 0.0], top_k=3) > 0, [1, 1, 1, 1, 0])
    np.testing.assert_allclose(probs_of([-0.0, 0.0, -5.0, -7.0], top_k=1), [0.5, 0.5, 0, 0])


def test_greedy_is_a_one_hot_of_the_first_largest():
    np.testing.assert_array_equal(probs_of([1.0, 3.0, 3.0, 2.0], temperature=0.0), [0, 1, 0, 0])
    np.testing.assert_array_equal(probs_of([1.0, 3.0, 3.0, 2.0], temperature=0.0, top_k=3, top_p=0.2), [0, 1, 0, 0])


@pytest.mark.parametrize("temperature", [1e-30, 2e-38])
def test_a_temperature_near_zero_is_nearly_greedy(temperature):
    np.testing.assert_array_equal(probs_of([9.0, 20.0, -3.0, 7.0], temperature=temperature), [0, 1, 0, 0])


def test_narrow_logits_are_computed_in_float32(sorted_law):
    wide = jax.random.normal(jax.random.key(0), (1, 2, VOCAB)) * 5
    narrow = wide.astype(jnp.bfloat16)
    probs = jitted(narrow, law_of([(0.8, 5, 0.9)]))
    assert probs.dtype == jnp.float32
    for slot in range(2):
        expected, _ = sorted_law(narrow[0, slot].astype(jnp.float32), 0.8, 5, 0.9)
        np.testing.assert_allclose(probs[0, slot], expected, atol=1e-6)


@pytest.mark.parametrize(
    "weights", [[0.5, 0.2, 0.0, 0.25, 0.05], [3e-3, 1e-3, 0.0, 2e-3, 4e-3]], ids=["normalised", "unnormalised"]
)
def test_samples_follow_their_probabilities(weights):
    rows, weights = 40_000, np.array(weights)
    keys_B = jax.random.split(jax.random.key(2), rows)
    tokens = drawn(jnp.broadcast_to(jnp.asarray(weights, jnp.float32), (rows, 5)), keys_B)
    counts = np.bincount(tokens, minlength=5)
    assert counts[2] == 0
    held = weights > 0
    assert chisquare(counts[held], rows * weights[held] / weights.sum()).pvalue > 1e-3


def test_samples_follow_their_probabilities_across_the_groups_of_a_vocabulary():
    rows, held = 20_000, np.array([0, 1, 255, 256, 257, 511, 512, 699])
    weights = np.zeros(700, np.float32)
    weights[held] = [0.1, 0.2, 0.05, 0.3, 0.02, 0.13, 0.05, 0.15]
    tokens = drawn(jnp.broadcast_to(jnp.asarray(weights), (rows, 700)), jax.random.split(jax.random.key(4), rows))
    counts = np.bincount(tokens, minlength=700)
    assert counts[held].sum() == rows
    assert chisquare(counts[held], rows * weights[held] / weights.sum()).pvalue > 1e-3
    certain = jnp.eye(700)[held]
    np.testing.assert_array_equal(drawn(certain, jax.random.split(jax.random.key(5), len(held))), held)


def test_a_certain_row_gives_its_token_with_and_without_uncertain_company():
    keys_B = jax.random.split(jax.random.key(3), 3)
    certain = jnp.eye(5)[jnp.array([4, 1, 2])]
    np.testing.assert_array_equal(drawn(certain, keys_B), [4, 1, 2])
    mixed = certain.at[1].set(jnp.array([0.5, 0, 0.5, 0, 0]))
    tokens = [drawn(mixed, jax.random.split(jax.random.key(seed), 3)).tolist() for seed in range(12)]
    assert {first for first, _, _ in tokens} == {4}
    assert {second for _, second, _ in tokens} == {0, 2}
    assert {third for _, _, third in tokens} == {2}


@pytest.mark.parametrize(
    ("draws", "laws"),
    [
        (Draws.GREEDY, [(0.0, 0, 1.0), (0.0, 3, 0.5)]),
        (Draws.PLAIN, [(0.7, 0, 1.0), (0.0, 0, 1.0)]),
        (Draws.FILTERED, [(0.7, 0, 1.0), (1.0, 3, 0.8)]),
        (Draws.FILTERED, [(0.0, 0, 1.0), (0.0, 0, 1.0)]),
    ],
)
def test_knowing_the_kind_of_the_laws_changes_no_probability_and_no_token(draws, laws):
    law = law_of(laws)
    logits_BTV = jax.random.normal(jax.random.key(1), (2, 1, VOCAB)) * 3
    known, unknown = jitted(logits_BTV, law.replace(draws=draws)), jitted(logits_BTV, law)
    np.testing.assert_allclose(known, unknown, rtol=1e-6)
    expected = drawn(unknown[:, 0], law.keys_B)
    np.testing.assert_array_equal(jax.jit(sample, static_argnums=2)(known[:, 0], law.keys_B, draws), expected)
