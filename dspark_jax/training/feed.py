"""Batches on their way to the device, a few ahead of the step that uses them."""

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax

from dspark_jax.data.pipeline import Batch
from dspark_jax.training.hosts import on_devices

AHEAD = 2


@runtime_checkable
class Batches(Protocol):
    """An iterator whose position can be saved: after set_state(s) it yields what it yielded after get_state()."""

    def __next__(self) -> Batch: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


class Feed:
    """Yields device batches; `state` is the position after the batch last yielded, not after those fetched ahead."""

    def __init__(self, batches: Batches, sharding: jax.sharding.Sharding):
        self._batches, self._sharding = batches, sharding
        self._ready: deque[tuple[Batch, Any]] = deque()
        self.state = batches.get_state()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        # Transfers are asynchronous: a batch fetched now arrives while earlier steps run.
        while len(self._ready) <= AHEAD:
            try:
                batch = next(self._batches)
            except StopIteration:
                break
            self._ready.append((on_devices(batch, self._sharding), self._batches.get_state()))
        if not self._ready:
            raise StopIteration
        batch, self.state = self._ready.popleft()
        return batch
