"""Offline generation: continuous batching of many prompts through one set of slots."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from dspark_jax.decoding.slots import DecodeSlots, Sampling, SlotRound
from dspark_jax.decoding.stats import DecodeStats


@dataclass(frozen=True, kw_only=True)
class Job:
    """One prompt to continue. Generation ends at a stop id or after max_new_tokens (or when the slots' max_len is
    reached). `tag` is the caller's own."""

    prompt: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    tag: Any = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"job: max_new_tokens must be at least 1, got {self.max_new_tokens}")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a job gave; `tokens` without the stop id that ended it."""

    job: Job
    tokens: tuple[int, ...]
    finish: Literal["stop", "length"]
    stats: DecodeStats


@dataclass
class _Running:
    job: Job
    budget: int
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    proposed: int = 0
    verified: int = 0
    accepted: int = 0


def generate(
    slots: DecodeSlots, jobs: Iterable[Job], observe: Callable[[Job, SlotRound], None] | None = None
) -> Iterator[Completion]:
    """Completions in the order in which they finish. Jobs are drawn as slots become free.

    Free slots are refilled an eighth of the batch at a time, since requests prefill faster together. Where the slots
    keep rounds on the device while the host reads the one before, a request that turns out to be finished rides along
    in these and what that gives is dropped. `observe` is told every round of every job, the one that ends it included.
    Raises ValueError for a job the slots cannot hold. Slots are released when the iterator is closed early.
    """
    waiting = iter(jobs)
    running: dict[int, _Running] = {}
    refill = max(1, slots.max_batch // 8)
    try:
        while True:
            if slots.free >= refill or not running:
                batch = list(islice(waiting, slots.free))
                handles = slots.admit_many([job.prompt for job in batch], [job.sampling for job in batch])
                for handle, job in zip(handles, batch, strict=True):
                    room = slots.max_len - len(job.prompt)
                    running[handle] = _Running(job=job, budget=min(job.max_new_tokens, room))
            if not running:
                return
            for out in slots.step():
                if observe is not None:
                    observe(running[out.handle].job, out)
                completion = _advance(running[out.handle], out)
                if completion:
                    del running[out.handle]
                    slots.release(out.handle)
                    yield completion
    finally:
        slots.drain()
        for handle in running:
            slots.release(handle)


def _advance(run: _Running, out: SlotRound) -> Completion | None:
    run.rounds += 1
    run.proposed += out.proposed
    run.verified += out.verified
    run.accepted += out.accepted
    for token in out.tokens:
        if token in run.job.stop_ids:
            return _completion(run, "stop")
        run.tokens.append(token)
        if len(run.tokens) >= run.budget:
            return _completion(run, "length")
    return None


def _completion(run: _Running, finish: Literal["stop", "length"]) -> Completion:
    stats = DecodeStats(rounds=run.rounds, proposed=run.proposed, verified=run.verified, accepted=run.accepted)
    return Completion(job=run.job, tokens=tuple(run.tokens), finish=finish, stats=stats)
