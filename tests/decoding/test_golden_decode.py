"""Every drafter of the parity files over its target: the rounds of the reference, and the target's text in any
company."""

import json

import jax
import numpy as np
import pytest

from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.scheduler import Threshold
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.decoding.stats import DecodeStats

NAMES = (
    "dspark_vanilla_llama",
    "dspark_vanilla_qwen3",
    "dspark_vanilla_gemma4",
    "dspark_gated_qwen3",
    "dspark_rnn_qwen3",
    "dflash_qwen3",
    "dflash_gemma4",
    "eagle3_qwen3",
)
GREEDY = Sampling()
MAX_LEN, ROWS = 96, 4
encode = jax.jit(lambda target, tokens: target.vocabulary.logits(target.encode(tokens, ()).hidden_BTD))


# One for every kind of drafter and every family; the other pairs differ from these in nothing but their numbers.
_SLOW = ("dspark_vanilla_qwen3", "dspark_gated_qwen3", "dflash_gemma4")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in NAMES],
)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def target(golden_target, name):
    return golden_target(name.split("_")[-1])


@pytest.fixture(scope="module")
def drafter(golden_drafter, name):
    return golden_drafter(name)


@pytest.fixture(scope="module")
def records(golden_folder, name):
    file = golden_folder(f"drafters/{name}") / "decode_reference.json"
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def slots(target, drafter):
    """A state of one fixed shape; every draft is verified."""
    return DecodeSlots(target, drafter, max_batch=ROWS, max_len=MAX_LEN, elastic=False)


def assert_rounds(slots, records):
    assert len(records) == 3
    for record in records:
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


def test_d_02_d_07_d_09_rounds_of_the_reference(slots, records):
    assert_rounds(slots, [record for record in records if not record.get("confidence_threshold")])


@pytest.mark.parametrize(
    "name",
    [name if name == "dspark_vanilla_llama" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
    indirect=True,
    scope="module",
)
def test_rounds_of_the_reference_cut_by_confidence(target, drafter, records, monkeypatch):
    chosen = [record for record in records if record.get("confidence_threshold") == 0.5]
    if not getattr(drafter, "confidence_head", None):
        # Certain of everything: the reference's rounds are those without a threshold.
        uncut = [record for record in records if record.get("confidence_threshold") == 0.0]
        assert [record["proposal_lengths"] for record in chosen] == [record["proposal_lengths"] for record in uncut]
        return
    policy = Threshold(confidence=0.5)
    # Two branches instead of four.
    monkeypatch.setattr("dspark_jax.decoding.planner.switch_sizes", lambda rows, block: (rows, rows * (block + 1)))
    assert_rounds(DecodeSlots(target, drafter, max_batch=1, max_len=MAX_LEN, policy=policy), chosen)


def test_d_14_d_63_a_mixed_batch_says_what_the_target_says(target, slots, records):
    """12 greedy requests through 4 rows, sampled ones among them: they join and leave at different times."""
    prompts = [tuple(record["output_ids"][: 1 + 3 * i]) for i in range(4) for record in records[:3]]
    sampled = [Sampling(temperature=1.0, top_k=20 * (seed % 2), seed=seed) for seed in range(3)]
    jobs = [
        Job(prompt=prompt, sampling=GREEDY, max_new_tokens=12 + 5 * (i % 3), tag=i) for i, prompt in enumerate(prompts)
    ]
    jobs[5:5] = [Job(prompt=prompts[4], sampling=law, max_new_tokens=14, tag=100 + i) for i, law in enumerate(sampled)]
    completions = {completion.job.tag: completion for completion in generate(slots, jobs)}
    greedy = [completions[i] for i in range(12)]
    tokens = np.zeros((12, MAX_LEN), np.int32)
    for row, completion in enumerate(greedy):
        text = [*completion.job.prompt, *completion.tokens]
        tokens[row, : len(text)] = text
    best = np.argmax(encode(target, tokens), axis=-1)
    for row, completion in enumerate(greedy):
        start = len(completion.job.prompt) - 1
        assert len(completion.tokens) == completion.job.max_new_tokens
        assert best[row, start : start + len(completion.tokens)].tolist() == list(completion.tokens)

    # Batch 1: alone, a request says what it says in company, whatever its law.
    for tag in (2, 7, 100, 101, 102):
        (alone,) = generate(slots, [completions[tag].job])
        assert alone.tokens == completions[tag].tokens
        assert alone.stats.proposed == slots.block_size * alone.stats.rounds > 0
    assert len({completions[100 + i].tokens for i in range(3)}) == 3
    stats = sum((completion.stats for completion in greedy), DecodeStats())
    assert stats.proposed == stats.verified > stats.accepted > 0
    # Worth its keep on the language it was trained for, in any company.
    assert stats.accepted_length > 1.3


def test_d_23_rolling_back_and_going_on_equals_a_fresh_prefill(slots, records):
    """After partly accepted rounds the caches hold what a prefill of the committed tokens writes."""
    prompt, block = records[0]["prompt"], slots.block_size
    handle, text, accepted = slots.admit(prompt, GREEDY), list(prompt), []
    for _ in range(10):
        (out,) = slots.step()
        text += out.tokens
        accepted.append(out.accepted)
    assert len(set(accepted)) >= 2
    assert min(accepted) < block
    committed = len(text) - 1

    def held(handle):
        """What a row knows of its committed tokens; of an array without positions, everything."""
        row = slots._row_of[handle]
        leaves = jax.tree.leaves((slots._state.cache, slots._state.draft))
        return [np.asarray(x[row, :, :committed] if x.ndim == 4 else x[row]) for x in leaves]

    rolled = held(handle)
    after = [slots.step()[0] for _ in range(3)]
    slots.release(handle)

    handle = slots.admit(text, GREEDY)
    fresh = held(handle)
    assert all(leaf.any() for leaf in fresh)
    for found, expected in zip(rolled, fresh, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-4)
    for out in after:
        (again,) = slots.step()
        assert (again.tokens, again.verified, again.accepted) == (out.tokens, out.verified, out.accepted)
        np.testing.assert_allclose(again.confidence, out.confidence, atol=1e-4)
    slots.release(handle)
