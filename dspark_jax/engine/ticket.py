"""An accepted request inside the engine: its choices, and whoever listens to them."""

import logging
from collections.abc import Callable

from dspark_jax.engine.choice import ChoiceWriter, Progress
from dspark_jax.engine.errors import Refusal
from dspark_jax.engine.request import ChoiceRequest

Listener = Callable[[Progress | Refusal], None]

_log = logging.getLogger(__name__)


class Ticket:
    """One accepted request: `cancel` it from any thread when nobody wants the rest any more."""

    def __init__(self, listener: Listener, withdraw: "Callable[[Job], bool]") -> None:
        self.cancelled = False
        self.jobs: list[Job] = []
        self._listener = listener
        self._withdraw = withdraw

    def cancel(self) -> None:
        """Frees what the request holds: waiting choices at once, running ones before the next round."""
        self.cancelled = True
        for job in self.jobs:
            self._withdraw(job)

    def tell(self, event: Progress | Refusal) -> None:
        """Hands an event to whoever listens; a listener that fails counts as gone."""
        try:
            self._listener(event)
        except Exception:
            _log.exception("a listener failed; its request is cancelled")
            self.cancelled = True

    def fail(self, refusal: Refusal) -> None:
        """Ends the whole request with one error; its other choices are dropped as if cancelled."""
        if not self.cancelled:
            self.tell(refusal)
            self.cancel()


class Job:
    """One choice on its way through the engine."""

    def __init__(self, ticket: Ticket, choice: ChoiceRequest, writer: ChoiceWriter) -> None:
        self.ticket = ticket
        self.choice = choice
        self.writer = writer
