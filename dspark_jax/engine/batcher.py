"""Admission: a bounded first-in-first-out queue in front of the slots."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

Job = TypeVar("Job")


class Batcher(Generic[Job]):
    """Holds the jobs that were accepted and have no slot yet.

    At most `max_batch` (the slots) + `max_queue` (those that wait) jobs are outstanding: offered and not yet
    `done`. Every method may be called from any thread.
    """

    def __init__(self, *, max_batch: int, max_queue: int) -> None:
        self.capacity = max_batch + max_queue
        self._waiting: deque[Job] = deque()
        self._outstanding: list[Job] = []
        self._closed = False
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """How many jobs are without a slot."""
        return len(self._waiting)

    @property
    def outstanding(self) -> tuple[Job, ...]:
        """Jobs offered and not done: those that wait, those in a slot, and those on their way into one."""
        with self._changed:
            return tuple(self._outstanding)

    @property
    def closed(self) -> bool:
        return self._closed

    def offer(self, jobs: Sequence[Job]) -> bool:
        """Queues all the jobs, or none of them and returns False where there is no place for all or it is closed."""
        with self._changed:
            if self._closed or len(self._outstanding) + len(jobs) > self.capacity:
                return False
            self._waiting.extend(jobs)
            self._outstanding.extend(jobs)
            self._changed.notify_all()
            return True

    def take(self) -> Job | None:
        """The job that has waited longest, None where nobody waits. It stays outstanding until `done`."""
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def withdraw(self, job: Job) -> bool:
        """Takes a job back out of the queue; False where it is not there (any more)."""
        with self._changed:
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
            self._finish(job)
            return True

    def done(self, job: Job) -> None:
        """A job that was taken has ended: its place is free."""
        with self._changed:
            self._finish(job)

    def close(self) -> None:
        """Accepts nothing from now on; what was accepted stays."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Sleeps until somebody waits for a slot, or until it is closed."""
        with self._changed:
            if not self._waiting and not self._closed:
                self._changed.wait()

    def _finish(self, job: Job) -> None:
        self._outstanding.remove(job)
        self._changed.notify_all()
