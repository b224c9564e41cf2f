"""Faults that others shipped when they loaded drafters: each test carries the fault's number."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dspark_jax
from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.decoding.stats import DecodeStats
from dspark_jax.interop.drafter_kinds import abstract_drafter
from dspark_jax.interop.drafters import load_config, load_drafter
from dspark_jax.interop.huggingface import load_target, read_spec

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(file.parent for folder in ("drafters", "speculators") for file in GOLDEN.glob(f"{folder}/*/config.json"))


@pytest.mark.parametrize("directory", FILES, ids=lambda directory: directory.name)
def test_d_38_no_drafter_holds_a_copy_of_the_targets_vocabulary(directory):
    """Nothing has both of its axes: embedding and LM head are the target's own arrays."""
    family = directory.name.removesuffix("_v192").rpartition("_")[2]
    config = load_config(directory, read_spec(GOLDEN / f"targets/{family}_tiny"))
    module = abstract_drafter(config, jnp.bfloat16)
    parameters = jax.tree.leaves(module, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    axes = [set(parameter.get_metadata()["axes"]) for parameter in parameters]
    assert not [names for names in axes if {"vocab", "model"} <= names]


@pytest.mark.slow
def test_d_07_d_09_the_shipped_drafter_is_accepted_as_its_card_says(smollm2):
    """And the text is that of transformers, token for token."""
    reference = np.load(GOLDEN / "smollm2/reference.npz")
    target = load_target(smollm2)
    drafter = load_drafter(Path(dspark_jax.__file__).parent / "pretrained/smollm2_135m", target=target)
    jobs = []
    for i in range(4):
        prompt, length = tuple(reference[f"input_ids_{i}"].tolist()), len(reference[f"bf16w_greedy_{i}"])
        jobs.append(Job(prompt=prompt, sampling=Sampling(), max_new_tokens=length, tag=i))
    completions = list(generate(DecodeSlots(target, drafter, max_batch=4, max_len=256, elastic=False), jobs))
    for completion in completions:
        assert list(completion.tokens) == reference[f"bf16w_greedy_{completion.job.tag}"].tolist()
    stats = sum((completion.stats for completion in completions), DecodeStats())
    # The card's means over prompt sets lie between 2.1 and 3.8.
    assert stats.accepted_length > 2.0
