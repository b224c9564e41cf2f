"""What a person watching sees: a live bar on a terminal, plain lines anywhere else."""

import time
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark_jax.training.report import Values


class Display:
    """Entered around the loop; `say` prints a sentence above the bar."""

    def __init__(self, first: int, steps: int, console: Console):
        self._first, self._steps, self._console = first, steps, console
        self._began = time.monotonic()
        self._compiling = True
        columns = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}")]
        self._bar = Progress(*columns, TextColumn("eta"), TimeRemainingColumn(), console=console)
        self._task = self._bar.add_task("train", total=steps, completed=first, numbers="compiling")
        self._live = console.is_terminal

    def __enter__(self) -> "Display":
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._live:
            self._bar.stop()

    def advance(self, step: int) -> None:
        # From the end of the first step on: it compiles, and says nothing about the others.
        if self._compiling:
            self._compiling, self._first, self._began = False, step, time.monotonic()
        self._bar.update(self._task, completed=step)

    def show(self, step: int, values: Values) -> None:
        """The numbers of the last window: loss, accepted length (an estimate), tokens per second."""
        numbers = (
            f"loss {values.get('loss', float('nan')):.3f}  accepted length ~{values.get('accepted_length', 1.0):.2f}"
            f"  {values['tokens_per_second']:,.0f} tokens/s"
        )
        if values["skipped"]:
            numbers += f"  skipped {values['skipped']:.0%}"
        if values.get("rows_skipped"):
            numbers += f"  rows skipped {values['rows_skipped']:.1%}"
        self._bar.update(self._task, completed=step, numbers=numbers)
        if not self._live:
            pace = (time.monotonic() - self._began) / max(step - self._first, 1)
            left = timedelta(seconds=round(pace * (self._steps - step)))
            self.say(f"step {step}/{self._steps}  {numbers}  eta {left}")

    def say(self, text: str) -> None:
        # soft_wrap: a log is no terminal to wrap for; markup and highlight would colour paths and brackets.
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
