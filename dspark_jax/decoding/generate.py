"""Offline generation: continuous batching of many prompts through one set of slots."""

from collections.abc import Iterable, Iterator
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
    stats: DecodeStats = field(default_factory=DecodeStats)


def generate(slots: DecodeSlots, jobs: Iterable[Job]) -> Iterator[Completion]:
    """Completions in the order in which they finish. Jobs are drawn as slots become free.

    Free slots are refilled an eighth of the batch at a time, since requests prefill faster together. Raises
    ValueError for a job the slots cannot hold. Slots are released when the iterator is closed early.
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
                completion = _advance(running[out.handle], out)
                if completion:
                    del running[out.handle]
                    slots.release(out.handle)
                    yield completion
    finally:
        for handle in running:
            slots.release(handle)


def _advance(run: _Running, out: SlotRound) -> Completion | None:
    run.stats += DecodeStats(rounds=1, proposed=out.proposed, verified=out.verified, accepted=out.accepted)
    for token in out.tokens:
        if token in run.job.stop_ids:
            return Completion(job=run.job, tokens=tuple(run.tokens), finish="stop", stats=run.stats)
        run.tokens.append(token)
        if len(run.tokens) >= run.budget:
            return Completion(job=run.job, tokens=tuple(run.tokens), finish="length", stats=run.stats)
    return None
