"""Lines for people who watch a program: other libraries' once, and its own not too often."""

import logging
import time
from collections.abc import Callable

_SPEAKERS = ("huggingface_hub", "datasets")
_SECONDS_BETWEEN_LINES = 10.0


def print_once() -> None:
    """Called where a program starts, so that what these libraries print is not printed again by the root logger.

    They have handlers of their own; orbax, when it is imported, makes absl give the root logger one as well.
    """
    for name in _SPEAKERS:
        logging.getLogger(name).propagate = False


class NowAndThen:
    """Says what it is told, but ten seconds after the last time at the earliest."""

    def __init__(self, say: Callable[[str], None]):
        self._say, self._said = say, time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            self._say(text)
