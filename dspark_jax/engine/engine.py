"""The engine: one thread that owns the device and serves every request from it."""

import enum
import logging
import threading
from collections.abc import Callable, Sequence, Set
from typing import Protocol, runtime_checkable
from weakref import WeakSet

from dspark_jax.decoding.slots import Sampling, SlotRound
from dspark_jax.engine.batcher import Batcher
from dspark_jax.engine.choice import ChoiceWriter, Detokenizer
from dspark_jax.engine.errors import Refusal, internal, queue_full, unavailable
from dspark_jax.engine.request import ChoiceRequest
from dspark_jax.engine.ticket import Job, Listener, Ticket

# Device failures in a row, with no working round between them, after which the engine gives up.
PATIENCE = 3

_log = logging.getLogger(__name__)


@runtime_checkable
class Slots(Protocol):
    """What the engine needs of decoding.slots.DecodeSlots."""

    @property
    def free(self) -> int: ...

    def admit_many(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[int]: ...

    def release(self, handle: int) -> None: ...

    def step(self) -> list[SlotRound]: ...

    def warm_up(self) -> None: ...


class EngineState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class Engine:
    """Serves requests from the slots that `make_slots` builds.

    `make_slots` runs on the engine's thread: once at start and again after a failure of the device, whose state
    may be gone with it. `rehearsal` is a prompt of the usual kind, run once before the engine is ready so that the
    first request finds its programs compiled. Events reach a request's listener on the engine's thread; a listener
    must not block.
    """

    def __init__(
        self,
        make_slots: Callable[[], Slots],
        *,
        detokenizer: Callable[[], Detokenizer],
        stop_ids: Set[int],
        max_batch: int,
        max_queue: int,
        rehearsal: Sequence[int] = (),
    ) -> None:
        self.error: Exception | None = None
        self.cut_short = 0
        """Requests that were open when the engine ended."""
        self._state = EngineState.STARTING
        self._make_slots = make_slots
        self._slots: Slots | None = None
        self._detokenizer = detokenizer
        self._stop_ids = frozenset(stop_ids)
        self._rehearsal = tuple(rehearsal)
        self._batcher: Batcher[Job] = Batcher(max_batch=max_batch, max_queue=max_queue)
        self._live: dict[int, Job] = {}
        self._tickets: WeakSet[Ticket] = WeakSet()
        self._failures = 0
        self._aborted = False
        self._launched = False
        self._started = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def state(self) -> EngineState:
        if self._batcher.closed and self._state in (EngineState.STARTING, EngineState.READY):
            return EngineState.DRAINING
        return self._state

    @property
    def capacity(self) -> int:
        """The most choices that can be outstanding at once."""
        return self._batcher.capacity

    @property
    def outstanding(self) -> int:
        """Choices accepted and not ended."""
        return len(self._batcher.outstanding)

    @property
    def open_requests(self) -> int:
        """Requests accepted and not ended, each of them one however many choices it has."""
        return len({job.ticket for job in self._batcher.outstanding if not job.ticket.cancelled})

    def start(self) -> None:
        # Said first: a Ctrl-C inside Thread.start leaves a thread that runs and does not look alive yet.
        self._launched = True
        self._thread.start()

    def wait_started(self) -> bool:
        """Blocks until the first compilation is over; False where it failed (`error` says how)."""
        self._started.wait()
        return self.error is None

    def submit(self, choices: Sequence[ChoiceRequest], listener: Listener) -> Ticket:
        """Accepts all choices of a request or none; never blocks.

        Each choice ends with a `Progress` that has a finish reason, or the whole request with one `Refusal`.
        Raises `Refusal`: 429 where the queue is full, 503 where the engine takes no more work.
        """
        ticket = Ticket(listener, self._batcher.withdraw)
        for choice in choices:
            writer = ChoiceWriter(choice, detokenizer=self._detokenizer(), stop_ids=self._stop_ids)
            ticket.jobs.append(Job(ticket, choice, writer))
        if not self._batcher.offer(ticket.jobs):
            if self._batcher.closed:
                raise unavailable(self._why_closed())
            raise queue_full(self._batcher.waiting)
        self._tickets.add(ticket)
        return ticket

    def drain(self) -> None:
        """Accepts nothing from now on and ends once everything accepted is done."""
        self._batcher.close()

    def abort(self) -> None:
        """Ends now, after the round in progress: every request still open is told that the server stops."""
        self._aborted = True
        self._batcher.close()

    def give_up(self) -> None:
        """After `abort`, where a round or a compilation does not end: every request still open is told so now."""
        for ticket in list(self._tickets):
            ticket.fail(unavailable(self._why_ended()))

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread to end after `drain` or `abort`; False where it has not ended in time."""
        return not self._launched or self._ended.wait(timeout)

    def _run(self) -> None:
        try:
            self._slots = self._make_slots()
            self._warm_up()
            self._state = EngineState.READY
            self._started.set()
            self._serve()
            self._state = EngineState.STOPPED
        except Exception as error:
            _log.exception("the engine failed")
            self.error = error
            self._state = EngineState.FAILED
        finally:
            self._batcher.close()
            self.cut_short = self.open_requests
            self._end_all(unavailable(self._why_ended()))
            self._started.set()
            self._ended.set()

    def _warm_up(self) -> None:
        self.slots.warm_up()
        if self._rehearsal:
            (handle,) = self.slots.admit_many([self._rehearsal], [Sampling()])
            self.slots.step()
            self.slots.release(handle)

    def _serve(self) -> None:
        while not self._aborted:
            self._free_cancelled()
            self._admit_waiting()
            if self._live:
                self._step()
            elif self._batcher.closed and not self._batcher.waiting:
                return
            elif not self.slots.free:
                raise RuntimeError("no slot is free although no request is live")
            else:
                self._batcher.wait()

    def _free_cancelled(self) -> None:
        for handle, job in list(self._live.items()):
            if job.ticket.cancelled:
                self._leave(handle)

    def _admit_waiting(self) -> None:
        """Fills the free slots in the order of arrival."""
        jobs: list[Job] = []
        while len(jobs) < self.slots.free and (job := self._batcher.take()) is not None:
            if job.ticket.cancelled:
                self._batcher.done(job)
            else:
                jobs.append(job)
        if not jobs:
            return
        try:
            handles = self.slots.admit_many([job.choice.prompt for job in jobs], [job.choice.sampling for job in jobs])
        except Exception as error:
            for job in jobs:
                self._batcher.done(job)
                job.ticket.fail(internal())
            # A ValueError is the slots' own word that they cannot serve these requests; the others are untouched.
            if not isinstance(error, ValueError):
                self._recover(error)
            else:
                _log.error("requests were accepted and could not be admitted", exc_info=error)
        else:
            self._live.update(zip(handles, jobs, strict=True))

    def _step(self) -> None:
        try:
            rounds = self.slots.step()
        except Exception as error:
            self._recover(error)
            return
        self._failures = 0
        for slot_round in rounds:
            job = self._live.get(slot_round.handle)
            if job is not None and not job.ticket.cancelled:
                self._route(job, slot_round)

    def _route(self, job: Job, slot_round: SlotRound) -> None:
        try:
            progress = job.writer.feed(slot_round)
        except Exception:
            _log.exception("a choice could not be turned into text")
            job.ticket.fail(internal())
            return
        if progress.finish is not None:
            self._leave(slot_round.handle)
        if progress.text or progress.finish is not None:
            job.ticket.tell(progress)

    def _leave(self, handle: int) -> None:
        self.slots.release(handle)
        self._batcher.done(self._live.pop(handle))

    @property
    def slots(self) -> Slots:
        assert self._slots is not None
        return self._slots

    def _recover(self, error: Exception) -> None:
        """Ends the live requests and builds new slots; gives up when that keeps failing."""
        self._end_live(internal())
        self._failures += 1
        if self._failures >= PATIENCE:
            raise error
        _log.error("a round failed on the device; its requests end and the engine goes on", exc_info=error)
        self._slots = None
        self._slots = self._make_slots()

    def _end_live(self, refusal: Refusal) -> None:
        live, self._live = self._live, {}
        for job in live.values():
            self._batcher.done(job)
            job.ticket.fail(refusal)

    def _end_all(self, refusal: Refusal) -> None:
        self._end_live(refusal)
        while (job := self._batcher.take()) is not None:
            self._batcher.done(job)
            job.ticket.fail(refusal)

    def _why_ended(self) -> str:
        if self._state is EngineState.FAILED:
            return self._why_closed()
        return "The server stopped before this request was done."

    def _why_closed(self) -> str:
        if self._state is EngineState.FAILED:
            return "The engine has failed and takes no requests; the server's log says why."
        return "The server is shutting down and takes no more requests."
