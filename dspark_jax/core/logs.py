"""The lines that other libraries print, for programs that people watch."""

import logging

_SPEAKERS = ("huggingface_hub", "datasets")


def print_once() -> None:
    """Called where a program starts, so that what these libraries print is not printed again by the root logger.

    They have handlers of their own; orbax, when it is imported, makes absl give the root logger one as well.
    """
    for name in _SPEAKERS:
        logging.getLogger(name).propagate = False
