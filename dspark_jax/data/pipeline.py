"""Batches of tokenised conversations, in a seeded order that does not depend on the number of hosts.

Built on grain: integers are shuffled, repeated and sliced; rows are read only when their batch is due.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grain
import numpy as np
from jaxtyping import Bool, Int

from dspark_jax.core.arrays import Array
from dspark_jax.data.store import TokenStore
from dspark_jax.data.supervision import Supervised


class Batch(NamedTuple):
    """B padded rows. Padding is token 0 at and after length, never supervised; a row of padding only has length 0."""

    tokens_BT: Int[np.ndarray, "B T"] | Int[Array, "B T"]
    loss_mask_BT: Bool[np.ndarray, "B T"] | Bool[Array, "B T"]
    length_B: Int[np.ndarray, " B"] | Int[Array, " B"]


@dataclass(frozen=True, kw_only=True)
class PadTo:
    """Every batch is `length` long; longer rows are cut."""

    length: int


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Rows of `window` batches are sorted by length into batches, which are then shuffled: less padding.

    A batch is as long as the smallest of `lengths` that holds its longest row (one compilation each); rows longer
    than the last are cut. Every row is still used exactly once an epoch.
    """

    lengths: tuple[int, ...]
    window: int = 32

    def __post_init__(self) -> None:
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 1:
            raise ValueError(f"bucket lengths rise from at least 1, not {self.lengths}")
        if self.window < 1:
            raise ValueError(f"a window is at least one batch, not {self.window}")


Padding = PadTo | Buckets


@dataclass(frozen=True, kw_only=True)
class Host:
    """Which of the processes this is; each reads every count-th row of a batch."""

    index: int = 0
    count: int = 1


def training_batches(
    store: TokenStore,
    rows: np.ndarray,
    *,
    batch_size: int,
    padding: Padding,
    seed: int,
    epochs: int | None,
    host: Host = Host(),
) -> grain.MapDataset:
    """This host's share of each global batch: `batch_size / host.count` rows. Random access by step.

    Each epoch has its own order; None repeats for ever. Epochs follow each other without a break, and the rows that
    fill no last batch are left out, the same number of steps on every host. Its iterator
    (`iterate`) has get_state and set_state: restored, it goes on with the batch that was due.
    """
    if batch_size < 1 or batch_size % host.count:
        raise ValueError(f"a batch of {batch_size} rows does not divide over {host.count} hosts")
    if epochs is not None and len(rows) * epochs < batch_size:
        raise ValueError(f"{len(rows)} conversations in {epochs} epochs do not fill one batch of {batch_size}")
    order = grain.MapDataset.range(len(rows)).shuffle(seed=seed).repeat(epochs)
    order = order.batch(batch_size, drop_remainder=True, batch_fn=lambda picks: rows[np.asarray(picks)])
    if isinstance(padding, Buckets):
        order = grain.MapDataset.source(_SortedWindows(order, store.lengths, padding.window, seed))
    return order.map(lambda picks: _global_batch(store, picks, padding, host))


def evaluation_batches(
    store: TokenStore, rows: np.ndarray, *, batch_size: int, padding: Padding, host: Host = Host()
) -> grain.MapDataset:
    """Every row once, in order; the last batch is filled up with rows of length 0, so no row is lost and all hosts
    take the same number of steps."""
    if batch_size < 1 or batch_size % host.count:
        raise ValueError(f"a batch of {batch_size} rows does not divide over {host.count} hosts")
    filled = np.concatenate([rows, np.full(-len(rows) % batch_size, -1, rows.dtype)]).reshape(-1, batch_size)
    return grain.MapDataset.source(list(filled)).map(lambda picks: _global_batch(store, picks, padding, host))


def iterate(batches: grain.MapDataset, *, threads: int = 2) -> grain.DatasetIterator:
    """An iterator that reads a few batches ahead, with get_state() and set_state(state)."""
    reading = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(2, 2 * threads))
    return iter(batches.to_iter_dataset(reading))


def pad(rows: Sequence[Supervised], length: int) -> Batch:
    """The rows side by side, cut or padded at `length`."""
    tokens_BT = np.zeros((len(rows), length), np.int32)
    loss_mask_BT = np.zeros((len(rows), length), bool)
    length_B = np.zeros(len(rows), np.int32)
    for b, row in enumerate(rows):
        length_B[b] = size = min(len(row.tokens), length)
        tokens_BT[b, :size] = row.tokens[:size]
        loss_mask_BT[b, :size] = row.loss_mask[:size]
    return Batch(tokens_BT=tokens_BT, loss_mask_BT=loss_mask_BT, length_B=length_B)


_EMPTY = Supervised(tokens=np.zeros(0, np.int32), loss_mask=np.zeros(0, bool))


def _global_batch(store: TokenStore, picks: np.ndarray, padding: Padding, host: Host) -> Batch:
    """This host's rows of a global batch, padded to the length that all hosts agree on; -1 is a row of padding."""
    if isinstance(padding, PadTo):
        length = padding.length
    else:
        longest = max((store.lengths[pick] for pick in picks if pick >= 0), default=0)
        length = next((bucket for bucket in padding.lengths if bucket >= longest), padding.lengths[-1])
    return pad([store[pick] if pick >= 0 else _EMPTY for pick in picks[host.index :: host.count]], length)


class _SortedWindows:
    """Batches of `order` regrouped by length inside each window of consecutive batches, in a random batch order."""

    def __init__(self, order: grain.MapDataset, lengths: np.ndarray, window: int, seed: int):
        self._order, self._lengths, self._window, self._seed = order, lengths, window, seed
        self._cached: tuple[int, list[np.ndarray]] = (-1, [])

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> np.ndarray:
        number, within = divmod(index, self._window)
        cached, batches = self._cached
        if cached != number:
            batches = self._regroup(number)
            self._cached = (number, batches)
        return batches[within]

    def _regroup(self, number: int) -> list[np.ndarray]:
        first = number * self._window
        picks = np.asarray([self._order[step] for step in range(first, min(first + self._window, len(self)))])
        by_length = picks.ravel()[np.argsort(self._lengths[picks.ravel()], kind="stable")].reshape(picks.shape)
        return list(by_length[np.random.default_rng((self._seed, number)).permutation(len(picks))])
