"""The engine for callers without an event loop: one choice as an iterator."""

import queue
from collections.abc import Generator

from dspark_jax.engine.choice import Progress
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.errors import Refusal
from dspark_jax.engine.request import ChoiceRequest


def stream_choice(engine: Engine, choice: ChoiceRequest) -> Generator[Progress, None, None]:
    """What each round adds, until the choice has finished. Closing it early frees the slot.

    Raises the `Refusal` that the engine answers with.
    """
    events: queue.SimpleQueue[Progress | Refusal] = queue.SimpleQueue()
    ticket = engine.submit([choice], events.put)
    try:
        while True:
            event = events.get()
            if isinstance(event, Refusal):
                raise event
            yield event
            if event.finish is not None:
                return
    finally:
        ticket.cancel()
