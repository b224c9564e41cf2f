"""Reading the fields of a JSON body: every value checked for type and range, every name known."""

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from dspark_jax.engine.errors import Refusal

Json = Mapping[str, object]


def parse_object(body: bytes) -> Json:
    """The JSON object of a request body; `Refusal` where it is anything else."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"The body is not valid JSON: {_first_line(error)}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise Refusal(f"The body must be a JSON object, not {kind_of(value)}.", code="invalid_json")
    return cast(Json, value)


def number(body: Json, name: str, *, low: float, high: float, default: float, open_low: bool = False) -> float:
    """A finite number in [low, high] ((low, high] with `open_low`); `default` where it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "a number", value)
    within = low < value <= high if open_low else low <= value <= high
    if not within:
        bounds = f"greater than {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise Refusal(f"{name} must be {bounds}, but it is {_short(value)}.", param=name, code="invalid_value")
    return float(value)


def integer(body: Json, name: str, *, low: int, high: int, default: int | None) -> int | None:
    """A whole number in [low, high]; `default` where it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "an integer", value)
    if not low <= value <= high:
        message = f"{name} must be from {low} to {high}, but it is {_short(value)}."
        raise Refusal(message, param=name, code="invalid_value")
    return value


def boolean(body: Json, name: str, *, default: bool = False, param: str | None = None) -> bool:
    """true or false; `default` where it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_type(param or name, "true or false", value)
    return value


def string(value: object, param: str) -> str:
    """A string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise wrong_type(param, "a string", value)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"{param} holds half of a surrogate pair at position {error.start}, which is not text."
        raise Refusal(message, param=param, code="invalid_value") from None
    return value


def array(value: object, param: str) -> Sequence[object]:
    if not isinstance(value, list):
        raise wrong_type(param, "an array", value)
    return cast(Sequence[object], value)


def record(value: object, param: str) -> Json:
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    return cast(Json, value)


def refuse_unknown(body: Json, known: Iterable[str], *, where: str = "") -> None:
    """A field nobody here reads might have changed the answer: refuse it by name."""
    names = sorted(known)
    for name in body:
        if name in names:
            continue
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the known fields are {', '.join(names)}."
        param = f"{where}{_short(name)}"
        raise Refusal(f"Unknown field {param}: {hint}", param=param, code="unknown_field")


def wrong_type(param: str, expected: str, value: object) -> Refusal:
    """The refusal of a value of the wrong JSON type."""
    return Refusal(f"{param} must be {expected}, not {kind_of(value)}.", param=param, code="invalid_type")


def kind_of(value: object) -> str:
    """The JSON type of a value, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    kinds = ((str, "a string"), (int, "an integer"), (float, "a number"), (list, "an array"), (dict, "an object"))
    return next((kind for type_, kind in kinds if isinstance(value, type_)), type(value).__name__)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _short(value: object) -> str:
    """A value for a sentence: without the 4000 digits somebody may have sent, what UTF-8 cannot say escaped."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, float) and not math.isfinite(value):
        return "beyond the range of numbers"
    text = str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= 60 else text[:57] + "..."


def _first_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).splitlines()[0].rstrip(".")
