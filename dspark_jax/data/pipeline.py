"""Batches of tokenised conversations, in a seeded order that does not depend on the number of hosts.

Built on grain: integers are shuffled, repeated and sliced; rows are read only when their batch is due.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import grain
import numpy as np
from jaxtyping import Bool, Int

from dspark_jax.core.arrays import Array
from dspark_jax.data.packing import Packs, alone, first_fit
from dspark_jax.data.supervision import Supervised


@runtime_checkable
class Rows(Protocol):
    """What batches are made of: rows of a known number of tokens, each of one or more documents."""

    @property
    def lengths(self) -> np.ndarray: ...

    def documents(self, row: int | np.integer) -> list[Supervised]: ...


class Batch(NamedTuple):
    """B rows of documents, one after the other, then padding: token 0, never supervised.

    Segments number a row's documents 1, 2, ..; padding is 0.
    """

    tokens_BT: Int[np.ndarray, "B T"] | Int[Array, "B T"]
    loss_mask_BT: Bool[np.ndarray, "B T"] | Bool[Array, "B T"]
    segments_BT: Int[np.ndarray, "B T"] | Int[Array, "B T"]
    rows_B: Int[np.ndarray, "B"] | Int[Array, "B"] | None = None
    """The rows' numbers, where they were asked for: the same rows have them in every epoch; -1 is padding."""


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


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Every batch is `length` long, and its rows hold as many conversations as fit; longer ones are cut.

    Which conversations share a row is decided once, first-fit in a seeded order; epochs differ in the order of rows.
    """

    length: int


Padding = PadTo | Buckets | Packed


@dataclass(frozen=True, kw_only=True)
class Host:
    """Which of the processes this is; each reads its share of a batch, in the order of the processes."""

    index: int = 0
    count: int = 1


def training_batches(
    store: Rows,
    rows: np.ndarray,
    *,
    batch_size: int,
    padding: Padding,
    seed: int,
    epochs: int | None,
    host: Host = Host(),
    numbered: bool = False,
) -> grain.MapDataset:
    """This host's share of each global batch: `batch_size / host.count` rows. Random access by step.

    Each epoch has its own order; None repeats for ever. Epochs follow each other without a break, and the rows that
    fill no last batch are left out, the same number of steps on every host. Its iterator
    (`iterate`) has get_state and set_state: restored, it goes on with the batch that was due.
    """
    if batch_size < 1 or batch_size % host.count:
        raise ValueError(f"a batch of {batch_size} rows does not divide over {host.count} hosts")
    packs = numbered_rows(store, rows, padding=padding, seed=seed)
    if epochs is not None and len(packs) * epochs < batch_size:
        raise ValueError(
            f"{len(rows)} conversations make {len(packs)} rows, which in {epochs} epochs do not fill one batch of "
            f"{batch_size}"
        )
    order = _order(len(packs), batch_size, seed, epochs)
    if isinstance(padding, Buckets):
        order = grain.MapDataset.source(_SortedWindows(order, store.lengths[rows], padding.window, seed))
    return order.map(lambda picks: _global_batch(store, packs, picks, padding, host, numbered))


def numbered_rows(store: Rows, rows: np.ndarray, *, padding: Padding, seed: int) -> Packs:
    """The rows of `training_batches` by their numbers."""
    # Conversations that lie side by side in a file may be alike.
    mixed = np.random.default_rng(seed).permutation(rows) if isinstance(padding, Packed) else rows
    return _packs(store, mixed, padding)


def numbered_batches(
    store: Rows, packs: Packs, numbers: Sequence[int], *, batch_size: int, batches: int, padding: Padding
) -> grain.MapDataset:
    """These of the numbered rows in so many batches, of which the last ones may be padding."""
    picks = np.full((batches, batch_size), -1, np.int64)
    picks.flat[: len(numbers)] = numbers
    return grain.MapDataset.source(list(picks)).map(
        lambda picks: _global_batch(store, packs, picks, padding, Host(), True)
    )


def fed_rows(count: int, *, batch_size: int, seed: int, steps: int, hosts: Sequence[Host]) -> list[int]:
    """Which of `count` numbered rows these hosts read in so many steps of `training_batches` (not from buckets)."""
    order = _order(count, batch_size, seed, None)
    fed: set[int] = set()
    for step in range(steps):
        picks = np.asarray(order[step])
        for host in hosts:
            fed.update(_share(picks, host).tolist())
        if len(fed) == count:
            break
    return sorted(fed)


def evaluation_batches(
    store: Rows, rows: np.ndarray, *, batch_size: int, padding: Padding, host: Host = Host()
) -> grain.MapDataset:
    """Every conversation once, in order; the last batch is filled up with rows of padding, so that none is lost and
    all hosts take the same number of steps."""
    if batch_size < 1 or batch_size % host.count:
        raise ValueError(f"a batch of {batch_size} rows does not divide over {host.count} hosts")
    packs = _packs(store, rows, padding)
    return _in_order(packs, batch_size, lambda picks: _global_batch(store, packs, picks, padding, host))


def iterate(batches: grain.MapDataset, *, threads: int = 2) -> grain.DatasetIterator:
    """An iterator that reads a few batches ahead, with get_state() and set_state(state)."""
    reading = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(2, 2 * threads))
    return iter(batches.to_iter_dataset(reading))


def lay_out(rows: Sequence[Sequence[Supervised]], length: int) -> Batch:
    """Each row's documents one after the other, cut or padded at `length`."""
    tokens_BT = np.zeros((len(rows), length), np.int32)
    loss_mask_BT = np.zeros((len(rows), length), bool)
    segments_BT = np.zeros((len(rows), length), np.int32)
    for b, documents in enumerate(rows):
        first = 0
        for number, document in enumerate(documents, start=1):
            size = min(len(document.tokens), length - first)
            span = slice(first, first + size)
            tokens_BT[b, span] = document.tokens[:size]
            loss_mask_BT[b, span] = document.loss_mask[:size]
            segments_BT[b, span] = number
            first += size
    return Batch(tokens_BT=tokens_BT, loss_mask_BT=loss_mask_BT, segments_BT=segments_BT)


def _in_order(packs: Packs, batch_size: int, make: Callable[[np.ndarray], Batch]) -> grain.MapDataset:
    filled = np.pad(np.arange(len(packs)), (0, -len(packs) % batch_size), constant_values=-1).reshape(-1, batch_size)
    return grain.MapDataset.source(list(filled)).map(make)


def _order(count: int, batch_size: int, seed: int, epochs: int | None) -> grain.MapDataset:
    """The numbers of each global batch's rows, by step."""
    order = grain.MapDataset.range(count).shuffle(seed=seed).repeat(epochs)
    return order.batch(batch_size, drop_remainder=True, batch_fn=np.asarray)


def _share(picks: np.ndarray, host: Host) -> np.ndarray:
    return np.split(picks, host.count)[host.index]


def _packs(store: Rows, rows: np.ndarray, padding: Padding) -> Packs:
    return first_fit(rows, store.lengths[rows], padding.length) if isinstance(padding, Packed) else alone(rows)


def _global_batch(
    store: Rows, packs: Packs, picks: np.ndarray, padding: Padding, host: Host, numbered: bool = False
) -> Batch:
    """This host's rows of a global batch, padded to the length that all hosts agree on; -1 is a row of padding."""
    if isinstance(padding, Buckets):
        longest = max((store.lengths[packs[pick]].max() for pick in picks if pick >= 0), default=0)
        length = next((bucket for bucket in padding.lengths if bucket >= longest), padding.lengths[-1])
    else:
        length = padding.length
    ours = _share(picks, host)
    groups = [packs[pick] if pick >= 0 else () for pick in ours]
    documents = [[document for row in group for document in store.documents(row)] for group in groups]
    batch = lay_out(documents, length)
    return batch._replace(rows_B=ours.astype(np.int32)) if numbered else batch


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
