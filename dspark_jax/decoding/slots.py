"""Slots: the host edge that owns the decode state on the device and keeps its shapes few.

The state always has the shape of a bucket, just large enough for what is live, so that a lone short request never
pays for a full batch or a long context. `generate` and the server both drive their rounds through this class.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.arrays import DType
from dspark_jax.decoding.admission import Sampling, known_draws, prefilled
from dspark_jax.decoding.buckets import row_bucket, span_bucket, whole_span
from dspark_jax.decoding.confidence import Estimator
from dspark_jax.decoding.flight import Flight, Live, SlotRound, slot_rounds
from dspark_jax.decoding.guides import Guides
from dspark_jax.decoding.outlook import Outlooks
from dspark_jax.decoding.planner import Planner
from dspark_jax.decoding.profile import StepCurve
from dspark_jax.decoding.programs import Programs, RoundShape
from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.round import DecodeState
from dspark_jax.decoding.scheduler import FixedLength, Guide, Policy
from dspark_jax.drafters.base import Drafter
from dspark_jax.ops.sampling import Draws
from dspark_jax.targets.model import Target

_PREFILL_GROUP = 32
_ROUNDS_BEFORE_SHRINKING = 4


class DecodeSlots:
    """Live requests and their decode state. Not thread-safe: one thread owns it.

    A request may hold at most `max_len` tokens, prompt included. With `elastic` the state follows what is live;
    without, it has the full batch and span from the start, which offline work on an accelerator prefers: there a
    compiled program costs more than the rows it saves. `curve` is what EarlyStop and TwoStep decide by. `ahead`: rounds
    that `step` keeps on the device while the host reads the one before, by default one, and none on a CPU, where the
    two would share the cores; a request's last round is then followed by as many that give it nothing. `watch` hears,
    while `warm_up` compiles, how many rounds are done, of how many.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        max_batch: int,
        max_len: int,
        policy: Policy | None = None,
        curve: StepCurve | None = None,
        estimator: Estimator | None = None,
        rule: Rule = Rule.TOKEN,
        dtype: DType = jnp.float32,
        elastic: bool = True,
        ahead: int | None = None,
        watch: Callable[[int, int], None] = lambda done, total: None,
    ):
        self.max_batch, self.max_len, self.block_size = max_batch, max_len, drafter.block_size
        # One at a time a request prefills by programs that warm_up compiled; together they prefill faster.
        self._elastic, self._group = elastic, 1 if elastic else min(_PREFILL_GROUP, max_batch)
        self._largest_span = whole_span(max_len, drafter.block_size)
        self._rows: list[Live | None] = []
        self._outlooks = Outlooks.empty(0, self.block_size)
        self._row_of: dict[int, int] = {}
        self._state: DecodeState | None = None
        self._handles = self._idle_rounds = 0
        self._rule, self._watch = rule, watch
        self.programs = Programs(target, drafter, dtype=dtype)
        self._ahead = int(self.programs.branch_free) if ahead is None else ahead
        self._flights = deque[Flight]()
        self.follow(self.planner(policy or FixedLength(), curve=curve), estimator)

    @property
    def live(self) -> tuple[int, ...]:
        """Handles of live requests."""
        return tuple(self._row_of)

    @property
    def free(self) -> int:
        """How many more requests can be admitted."""
        return self.max_batch - len(self._row_of)

    def admit(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Prefill one request; its handle. See `admit_many`."""
        return self.admit_many([prompt], [sampling])[0]

    def admit_many(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[int]:
        """Prefill requests together; a handle each. Their first tokens come with the next `step`.

        Raises ValueError, admitting none, for an empty or over-long prompt or when fewer slots are free.
        """
        if len(prompts) > self.free:
            raise ValueError(f"slots: {len(prompts)} requests for {self.free} free slots of {self.max_batch}")
        for prompt in prompts:
            if not 0 < len(prompt) < self.max_len:
                raise ValueError(f"slots: a prompt holds 1 to {self.max_len - 1} tokens here, got {len(prompt)}")
        if not prompts:
            return []
        handles, waiting = [], list(zip(prompts, samplings, strict=True))
        longest = max(map(len, prompts))
        self._fit(len(self._row_of) + len(prompts), max(self._positions(), longest + self.block_size))
        while waiting:
            handles += self._admit_group(waiting[: self._group])
            waiting = waiting[self._group :]
        return handles

    def planner(self, policy: Policy, *, curve: StepCurve | None = None) -> Planner:
        """One that decides by this policy for these slots."""
        return Planner(
            policy,
            block=self.block_size,
            curve=curve,
            rule=self._rule,
            switches=self.programs.switches,
            ahead=self._ahead,
        )

    def follow(self, planner: Planner, estimator: Estimator | None = None) -> None:
        """Go by this planner, which keeps what it learned of requests, from the next round on; its programs compile as
        they come up."""
        self._planner = planner
        self.estimator = estimator or Estimator.raw(self.block_size)

    def replace_drafter(self, drafter: Drafter) -> None:
        """Use other weights of a drafter built alike; nothing is compiled again.

        Raises ValueError while requests are live: their draft state came from the weights before.
        """
        if self.live:
            raise ValueError(f"slots: {len(self.live)} requests are live; release them before the drafter changes")
        self.programs.replace_drafter(drafter)

    @property
    def estimator(self) -> Estimator:
        """Where confidences come from. Another one that reads the same features compiles nothing again."""
        return self._guides.estimator

    @estimator.setter
    def estimator(self, estimator: Estimator) -> None:
        self._guides = Guides(self._planner, estimator)

    def release(self, handle: int) -> None:
        """Free a request's slot. An unknown handle is an error."""
        if handle not in self._row_of:
            raise ValueError(f"slots: no live request has handle {handle}")
        row = self._row_of.pop(handle)
        self._rows[row] = None
        self._outlooks.leave(row)
        self._guides.changed()

    def step(self) -> list[SlotRound]:
        """One round for every live request: what it gave, or with `ahead` what the round so many before gave."""
        if self._row_of:
            self._flights.append(self.start())
        waits = len(self._flights) > self._ahead or not self._row_of
        return self.finish(self._flights.popleft()) if waits and self._flights else []

    def drain(self) -> list[SlotRound]:
        """What the rounds that `step` left on the device gave."""
        return [out for _ in range(len(self._flights)) for out in self.finish(self._flights.popleft())]

    def start(self) -> Flight:
        """Send one round for every live request to the device, without waiting for it.

        Rounds may be started ahead of `finish`: the host then works while the device does. What is admitted or
        released in between takes part from the next `start` on.
        """
        span = self._fit(len(self._row_of), self._positions())
        riders = tuple((row, live) for row, live in enumerate(self._rows) if live)
        if not riders:
            raise ValueError("slots: there is no live request to run a round for")
        for _, live in riders:
            live.in_flight += 1
        assert self._state is not None
        plan = self._planner.plan(span, self._outlooks)
        guide = self._guides.of(self._outlooks, span)
        self._state, out = self.programs.round(
            plan, self._state, guide, self._draws([live.sampling for _, live in riders])
        )
        return Flight(out=out, rows=riders, span=span, held_rows=len(self._rows), watched=self._planner.watches)

    def finish(self, flight: Flight) -> list[SlotRound]:
        """What a started round gave the requests that are still live. Flights are finished in order."""
        out = flight.read()
        staying = [(row, live) for row, live in flight.rows if live.handle in self._row_of]
        if flight.watched:
            confidence_RK = out.confidence_BK[[row for row, _ in staying]]
            # Since the round started its requests may have moved.
            now = [self._row_of[live.handle] for _, live in staying]
            self._planner.learn(self._outlooks, now, confidence_RK, flight.held_rows, flight.span)
        return slot_rounds(out, staying)

    def warm_up(self) -> None:
        """Compile what serving needs first: every batch bucket at the smallest span, and the shortest prefill.

        Longer contexts and prompts compile when the first of them comes.
        """
        buckets = sorted({row_bucket(rows, self.max_batch) for rows in range(1, self.max_batch + 1)})
        if not self._elastic:
            buckets = [self.max_batch]
        prompt = (0, 0)
        span = span_bucket(len(prompt) + self.block_size, self._largest_span)
        span = span if self._elastic else self._largest_span
        self.programs.compile_rounds(self.rounds_of([(rows, span) for rows in buckets]), self._watch)
        for rows in buckets:
            handles = [self.admit(prompt, Sampling()) for _ in range(rows)]
            # Read past the planner: what it would learn of such prompts is nothing to go by.
            self.start().read()
            for handle in handles:
                self.release(handle)
            self._rows, self._state, self._outlooks = [], None, Outlooks.empty(0, self.block_size)

    def rounds_of(self, states: Sequence[tuple[int, int]]) -> list[tuple[RoundShape, Guide]]:
        """What this policy may run in states of these (rows, span), for `programs.compile_rounds`."""
        return [
            (RoundShape(plan, rows, span, draws), self._guides.empty(rows, span))
            for rows, span in states
            for plan, draws in product(self._planner.plans(rows), self.programs.usual_draws)
        ]

    def wait(self) -> None:
        """Until the device has done all it was given."""
        jax.block_until_ready(self._state)

    def _draws(self, laws: Sequence[Sampling]) -> Draws:
        return known_draws(laws) if self.programs.branch_free else Draws.ANY

    def _positions(self) -> int:
        """Positions the next round may write, over all live requests; rounds in flight count as fully accepted."""
        ahead = self.block_size + 1
        lengths = (live.length + live.in_flight * ahead for live in self._rows if live)
        return max(lengths, default=0) + self.block_size

    def _admit_group(self, requests: list[tuple[Sequence[int], Sampling]]) -> list[int]:
        prompts = [np.asarray(prompt, np.int32) for prompt, _ in requests]
        needed = max(self._positions(), max(map(len, prompts)) + self.block_size)
        span = self._fit(len(self._row_of) + len(requests), needed)
        group = prefilled(self.programs, prompts, [sampling for _, sampling in requests], size=self._group, span=span)
        free = [row for row, live in enumerate(self._rows) if live is None][: len(requests)]
        size = group.anchor_B.shape[0]
        rows_G = np.asarray(free + [len(self._rows)] * (size - len(free)), np.int32)
        self._state = self.programs.insert(self._state, group, rows_G)
        self._guides.changed()
        for row, prompt, (_, sampling) in zip(free, prompts, requests, strict=True):
            self._rows[row] = Live(
                handle=self._handles,
                sampling=sampling,
                length=len(prompt),
            )
            self._outlooks.enter(row, pinned=sampling.pinned)
            self._row_of[self._handles] = row
            self._handles += 1
        return list(range(self._handles - len(free), self._handles))

    def _fit(self, requests: int, positions: int) -> int:
        """Give the state the bucket for so many requests and positions; its span.

        Growing is immediate; shrinking waits a few rounds, so that a slot freed and filled again costs nothing.
        """
        rows, span = row_bucket(requests, self.max_batch), span_bucket(positions, self._largest_span)
        if not self._elastic:
            rows, span = self.max_batch, self._largest_span
        if self._state is None:
            self._state = self.programs.empty(rows, span)
            self._rows = [None for _ in range(rows)]
            self._outlooks = Outlooks.empty(rows, self.block_size)
            return span
        held_rows, held_span = len(self._rows), self._state.cache.span
        oversized = rows < held_rows or span < held_span
        self._idle_rounds = self._idle_rounds + 1 if oversized else 0
        if self._idle_rounds <= _ROUNDS_BEFORE_SHRINKING:
            rows, span = max(rows, held_rows), max(span, held_span)
        if (rows, span) != (held_rows, held_span):
            kept = [row for row, live in enumerate(self._rows) if live]
            picked = np.asarray(kept + [0] * (rows - len(kept)), np.int32)
            self._state = self.programs.regroup(self._state, picked, span)
            self._rows = [self._rows[row] for row in kept] + [None] * (rows - len(kept))
            self._outlooks = self._outlooks.moved(kept, rows)
            self._row_of = {live.handle: row for row, live in enumerate(self._rows) if live}
            self._idle_rounds = 0
            self._guides.changed()
        return span
