"""Slots: the host edge that owns the decode state on the device and keeps its shapes few.

The state always has the shape of a bucket, just large enough for what is live, so that a lone short request never
pays for a full batch or a long context. `generate` and the server both drive their rounds through this class.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.arrays import Array, DType
from dspark_jax.decoding.buckets import (
    insert,
    prefill_chunks,
    prefill_rows,
    regroup,
    request_keys,
    row_bucket,
    span_bucket,
)
from dspark_jax.decoding.round import DecodeState, RoundOutput, decode_round, init_state, prefill
from dspark_jax.decoding.scheduler import FixedLength, Policy
from dspark_jax.drafters.base import Drafter
from dspark_jax.ops.sampling import SamplingLaw
from dspark_jax.targets.model import Target

_PREFILL_TOKENS = 16_384
_ROUNDS_BEFORE_SHRINKING = 4


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The law one request asked for. Temperature 0 is greedy; top_k 0 and top_p 1 keep the whole vocabulary."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < float("inf") and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"sampling: needs temperature >= 0, top_k >= 0 and 0 < top_p <= 1, got {self}")


@dataclass(frozen=True, kw_only=True)
class SlotRound:
    """What one round gave one request: accepted drafts, then the bonus or resampled token."""

    handle: int
    tokens: tuple[int, ...]
    proposed: int
    verified: int
    accepted: int
    confidence: tuple[float, ...] = field(repr=False)


@dataclass
class _Live:
    handle: int
    length: int


class DecodeSlots:
    """Live requests and their decode state. Not thread-safe: one thread owns it.

    A request may hold at most `max_len` tokens, prompt included.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        max_batch: int,
        max_len: int,
        policy: Policy | None = None,
        dtype: DType = jnp.float32,
    ):
        self.max_batch, self.max_len, self.block_size = max_batch, max_len, drafter.block_size
        self._largest_span = max_len + drafter.block_size + 1
        self._rows: list[_Live | None] = []
        self._state: DecodeState | None = None
        self._handles = self._idle_rounds = 0
        policy = FixedLength() if policy is None else policy
        # Flattened once: walking a tree of modules costs more than a small model's round on an accelerator.
        self._target = target
        self._weights, treedef = jax.tree.flatten((target, drafter))

        def round_(weights: list[Array], state: DecodeState) -> tuple[DecodeState, RoundOutput]:
            return decode_round(*jax.tree.unflatten(treedef, weights), policy, state)

        def prefill_(weights: list[Array], state: DecodeState, window_BN: Array, start_B: Array, count_B: Array):
            models = jax.tree.unflatten(treedef, weights)
            return prefill(*models, state, window_BN[:, :-1], window_BN[:, 1:], start_B, count_B)

        self._round = jax.jit(round_, donate_argnums=1)
        self._prefill = jax.jit(prefill_, donate_argnums=1)
        self._regroup = jax.jit(regroup, static_argnums=2)
        self._insert = jax.jit(insert, donate_argnums=0)
        self._empty = jax.jit(
            lambda batch, span: init_state(target, drafter, batch, span, dtype), static_argnums=(0, 1)
        )

    @property
    def live(self) -> tuple[int, ...]:
        """Handles of live requests."""
        return tuple(row.handle for row in self._rows if row)

    @property
    def free(self) -> int:
        """How many more requests can be admitted."""
        return self.max_batch - len(self.live)

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
        handles, waiting = [], list(zip(prompts, samplings, strict=True))
        longest = max(map(len, prompts), default=0)
        self._fit(len(self.live) + len(prompts), max(self._positions(), longest + self.block_size))
        while waiting:
            longest = max(len(prompt) for prompt, _ in waiting)
            size = max(1, _PREFILL_TOKENS // longest)
            handles += self._admit_group(waiting[:size])
            waiting = waiting[size:]
        return handles

    def replace_drafter(self, drafter: Drafter) -> None:
        """Use other weights of a drafter built alike; nothing is compiled again.

        Raises ValueError while requests are live: their draft state came from the weights before.
        """
        if self.live:
            raise ValueError(f"slots: {len(self.live)} requests are live; release them before the drafter changes")
        self._weights = jax.tree.leaves((self._target, drafter))

    def release(self, handle: int) -> None:
        """Free a request's slot. An unknown handle is an error."""
        row = next((i for i, live in enumerate(self._rows) if live and live.handle == handle), None)
        if row is None:
            raise ValueError(f"slots: no live request has handle {handle}")
        self._rows[row] = None

    def step(self) -> list[SlotRound]:
        """One round for every live request, in the order of their slots."""
        if not self.live:
            return []
        self._fit(len(self.live), self._positions())
        self._state, out = self._round(self._weights, self._state)
        out = jax.device_get(out)
        rounds = []
        for row, live in enumerate(self._rows):
            if live is None:
                continue
            count = int(out.count_B[row])
            live.length += count
            rounds.append(
                SlotRound(
                    handle=live.handle,
                    tokens=tuple(out.tokens_BN[row, :count].tolist()),
                    proposed=self.block_size,
                    verified=int(out.verified_B[row]),
                    accepted=count - 1,
                    confidence=tuple(out.confidence_BK[row].tolist()),
                )
            )
        return rounds

    def warm_up(self) -> None:
        """Compile what serving needs first: every batch bucket at the smallest span, and its prefill."""
        rows = 1
        while True:
            rows = row_bucket(rows, self.max_batch)
            handles = [self.admit([0, 0], Sampling()) for _ in range(rows)]
            self.step()
            for handle in handles:
                self.release(handle)
            self._rows, self._state = [], None
            if rows == self.max_batch:
                return
            rows *= 2

    def _positions(self) -> int:
        """Positions the next round may write, over all live requests."""
        return max((live.length for live in self._rows if live), default=0) + self.block_size

    def _admit_group(self, requests: list[tuple[Sequence[int], Sampling]]) -> list[int]:
        prompts = [np.asarray(prompt, np.int32) for prompt, _ in requests]
        needed = max(self._positions(), max(map(len, prompts)) + self.block_size)
        span = self._fit(len(self.live) + len(requests), needed)
        group = self._prefilled(prompts, [sampling for _, sampling in requests], span)
        free = [row for row, live in enumerate(self._rows) if live is None][: len(requests)]
        size = group.anchor_B.shape[0]
        rows_G = np.asarray(free + [len(self._rows)] * (size - len(free)), np.int32)
        self._state = self._insert(self._state, group, rows_G)
        for row, prompt in zip(free, prompts, strict=True):
            self._rows[row] = _Live(handle=self._handles, length=len(prompt))
            self._handles += 1
        return [self._rows[row].handle for row in free]

    def _prefilled(self, prompts: list[np.ndarray], samplings: list[Sampling], span: int) -> DecodeState:
        """A state of these requests: everything before each anchor taken in, the anchor the prompt's last token."""
        size = prefill_rows(len(prompts))
        padding = size - len(prompts)
        prompts = prompts + [np.zeros(1, np.int32)] * padding
        samplings = samplings + [Sampling()] * padding
        state = self._empty(size, span)
        lengths = [len(prompt) - 1 for prompt in prompts]
        for start_B, chunk in prefill_chunks(lengths, span):
            window_BN = np.zeros((size, chunk + 1), np.int32)
            for row, (prompt, start) in enumerate(zip(prompts, start_B, strict=True)):
                piece = prompt[start : start + chunk + 1]
                window_BN[row, : len(piece)] = piece
            count_B = np.minimum(np.asarray(lengths, np.int32) - start_B, chunk)
            state = self._prefill(self._weights, state, window_BN, start_B, count_B)
        return state.replace(
            anchor_B=jnp.asarray([prompt[-1] for prompt in prompts], jnp.int32),
            position_B=jnp.asarray(lengths, jnp.int32),
            law=SamplingLaw(
                temperature_B=jnp.asarray([s.temperature for s in samplings], jnp.float32),
                top_k_B=jnp.asarray([s.top_k for s in samplings], jnp.int32),
                top_p_B=jnp.asarray([s.top_p for s in samplings], jnp.float32),
                keys_B=request_keys([s.seed for s in samplings]),
            ),
        )

    def _fit(self, requests: int, positions: int) -> int:
        """Give the state the bucket for so many requests and positions; its span.

        Growing is immediate; shrinking waits a few rounds, so that a slot freed and filled again costs nothing.
        """
        rows, span = row_bucket(requests, self.max_batch), span_bucket(positions, self._largest_span)
        if self._state is None:
            self._state, self._rows = self._empty(rows, span), [None] * rows
            return span
        held_rows, held_span = len(self._rows), self._state.cache.keys[0].shape[2]
        oversized = rows < held_rows or span < held_span
        self._idle_rounds = self._idle_rounds + 1 if oversized else 0
        if self._idle_rounds <= _ROUNDS_BEFORE_SHRINKING:
            rows, span = max(rows, held_rows), max(span, held_span)
        if (rows, span) != (held_rows, held_span):
            kept = [row for row, live in enumerate(self._rows) if live]
            picked = np.asarray(kept + [0] * (rows - len(kept)), np.int32)
            self._state = self._regroup(self._state, picked, span)
            self._rows = [self._rows[row] for row in kept] + [None] * (rows - len(kept))
            self._idle_rounds = 0
        return span
