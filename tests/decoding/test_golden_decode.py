"""The tiny target and its trained drafter decode as the reference does, and keep their text in any company."""

import json

import jax
import numpy as np
import pytest

from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.scheduler import FixedLength, Threshold
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.decoding.stats import DecodeStats

GREEDY = Sampling()
MAX_LEN = 64
encode = jax.jit(lambda target, tokens: target.vocabulary.logits(target.encode(tokens, ()).hidden_BTD))


@pytest.fixture(scope="module")
def records(golden):
    file = golden / "drafters" / "dspark_vanilla_llama" / "decode_reference.json"
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def slots_at(tiny_target, tiny_drafter):
    """Slots by the reference's confidence threshold; 0 verifies every draft (there in a state of one fixed shape)."""
    policies = {0.0: FixedLength(), 0.5: Threshold(confidence=0.5)}
    return {
        threshold: DecodeSlots(
            tiny_target, tiny_drafter, max_batch=8, max_len=MAX_LEN, policy=policy, elastic=threshold > 0
        )
        for threshold, policy in policies.items()
    }


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_rounds_of_the_reference(slots_at, records, threshold):
    slots = slots_at[threshold]
    chosen = [record for record in records if record["confidence_threshold"] == threshold]
    assert len(chosen) == 3
    for record in chosen:
        expected = record["output_ids"]
        # The reference takes its first token from the prompt's own pass.
        start = len(record["prompt"]) + 1
        handle = slots.admit(expected[:start], GREEDY)
        rounds = [out for _ in record["acceptance_lengths"] for out in slots.step()]
        slots.release(handle)
        assert [len(out.tokens) for out in rounds] == record["acceptance_lengths"]
        assert [out.verified for out in rounds] == record["proposal_lengths"]
        text = [token for out in rounds for token in out.tokens]
        assert text[: len(expected) - start] == expected[start:]


def test_a_mixed_batch_says_what_the_target_says(tiny_target, slots_at, records):
    """12 requests through 8 rows: they join and leave at different times."""
    prompts = [tuple(record["output_ids"][: 1 + 3 * i]) for i in range(4) for record in records[:3]]
    jobs = [
        Job(prompt=prompt, sampling=GREEDY, max_new_tokens=12 + 5 * (i % 3), tag=i) for i, prompt in enumerate(prompts)
    ]
    completions = sorted(generate(slots_at[0.0], jobs), key=lambda completion: completion.job.tag)
    tokens = np.zeros((len(jobs), MAX_LEN), np.int32)
    for row, completion in enumerate(completions):
        text = [*completion.job.prompt, *completion.tokens]
        tokens[row, : len(text)] = text
    best = np.argmax(encode(tiny_target, tokens), axis=-1)
    for row, completion in enumerate(completions):
        start = len(completion.job.prompt) - 1
        assert len(completion.tokens) == completion.job.max_new_tokens
        assert best[row, start : start + len(completion.tokens)].tolist() == list(completion.tokens)
    stats = sum((completion.stats for completion in completions), DecodeStats())
    # Worth its keep on the language it was trained for, in any company.
    assert stats.accepted_length > 1.5


def test_rolling_back_and_going_on_equals_a_fresh_prefill(slots_at, records):
    """After partly accepted rounds both caches hold what a prefill of the committed tokens writes."""
    slots = slots_at[0.0]
    prompt = records[0]["prompt"]
    handle, text, accepted = slots.admit(prompt, GREEDY), list(prompt), []
    for _ in range(14):
        (out,) = slots.step()
        text += out.tokens
        accepted.append(out.accepted)
    assert len(set(accepted)) >= 3
    assert max(accepted) < 5
    committed = len(text) - 1
    rolled = jax.tree.map(lambda x: np.asarray(x[0, :, :committed]), (slots._state.cache, slots._state.draft))
    after = [slots.step()[0] for _ in range(3)]
    slots.release(handle)

    slots.admit(text, GREEDY)
    fresh = jax.tree.map(lambda x: np.asarray(x[0, :, :committed]), (slots._state.cache, slots._state.draft))
    assert all(leaf.any(axis=(0, 2)).all() for leaf in jax.tree.leaves(fresh))
    for found, expected in zip(jax.tree.leaves(rolled), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    for out in after:
        (again,) = slots.step()
        assert (again.tokens, again.verified, again.accepted) == (out.tokens, out.verified, out.accepted)
        np.testing.assert_allclose(again.confidence, out.confidence, atol=1e-4)
    for live in slots.live:
        slots.release(live)
