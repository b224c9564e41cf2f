"""How a program ends when it is asked to: by Ctrl-C, or by SIGTERM as job queues and service managers send it."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

COMPILING = "compiling"
"""What the names of threads begin with whose work nothing interrupts."""
INTERRUPTED = "Interrupted."
KEPT = "What is done so far is kept: the same command goes on from there."
NOTHING_KEPT = "Nothing is written: the same command starts over."


class Terminated(BaseException):
    """SIGTERM. No KeyboardInterrupt, which may stop no more than an answer: this ends the program."""


@contextmanager
def terminable() -> Generator[None]:
    """While entered, SIGTERM raises `Terminated` in the main thread, as Ctrl-C raises KeyboardInterrupt."""
    # Elsewhere Python allows no handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with unmasked():
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def unmasked() -> Generator[None]:
    """Lets out as the signal that it was what came to be an error: JAX's C++ takes whatever is raised in a comparison
    that it calls for the failure of that."""
    try:
        yield
    except Exception as error:
        if (ended := _signal_behind(error)) is None:
            raise
        raise ended from None


@contextmanager
def keeping(words: Callable[[], str]) -> Generator[None]:
    """Where a signal ends what is done inside, the user hears what is kept of it and how to go on."""
    try:
        with unmasked():
            yield
    except (KeyboardInterrupt, Terminated) as ended:
        ended.add_note(words())
        raise


def exit_status(ended: BaseException) -> int:
    """As shells report a process that the signal ended: 143 for SIGTERM, 130 for Ctrl-C."""
    return 128 + (signal.SIGTERM if isinstance(ended, Terminated) else signal.SIGINT)


def interruptible(run: Callable[[], int | None]) -> int | None:
    """What `run` returns. Where a signal ends it, a line says so, and it is the exit status of that."""
    with terminable():
        try:
            return run()
        except (KeyboardInterrupt, Terminated) as ended:
            print(last_words(INTERRUPTED, ended), file=sys.stderr)
            return end(exit_status(ended))


def last_words(text: str, ended: BaseException) -> str:
    """`text` with what `keeping` added."""
    return " ".join(filter(None, (text, *getattr(ended, "__notes__", ()))))


def end(code: int) -> int:
    """The exit status; the process ends with it here where something is being compiled, which would be waited for."""
    if any(thread.name.startswith(COMPILING) for thread in threading.enumerate()):
        end_at_once(code)
    return code


def end_at_once(code: int) -> None:
    """An interpreter that shuts down under a compilation or a round crashes; this does not shut it down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _signal_behind(error: BaseException | None) -> BaseException | None:
    while error is not None:
        if isinstance(error, (KeyboardInterrupt, Terminated)):
            return error
        for kind in (KeyboardInterrupt, Terminated):
            # The last line of a traceback, as some of its messages quote them.
            if f"\n{kind.__name__}:" in str(error):
                return kind()
        error = error.__cause__ or error.__context__
    return None


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise Terminated
