"""Evaluation decodes for real, follows the weights it is given, and counts like the decoder does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.data.store import TokenStore
from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.training.draft import draft_config
from dspark_jax.training.evaluate import held_out_prompts
from dspark_jax.training.setup import prepare


@pytest.fixture(scope="module")
def setup(small_config, tmp_path_factory):
    return prepare(small_config, tmp_path_factory.mktemp("evaluate"), lambda text: None)


def drafter_of(setup, small_config, seed: int) -> DSpark:
    config = draft_config(small_config.drafter, setup.reader.target.spec)
    return DSpark(config, rngs=nnx.Rngs(params=jax.random.key(seed, impl="rbg")), dtype=jnp.float32)


def test_new_weights_are_decoded_with_and_old_ones_come_back(setup, small_config):
    first, second = (drafter_of(setup, small_config, seed) for seed in (0, 7))
    seen = [setup.evaluate(drafter) for drafter in (first, second, first)]
    assert seen[0] == seen[2]
    assert seen[0]["loss"] != seen[1]["loss"]
    assert seen[0]["accepted_length_t1"] != seen[1]["accepted_length_t1"]
    assert all(1.0 <= values["accepted_length_t0"] <= 4.0 for values in seen)


def test_the_accepted_length_is_that_of_decoding_the_same_prompts(setup, small_config):
    drafter = drafter_of(setup, small_config, 0)
    values = setup.evaluate(drafter)
    prompts, stop = setup.evaluate._prompts, setup.reader.stop_ids
    assert len(prompts) == 4
    jobs = [
        Job(prompt=prompt, sampling=Sampling(temperature=1.0, seed=seed), max_new_tokens=8, stop_ids=stop)
        for seed, prompt in enumerate(prompts)
    ]
    slots = DecodeSlots(setup.reader.target, drafter, max_batch=4, max_len=24, elastic=False)
    stats = [completion.stats for completion in generate(slots, jobs)]
    committed, rounds = sum(s.committed for s in stats), sum(s.rounds for s in stats)
    assert sum(s.proposed for s in stats) > 0
    assert values["accepted_length_t1"] == pytest.approx(committed / rounds)


def test_prompts_are_the_text_before_the_first_learnt_token():
    masks = [[0, 0, 1, 1], [1, 1], [0, 0, 0, 1]]
    tokens = [[5, 6, 7, 8], [9, 9], [1, 2, 3, 4]]
    store = TokenStore(
        np.concatenate(tokens).astype(np.int32),
        np.concatenate(masks).astype(bool),
        np.array([0, 4, 6, 10]),
        np.arange(3, dtype=np.uint64),
    )
    assert held_out_prompts(store, np.arange(3), 9, 4) == [(5, 6), (1, 2, 3)]
    assert held_out_prompts(store, np.arange(3), 9, 2) == [(5, 6)]
    assert held_out_prompts(store, np.arange(3), 1, 4) == [(5, 6)]
