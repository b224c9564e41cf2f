"""Greedy speculative decoding says what greedy autoregressive decoding says, token for token."""

import pytest

from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.scheduler import FixedLength
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.decoding.stats import DecodeStats
from dspark_jax.drafters.base import NoDrafter

BLOCK = 3
# Prompts of 1 token and of no more than K + 1 are among them; rows join and leave a batch of 8 at different times.
PROMPTS = [
    tuple((7 * i + 3 * j * j) % 16 for j in range(length))
    for i, length in enumerate((1, 2, 3, 4, 5, 1, 9, 17, 4, 33, 1, 6))
]
BUDGETS = (3, 30, 12, 25, 1, 30, 8, 20, 28, 15, 24, 26)


def jobs():
    return [
        Job(prompt=prompt, sampling=Sampling(), max_new_tokens=budget, tag=tag)
        for tag, (prompt, budget) in enumerate(zip(PROMPTS, BUDGETS, strict=True))
    ]


def texts(completions):
    return {completion.job.tag: completion.tokens for completion in completions}


@pytest.fixture(scope="module")
def autoregressive(small):
    target, _ = small
    slots = DecodeSlots(target, NoDrafter(), max_batch=len(PROMPTS), max_len=64, elastic=False)
    completions = list(generate(slots, jobs()))
    assert all(completion.stats.proposed == 0 for completion in completions)
    assert len({token for completion in completions for token in completion.tokens}) > 4
    return texts(completions)


@pytest.fixture(scope="module")
def oracle_slots(small, oracle_of):
    target, _ = small
    perfect = oracle_of(target, block=BLOCK, shift=0)
    return DecodeSlots(target, perfect, max_batch=8, max_len=64, policy=FixedLength(), elastic=False)


@pytest.mark.parametrize("shift", [0, 1, None], ids=["perfect", "always-wrong", "mixed"])
def test_d_21_an_oracles_drafts_change_nothing(small, oracle_slots, oracle_of, autoregressive, shift):
    oracle_slots.replace_drafter(oracle_of(small[0], block=BLOCK, shift=shift))
    batched = list(generate(oracle_slots, jobs()))
    assert texts(batched) == autoregressive
    alone = [completion for job in jobs()[1:3] for completion in generate(oracle_slots, [job])]
    assert texts(alone) == {tag: autoregressive[tag] for tag in (1, 2)}
    for completions in (batched, alone):
        stats = sum((completion.stats for completion in completions), DecodeStats())
        assert stats.proposed == stats.verified == BLOCK * stats.rounds > 0
        if shift == 0:
            assert stats.accepted == stats.verified
        elif shift == 1:
            assert stats.accepted == 0
        else:
            assert 0 < stats.accepted < stats.verified


def test_a_drafter_that_knows_nothing_changes_nothing(slots, autoregressive):
    completions = list(generate(slots, jobs()))
    assert texts(completions) == autoregressive
    stats = sum((completion.stats for completion in completions), DecodeStats())
    assert 0 < stats.accepted < stats.proposed
