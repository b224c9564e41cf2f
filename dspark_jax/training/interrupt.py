"""Ctrl-C and SIGTERM as a question the loop asks between steps."""

import signal
from collections.abc import Callable
from types import FrameType


class Interrupt:
    """While entered, the first SIGINT or SIGTERM is only noted in `signal`; a second one acts as usual."""

    def __init__(self, announce: Callable[[], None]):
        self.signal: signal.Signals | None = None
        self._announce = announce
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()
        self._announce()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyrefly: ignore[bad-argument-type]
        self._before.clear()
