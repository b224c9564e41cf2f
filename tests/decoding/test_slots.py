"""Slots: admission, and that every request's text is the one it would have alone."""

import jax
import numpy as np
import pytest

from dspark_jax.decoding import programs
from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.slots import DecodeSlots, Sampling

MAX_LEN = 60
GREEDY = Sampling()


def run(slots, handles, rounds):
    """The tokens of these requests over so many rounds."""
    texts = {handle: [] for handle in handles}
    for _ in range(rounds):
        for out in slots.step():
            if out.handle in texts:
                texts[out.handle] += out.tokens
    return [texts[handle] for handle in handles]


def prompt_of(length, seed=0):
    return np.random.default_rng((seed, length)).integers(0, 16, length).tolist()


def test_a_round_reports_what_it_did(slots):
    handle = slots.admit([3, 5], GREEDY)
    outs = [out for _ in range(8) for out in slots.step()]
    assert len(outs) == 8
    for out in outs:
        assert out.handle == handle
        assert (out.proposed, out.verified) == (3, 3)
        assert len(out.tokens) == out.accepted + 1
        assert len(out.confidence) == 3
        assert all(0 <= token < 16 for token in out.tokens)
        assert all(0 < c < 1 for c in out.confidence)


def test_admission_counts_slots_and_gives_fresh_handles(slots):
    assert slots.free == 8
    first = slots.admit_many([[1], [2, 3]], [GREEDY, GREEDY])
    assert slots.free == 6
    assert set(slots.live) == set(first)
    slots.release(first[0])
    second = slots.admit_many([[1]] * 7, [GREEDY] * 7)
    assert slots.free == 0
    assert len({*first, *second}) == 9
    assert set(slots.live) == {first[1], *second}
    assert slots.admit_many([], []) == []


def test_models_built_alike_share_programs_and_not_weights(small, warm, is_greedy, alone, monkeypatch):
    def traced(*_):
        raise AssertionError("this was traced before")

    others = jax.tree.map(lambda leaf: leaf * 0.9, small)
    texts = [alone(warm, [3, 5], GREEDY, 20)]
    for name in ("decode_round", "prefill"):
        monkeypatch.setattr(programs, name, traced)
    texts.append(alone(DecodeSlots(*others, max_batch=8, max_len=MAX_LEN), [3, 5], GREEDY, 20))
    assert texts[0] != texts[1]
    for (target, _), text in zip((small, others), texts, strict=True):
        assert is_greedy(target, [[3, 5]], [text])


def test_requests_fill_the_holes_others_left_and_touch_nobody(small, slots, is_greedy):
    prompts = [prompt_of(length, seed=7) for length in (3, 9, 4, 6, 2, 8, 5, 7)]
    handles = slots.admit_many(prompts, [GREEDY] * 8)
    for hole in (1, 4, 5):
        slots.release(handles[hole])
        prompts[hole] = prompt_of(11 + hole, seed=8)
    for hole, handle in zip((1, 4, 5), slots.admit_many([prompts[h] for h in (1, 4, 5)], [GREEDY] * 3), strict=True):
        handles[hole] = handle
    assert is_greedy(small[0], prompts, run(slots, handles, 4))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "a prompt holds 1 to 59 tokens here, got 0"),
        ([[1], [1] * 60], "a prompt holds 1 to 59 tokens here, got 60"),
        ([[1]] * 9, "9 requests for 8 free slots of 8"),
    ],
)
def test_admission_is_all_or_nothing(slots, prompts, message):
    with pytest.raises(ValueError, match=message):
        slots.admit_many(prompts, [GREEDY] * len(prompts))
    assert slots.free == 8


def test_an_unknown_handle_is_an_error(slots):
    handle = slots.admit([1], GREEDY)
    slots.release(handle)
    for unknown in (handle, 10_000):
        with pytest.raises(ValueError, match=f"no live request has handle {unknown}"):
            slots.release(unknown)


@pytest.mark.parametrize(
    "fields", [{"temperature": -1.0}, {"temperature": float("inf")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_an_impossible_law_is_refused(fields):
    with pytest.raises(ValueError, match="needs temperature >= 0, top_k >= 0 and 0 < top_p <= 1"):
        Sampling(**fields)


def test_no_live_request_no_round(slots):
    assert slots.step() == []


def test_d_26_prompts_of_every_length_in_one_group_and_alone(small, slots, is_greedy, alone):
    """1 and K + 1 tokens are among them, and lengths around the smallest prefill pass."""
    prompts = [prompt_of(length) for length in (1, 2, 3, 4, 5, 31, 32, 33, 34, 50)]
    texts = []
    for start in range(0, len(prompts), 4):
        handles = slots.admit_many(prompts[start : start + 4], [GREEDY] * len(prompts[start : start + 4]))
        texts += run(slots, handles, 2)
        for handle in handles:
            slots.release(handle)
    texts += [alone(slots, prompt, GREEDY, 2) for prompt in prompts]
    assert is_greedy(small[0], prompts * 2, texts)


def test_a_seed_gives_the_same_text_alone_and_among_others(slots, alone):
    laws = [
        Sampling(temperature=1.0, seed=7),
        Sampling(temperature=0.7, top_k=5, seed=8),
        Sampling(temperature=1.3, top_p=0.8, seed=9),
        GREEDY,
    ]
    prompts = [prompt_of(length) for length in (1, 6, 3, 9)]
    together = run(slots, slots.admit_many(prompts, laws), 8)
    for handle in slots.live:
        slots.release(handle)
    slots.admit([9], Sampling(temperature=2.0, seed=1))
    joined = {}
    for index in (2, 0, 1):
        joined[slots.admit(prompts[index], laws[index])] = (index, [])
        for out in slots.step():
            if out.handle in joined:
                joined[out.handle][1].extend(out.tokens)
    for handle in slots.live:
        slots.release(handle)
    expected = [alone(slots, prompt, law, 40) for prompt, law in zip(prompts, laws, strict=True)]
    for index, text in [*enumerate(together), *joined.values()]:
        assert text == expected[index][: len(text)]
    other = alone(slots, prompts[0], Sampling(temperature=1.0, seed=70), 30)
    assert other[: len(together[0])] != together[0]


def test_equal_requests_with_one_seed_say_the_same_and_with_two_do_not(slots):
    laws = [Sampling(temperature=1.5, seed=seed) for seed in (3, 3, 4)]
    same, again, other = run(slots, slots.admit_many([[5, 6]] * 3, laws), 8)
    assert same == again
    assert same != other


def test_a_request_fills_max_len_exactly(small, slots, is_greedy):
    prompts = [prompt_of(length, seed) for seed, length in enumerate((1, 59, 59, 59, 58, 57, 56, 55, 20, 58))]
    jobs = [Job(prompt=tuple(prompt), sampling=GREEDY, max_new_tokens=1000) for prompt in prompts]
    done = {completion.job.prompt: completion for completion in generate(slots, jobs)}
    texts = [done[tuple(prompt)].tokens for prompt in prompts]
    assert [len(prompt) + len(text) for prompt, text in zip(prompts, texts, strict=True)] == [MAX_LEN] * 10
    assert {completion.finish for completion in done.values()} == {"length"}
    assert is_greedy(small[0], prompts, texts)
