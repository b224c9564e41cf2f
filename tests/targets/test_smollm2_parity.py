"""The real small target against transformers: the same numbers from the weights our users get (bfloat16, read as
float32)."""

import jax
import numpy as np
import pytest

TAPS = (1, 14, 27)
PROMPTS = range(4)


@pytest.fixture(scope="module")
def reference(golden):
    return np.load(golden / "smollm2" / "reference.npz")


@pytest.fixture(scope="module")
def target(smollm2):
    from dspark_jax.interop.huggingface import load_target

    return load_target(smollm2, "float32")


@pytest.fixture(scope="module")
def encoded(target, reference):
    """All prompts, each followed by the reference's greedy text, padded to one length: causal, so padding is unseen."""
    texts = [[*reference[f"input_ids_{i}"], *reference[f"bf16w_greedy_{i}"]] for i in PROMPTS]
    tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text

    @jax.jit
    def run(target, tokens):
        out = target.encode(tokens, TAPS)
        return target.vocabulary.logits(out.hidden_BTD), out.features_BTE

    logits, features = run(target, tokens)
    return np.asarray(logits), np.asarray(features)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits(encoded, reference, prompt):
    logits = encoded[0][prompt]
    end = len(reference[f"input_ids_{prompt}"])
    np.testing.assert_allclose(logits[end - 1], reference[f"bf16w_last_logits_{prompt}"], atol=1e-3)
    largest = logits[:end].max(axis=-1, keepdims=True)
    logsumexp = largest[:, 0] + np.log(np.exp(logits[:end] - largest).sum(axis=-1))
    np.testing.assert_allclose(logsumexp, reference[f"bf16w_logsumexp_all_{prompt}"], atol=1e-3)
    np.testing.assert_array_equal(logits[:end].argmax(axis=-1), reference[f"bf16w_argmax_all_{prompt}"])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text(encoded, reference, prompt):
    start = len(reference[f"input_ids_{prompt}"])
    greedy = reference[f"bf16w_greedy_{prompt}"]
    predicted = encoded[0][prompt, start - 1 : start - 1 + len(greedy)].argmax(axis=-1)
    np.testing.assert_array_equal(predicted, greedy)


def test_taps(encoded, reference):
    length = len(reference["input_ids_0"])
    taps = np.split(encoded[1][0, :length], len(TAPS), axis=-1)
    for layer, found in zip(TAPS, taps, strict=True):
        expected = reference[f"bf16w_hidden_{layer}_0"]
        np.testing.assert_allclose(found[1:], expected[1:], rtol=1e-5, atol=1e-3)
        # Position 0 carries activations near 25,000.
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=0.05)
