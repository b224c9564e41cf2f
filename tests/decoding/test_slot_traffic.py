"""Slots under traffic: broken rows, rounds started ahead, random events, other drafters, other shapes."""

from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.scheduler import FixedLength
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


def test_a_broken_row_touches_no_other_and_its_slot_recovers(small, slots, is_greedy, alone):
    prompts = [prompt_of(length, seed=2) for length in (3, 5, 8)]
    broken, *others = slots.admit_many(prompts, [GREEDY, GREEDY, Sampling(temperature=0.8, seed=4)])
    row = next(i for i, live in enumerate(slots._rows) if live and live.handle == broken)
    state = slots._state
    poisoned = jax.tree.map(lambda x: x.at[row].set(jnp.nan), (state.cache, state.draft))
    slots._state = state.replace(cache=poisoned[0], draft=poisoned[1])
    texts = run(slots, others, 6)
    assert np.isnan(np.asarray(slots._state.cache.keys[0][row])).any()
    slots.release(broken)
    (fresh,) = run(slots, [slots.admit(prompts[0], GREEDY)], 3)
    for handle in slots.live:
        slots.release(handle)
    assert is_greedy(small[0], [prompts[1], prompts[0]], [texts[0], fresh])
    assert texts[1] == alone(slots, prompts[2], Sampling(temperature=0.8, seed=4), 30)[: len(texts[1])]


def test_rounds_started_ahead_are_the_rounds_of_waiting_ones(small, slots, is_greedy):
    """Requests are admitted and released while rounds fly; what a released one was given is dropped."""
    prompts = [prompt_of(length, seed=3) for length in (4, 7, 2)]
    first, second = slots.admit_many(prompts[:2], [GREEDY] * 2)
    texts = {first: [], second: []}
    flights = [slots.start(), slots.start()]
    slots.release(first)
    third = slots.admit(prompts[2], GREEDY)
    texts[third] = []
    flights.append(slots.start())
    for index, flight in enumerate(flights):
        outs = slots.finish(flight)
        assert {out.handle for out in outs} == ({second} if index < 2 else {second, third})
        for out in outs:
            texts[out.handle] += out.tokens
    for out in slots.step():
        texts[out.handle] += out.tokens
    assert len(texts[second]) >= 4
    assert is_greedy(small[0], prompts[1:], [texts[second], texts[third]])


def test_steps_ahead_say_the_same_a_step_later(slots, monkeypatch):
    prompts, texts = [prompt_of(length, seed=6) for length in (4, 7)], []
    for ahead in (0, 1):
        monkeypatch.setattr(slots, "_ahead", ahead)
        handles = slots.admit_many(prompts, [GREEDY, Sampling(temperature=0.8, seed=3)])
        rounds = [slots.step() for _ in range(5 + ahead)]
        assert rounds[:ahead] == [[]] * ahead
        texts.append([[out.tokens for step in rounds for out in step if out.handle == handle] for handle in handles])
        for handle in handles:
            slots.release(handle)
        # What was still flying gave nobody anything.
        assert slots.step() == []
    assert texts[0] == texts[1]
    assert len(texts[0][0]) == 5


def test_rounds_of_every_length_write_where_one_that_was_read_wrote(five, monkeypatch):
    """Memory that moves is told to every kernel of a CUDA graph."""
    slots, where = DecodeSlots(*five, max_batch=2, max_len=120, elastic=False, ahead=1), []
    start = slots.start

    def spied():
        flight = start()
        where.append(flight.out.words_BW.unsafe_buffer_pointer())
        return flight

    monkeypatch.setattr(slots, "start", spied)
    slots.admit_many([[1, 2], [3, 4]], [Sampling(seed=1), Sampling(temperature=1.0, seed=2)])
    for round_ in range(12):
        slots.follow(slots.planner(FixedLength(length=round_ % 3)))
        slots.step()
    assert len(set(where)) == 2, "one round is read while another runs"
    assert where == where[:2] * 6


def test_nothing_to_start_is_an_error(slots):
    with pytest.raises(ValueError, match="no live request"):
        slots.start()


def compiled(slots):
    return slots.programs.compiled_rounds


def test_d_35_random_traffic_keeps_every_invariant_and_compiles_no_round(small, slots, is_greedy, alone):
    """Admissions, aborts and rounds at random: state and books agree after each, texts are right at the end."""
    rng = np.random.default_rng(0)
    before = compiled(slots)
    live, finished = {}, []
    for _ in range(300):
        action = rng.random()
        if action < 0.25 and slots.free:
            count = int(rng.integers(1, slots.free + 1))
            prompts = [rng.integers(0, 16, rng.integers(1, 30)).tolist() for _ in range(count)]
            laws = [
                GREEDY if rng.random() < 0.6 else Sampling(temperature=0.9, top_p=0.9, seed=int(rng.integers(1 << 40)))
                for _ in range(count)
            ]
            for handle, prompt, law in zip(slots.admit_many(prompts, laws), prompts, laws, strict=True):
                live[handle] = (prompt, law, [])
        elif action < 0.35 and live:
            handle = int(rng.choice(list(live)))
            slots.release(handle)
            finished.append(live.pop(handle))
        else:
            for out in slots.step():
                live[out.handle][2].extend(out.tokens)
            for handle in [h for h, (prompt, _, text) in live.items() if len(prompt) + len(text) >= MAX_LEN - 4]:
                slots.release(handle)
                finished.append(live.pop(handle))
        assert set(slots.live) == set(live)
        assert slots.free + len(live) == 8
        rows = {row.handle: index for index, row in enumerate(slots._rows) if row}
        assert set(rows) == set(live)
        for handle, (prompt, _, text) in live.items():
            assert slots._state.position_B[rows[handle]] == len(prompt) + len(text) - 1
            assert slots._state.anchor_B[rows[handle]] == [*prompt, *text][-1]
    assert compiled(slots) == before
    for handle in slots.live:
        slots.release(handle)
    greedy = [(prompt, text) for prompt, law, text in finished if law == GREEDY][:64]
    assert len(greedy) > 20
    assert is_greedy(small[0], *zip(*greedy, strict=True))
    sampled = [(prompt, law, text) for prompt, law, text in finished if law != GREEDY and text]
    assert len(sampled) > 10
    for prompt, law, text in sampled:
        assert alone(slots, prompt, law, len(text)) == text


def test_traffic_seen_before_compiles_nothing(slots):
    """Groups of 1 to 8, short and longer prompts, states that grow and shrink: the second time all shapes are known."""
    programs = [getattr(slots.programs, name) for name in ("_prefill", "insert", "regroup", "empty")]
    counts = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        for group in (1, 8, 3, 1, 5, 2):
            prompts = [rng.integers(0, 16, length).tolist() for length in (40, 1, 9, 2, 20, 5, 3, 30)[:group]]
            handles = slots.admit_many(prompts, [Sampling(temperature=float(rng.random()))] * group)
            for _ in range(2):
                slots.step()
            for handle in handles[1:]:
                slots.release(handle)
            for _ in range(6):
                slots.step()
            slots.release(handles[0])
        counts.append([compiled(slots), *(program._cache_size() for program in programs)])
    assert counts[0] == counts[1] == counts[2]


def test_a_replaced_drafter_changes_speed_and_not_text(small, warm, is_greedy, alone):
    target, drafter = small
    prompt = tuple(prompt_of(6, seed=5))
    before = alone(warm, prompt, GREEDY, 40)
    compilations = compiled(warm)
    handle = warm.admit(prompt, GREEDY)
    with pytest.raises(ValueError, match="1 requests are live"):
        warm.replace_drafter(drafter)
    outs = [out for _ in range(6) for out in warm.step()]
    warm.release(handle)
    warm.replace_drafter(jax.tree.map(lambda leaf: leaf * 0.5, drafter))
    handle = warm.admit(prompt, GREEDY)
    others = [out for _ in range(6) for out in warm.step()]
    warm.release(handle)
    assert outs[0].confidence.tolist() != others[0].confidence.tolist()
    assert alone(warm, prompt, GREEDY, 40) == before
    assert is_greedy(target, [prompt], [before])
    warm.replace_drafter(drafter)
    assert compiled(warm) == compilations


def test_a_drafter_is_told_every_committed_token_at_its_place(five, recorder):
    """By a prefill of rows of different lengths, one too long for one pass, and by partly accepted rounds."""
    slots = DecodeSlots(five[0], recorder, max_batch=4, max_len=600, elastic=False)
    prompts = [np.random.default_rng(i).integers(0, 5, length).tolist() for i, length in enumerate((540, 40, 1, 7))]
    laws = [Sampling(temperature=1.0, seed=seed) for seed in range(4)]
    texts = dict(zip(slots.admit_many(prompts, laws), map(list, prompts), strict=True))
    accepted = set()
    for _ in range(9):
        told = np.asarray(slots._state.draft.keys[0])[:, 0, :, 0]
        for row, text in enumerate(texts.values()):
            assert told[row, : len(text) - 1].tolist() == text[1:]
            assert (told[row, len(text) - 1 :] == -1).all()
        for out in slots.step():
            texts[out.handle] += out.tokens
            accepted.add(out.accepted)
    assert accepted >= {0, 1}


def test_growing_and_shrinking_keeps_every_text(five, is_greedy):
    target, drafter = five
    slots = DecodeSlots(target, drafter, max_batch=2, max_len=600)
    shapes = []

    def shape():
        return slots._state.position_B.shape[0], slots._state.cache.keys[0].shape[2]

    def step(rounds):
        for _ in range(rounds):
            for out in slots.step():
                texts[out.handle] += out.tokens
            shapes.append(shape())

    prompts = [np.random.default_rng(i).integers(0, 5, length).tolist() for i, length in enumerate((249, 3, 300))]
    long = slots.admit(prompts[0], GREEDY)
    texts = {long: []}
    # Rounds in flight count as fully accepted: the third may reach position 257.
    flights = []
    for _ in range(3):
        flights.append(slots.start())
        shapes.append(shape())
    assert shapes == [(1, 256), (1, 256), (1, 512)]
    texts[long] = [token for flight in flights for out in slots.finish(flight) for token in out.tokens]
    step(6)
    short = slots.admit(prompts[1], GREEDY)
    texts[short] = []
    step(2)
    slots.release(long)
    step(8)
    longest = slots.admit(prompts[2], GREEDY)
    texts[longest] = []
    step(2)
    assert [shape for shape, _ in groupby(shapes)] == [(1, 256), (1, 512), (2, 512), (1, 256), (2, 512)]
    assert len(texts[long]) > 256 - 249
    assert is_greedy(target, prompts, texts.values(), length=320)


def test_programs_without_branches_say_the_same(five, alone):
    """What an accelerator compiles, a program for each kind of law, against the one a CPU compiles."""
    laws = [GREEDY, Sampling(temperature=0.9, seed=1), Sampling(temperature=0.9, top_k=3, seed=2)]
    slots = DecodeSlots(*five, max_batch=1, max_len=40)
    slots.programs.branch_free = False
    expected = [alone(slots, (1, 2), law, 30) for law in laws]
    assert compiled(slots) == 1
    slots.programs.branch_free = True
    assert [alone(slots, (1, 2), law, 30) for law in laws] == expected
    assert compiled(slots) == 4
