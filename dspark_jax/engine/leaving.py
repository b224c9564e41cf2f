"""The end of a process that has an engine."""

import sys

from dspark_jax.core.signals import end_at_once
from dspark_jax.engine.engine import Engine


def leave(engine: Engine, code: int, words: str = "") -> int:
    """Ends the engine and returns the exit code; ends the process with it, and with `words` on standard error, where
    the engine cannot be stopped."""
    engine.abort()
    if not engine.join(1.0):
        sys.stderr.write(words)
        end_at_once(code)
    return code
