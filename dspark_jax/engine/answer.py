"""The engine's events in the event loop: one accepted request as something to await."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from dspark_jax.engine.choice import ChoiceStats, Finish, Progress
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.errors import Refusal
from dspark_jax.engine.request import ChoiceRequest


@dataclass(frozen=True, kw_only=True)
class WholeAnswer:
    """Everything a request was answered, by the index of its choices."""

    texts: tuple[str, ...]
    finishes: tuple[Finish, ...]
    stats: tuple[ChoiceStats, ...]


class Answer:
    """A request handed to the engine; `cancel` when nobody reads it any more.

    Raises `Refusal` where the engine does not take it. Belongs to the event loop it was made in.
    """

    def __init__(self, engine: Engine, choices: Sequence[ChoiceRequest]) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Progress | Refusal] = asyncio.Queue()
        self._open = len(choices)
        self._ticket = engine.submit(choices, self._from_engine)

    def cancel(self) -> None:
        """Frees its slots; harmless after its end."""
        self._ticket.cancel()

    async def progress(self) -> AsyncIterator[Progress]:
        """What each round adds, until every choice has finished. Raises the `Refusal` the request ended with."""
        while self._open:
            event = await self._events.get()
            if isinstance(event, Refusal):
                raise event
            self._open -= event.finish is not None
            yield event

    async def whole(self) -> WholeAnswer:
        """Waits for all choices."""
        texts: dict[int, list[str]] = {}
        last: dict[int, Progress] = {}
        async for progress in self.progress():
            texts.setdefault(progress.index, []).append(progress.text)
            last[progress.index] = progress
        ends = [last[index] for index in sorted(last)]
        return WholeAnswer(
            texts=tuple("".join(texts[end.index]) for end in ends),
            finishes=tuple(end.finish for end in ends if end.finish is not None),
            stats=tuple(end.stats for end in ends if end.stats is not None),
        )

    def _from_engine(self, event: Progress | Refusal) -> None:
        """Runs on the engine's thread. The loop may be closed by then: the engine counts that as a client gone."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)
