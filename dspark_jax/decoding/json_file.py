"""JSON files that measurements are kept in, read so that whatever is wrong with one can be said in a sentence."""

import json
import math
from pathlib import Path
from typing import Any

_LONGEST = 90


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The object that the file holds; ValueError for anything else, OSError where there is no file."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): {remedy}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds a JSON {type(fields).__name__}, not an object: {remedy}")
    return fields


def number(value: Any) -> float:
    """The number that a JSON value is; NaN for what is none, strings and truth values among it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def shown(value: Any) -> str:
    """A JSON value for an error message."""
    return shortened(json.dumps(value))


def shortened(text: str) -> str:
    """A text for an error message, which a long one must not fill."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
