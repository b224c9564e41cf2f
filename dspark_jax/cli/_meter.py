"""How far a long command is: a bar on a terminal, a line now and then in a log."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

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
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[note]}"),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task(what, total=total, left="", note="")
        self._live = console.is_terminal
        self._began = self._said = time.monotonic()
        self._done = 0
        self._ends: float | None = None

    def show(self, done: int, made: int | None = None, unit: str = "", *, already: int = 0) -> None:
        """`done` of the total, and how many units were made on the way, with their rate. `already`: how many of those
        done took no time now, having been done before."""
        now = time.monotonic()
        self._done = done
        if done > already:
            # By all that was done, since much may come at once: the rate of the last seconds would say little.
            self._ends = now + (now - self._began) / (done - already) * (self._total - done)
        self._tell(now, "" if made is None else f"{made:,} {unit}, {made / max(now - self._began, 1e-9):,.0f}/s")

    def note(self, text: str) -> None:
        """What is being done while nothing counts as done."""
        self._tell(time.monotonic(), text)

    def _tell(self, now: float, note: str) -> None:
        left = "" if self._ends is None else time_left(self._ends - now)
        if self._live:
            self._bar.update(self._task, completed=self._done, left=left, note=note)
        elif now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            line = ", ".join(filter(None, (f"{self._what} {self._done:,}/{self._total:,}", left, note)))
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> "Meter":
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()


def time_left(seconds: float) -> str:
    """In words, no more exact than an estimate is."""
    if seconds < 60:
        return "under a minute left"
    return f"about {seconds / 60:.0f} min left" if seconds < 5400 else f"about {seconds / 3600:.1f} h left"
