"""The end of a process that has an engine."""

import os
import sys

from dspark_jax.engine.engine import Engine


def leave(engine: Engine, code: int) -> int:
    """Ends the engine and returns the exit code; ends the process with it where the engine cannot be stopped.

    A compilation or a round in progress cannot be interrupted, and an interpreter that shuts down under it crashes.
    """
    engine.abort()
    if not engine.join(1.0):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
