"""How far a long command is: a bar on a terminal, a line now and then in a log."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 15.0


class Meter:
    """Entered around the work; `show` may be called as often as there is news. Writes to standard error."""

    def __init__(self, what: str, total: int, console: Console | None = None):
        self._what, self._total = what, total
        console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task(what, total=total, note="")
        self._live = console.is_terminal
        self._began = self._said = time.monotonic()

    def show(self, done: int, made: int | None = None, unit: str = "") -> None:
        """`done` of the total, and how many units were made on the way, with their rate."""
        now = time.monotonic()
        note = "" if made is None else f"{made:,} {unit}, {made / max(now - self._began, 1e-9):,.0f}/s"
        if self._live:
            self._bar.update(self._task, completed=done, note=note)
        elif now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            self._bar.console.print(f"{self._what} {done:,}/{self._total:,}  {note}", markup=False, highlight=False)

    def note(self, text: str) -> None:
        """What is being done while nothing counts as done."""
        now = time.monotonic()
        if self._live:
            self._bar.update(self._task, note=text)
        elif now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            self._bar.console.print(f"{self._what}: {text}", markup=False, highlight=False)

    def __enter__(self) -> "Meter":
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()
