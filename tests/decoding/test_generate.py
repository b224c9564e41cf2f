"""Continuous batching over scripted slots: budgets, stops, order, and slots that are always given back."""

from collections import deque
from dataclasses import dataclass, field

import pytest

from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.slots import DecodeSlots, Sampling, SlotRound
from dspark_jax.decoding.stats import DecodeStats

GREEDY = Sampling()


@dataclass
class Scripted(DecodeSlots):
    """Slots whose requests count upwards from their prompt's last token, `burst` tokens a round."""

    max_batch: int = 2
    max_len: int = 100
    burst: int = 3
    ahead: int = 1
    running: dict[int, int] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.block_size, self.planned, self.read = 4, [], 0
        self._flights, self._ahead = deque(), self.ahead

    @property
    def _row_of(self):
        return self.running

    @property
    def flying(self):
        return len(self._flights)

    @property
    def live(self):
        return tuple(self.running)

    @property
    def free(self):
        return self.max_batch - len(self.running)

    def admit_many(self, prompts, samplings):
        assert len(prompts) == len(samplings) <= self.free
        if any(len(prompt) >= self.max_len for prompt in prompts):
            raise ValueError("too long")
        handles = [len(self.admitted) + i for i in range(len(prompts))]
        self.running |= {handle: prompt[-1] for handle, prompt in zip(handles, prompts, strict=True)}
        self.admitted += [len(prompt) for prompt in prompts]
        return handles

    def release(self, handle):
        del self.running[handle]
        self.released.append(handle)

    def start(self):
        """A round; as on a device, its outcome is settled before anybody reads it."""
        rounds = []
        for handle, last in self.running.items():
            self.running[handle] = last + self.burst
            rounds.append(
                SlotRound(
                    handle=handle,
                    tokens=tuple(range(last + 1, last + 1 + self.burst)),
                    proposed=4,
                    verified=self.burst,
                    accepted=self.burst - 1,
                    confidence=(1.0,) * 4,
                    evidence=(),
                )
            )
        self.planned.append(self.read)
        return rounds

    def finish(self, flight):
        self.read += 1
        return [out for out in flight if out.handle in self.running]


def job(start, budget, stop=(), **fields):
    return Job(prompt=(0, start), sampling=GREEDY, max_new_tokens=budget, stop_ids=frozenset(stop), **fields)


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 7])
def test_a_budget_cuts_inside_a_round(budget):
    (done,) = generate(Scripted(), [job(10, budget)])
    assert done.tokens == tuple(range(11, 11 + budget))
    assert done.finish == "length"
    rounds = -(-budget // 3)
    assert done.stats == DecodeStats(rounds=rounds, proposed=4 * rounds, verified=3 * rounds, accepted=2 * rounds)


@pytest.mark.parametrize("stop", [11, 12, 13, 14, 17])
def test_a_stop_id_ends_the_text_before_itself_wherever_it_falls_in_a_round(stop):
    (done,) = generate(Scripted(), [job(10, 50, stop=(stop, 999))])
    assert done.tokens == tuple(range(11, stop))
    assert done.finish == "stop"


def test_a_stop_id_on_the_last_budgeted_token_is_a_stop():
    (done,) = generate(Scripted(), [job(10, 3, stop=(13,))])
    assert (done.tokens, done.finish) == ((11, 12), "stop")


def test_the_slots_length_is_a_budget_too():
    (done,) = generate(Scripted(max_len=7), [job(10, 50)])
    assert (done.tokens, done.finish) == ((11, 12, 13, 14, 15), "length")


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("max_batch", [1, 3, 16])
def test_every_job_is_completed_once_and_every_slot_given_back(max_batch, ahead):
    slots = Scripted(max_batch=max_batch, ahead=ahead)
    jobs = [job(100 * i, 1 + i * 5 % 11, tag=i) for i in range(20)]
    done = list(generate(slots, jobs))
    assert sorted(completion.job.tag for completion in done) == list(range(20))
    for completion in done:
        first = completion.job.prompt[-1] + 1
        assert completion.tokens == tuple(range(first, first + completion.job.max_new_tokens))
    assert (slots.free, slots.flying) == (max_batch, 0)
    assert sorted(slots.released) == list(range(20))


def test_an_observer_is_told_every_round_up_to_the_one_that_ends_the_job():
    told = []
    done = list(generate(Scripted(), [job(0, 7, tag="a"), job(50, 4, tag="b")], lambda *both: told.append(both)))
    for completion in done:
        rounds = [out for which, out in told if which is completion.job]
        assert len(rounds) == completion.stats.rounds
        tokens = [token for out in rounds for token in out.tokens]
        assert tuple(tokens[: len(completion.tokens)]) == completion.tokens


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_round_is_planned_when_all_but_the_slots_own_rounds_ahead_are_read(ahead):
    slots = Scripted(ahead=ahead)
    list(generate(slots, [job(0, 12)]))
    assert slots.planned[:4] == [max(0, round_ - ahead) for round_ in range(4)]


def test_short_jobs_overtake_long_ones():
    done = generate(Scripted(), [job(0, 30, tag="long"), job(0, 1, tag="short"), job(0, 1, tag="next")])
    assert [completion.job.tag for completion in done] == ["short", "next", "long"]


def test_jobs_are_drawn_only_when_a_slot_is_free():
    slots, drawn = Scripted(), []

    def endless():
        for i in range(1_000_000):
            drawn.append(i)
            yield job(i, 3)

    completions = generate(slots, endless())
    assert drawn == []
    for _ in range(5):
        next(completions)
        assert len(drawn) <= len(slots.released) + slots.max_batch
    completions.close()
    assert slots.free == slots.max_batch


def test_closing_early_releases_every_slot():
    slots = Scripted(max_batch=4)
    completions = generate(slots, [job(0, 50), job(0, 1), job(0, 50), job(0, 50)])
    next(completions)
    assert slots.free == 1
    completions.close()
    assert (slots.free, slots.flying) == (4, 0)


def test_a_job_that_cannot_be_held_raises_and_releases_the_others():
    slots = Scripted(max_batch=1, max_len=5)
    completions = generate(slots, [job(0, 1), Job(prompt=(1,) * 5, sampling=GREEDY, max_new_tokens=1)])
    next(completions)
    with pytest.raises(ValueError, match="too long"):
        next(completions)
    assert (slots.free, slots.flying) == (1, 0)


def test_no_jobs_no_completions():
    assert list(generate(Scripted(), [])) == []


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_holds_at_least_one_token(budget):
    with pytest.raises(ValueError, match="max_new_tokens"):
        job(10, budget)
