"""Step curves on disk: JSON with the fingerprint of what was measured, refused wherever it is not the same."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from dspark_jax.data.journal import write_whole
from dspark_jax.decoding.fingerprint import Fingerprint
from dspark_jax.decoding.json_file import number, read_object, shown
from dspark_jax.decoding.profile import Shape, StepCurve

VERSION = 1

Kind = TypeVar("Kind")

_RUN = "run `dspark profile`"
_AGAIN = f"remove it and {_RUN} again"
_LARGEST = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A step curve and what it is one of. `method` says in words where its seconds come from."""

    fingerprint: Fingerprint
    curve: StepCurve
    method: str
    predicted: bool = False


def save_profile(path: Path, profile: Profile) -> None:
    """Writes the file whole or not at all."""
    value = {
        "step_curve": VERSION,
        "fingerprint": asdict(profile.fingerprint),
        "predicted": profile.predicted,
        "method": profile.method,
        "rounds": [shape._asdict() | {"seconds": s} for shape, s in sorted(profile.curve.measured.items())],
    }
    write_whole(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def load_profile(path: Path, fingerprint: Fingerprint, *, predicted: bool = False) -> Profile:
    """The profile of a file, if it was made for `fingerprint`; one that was only predicted, where that is asked for.

    ValueError with a sentence for any other file, OSError where there is none.
    """
    profile = _read(path)
    if difference := profile.fingerprint.differs(fingerprint):
        raise ValueError(f"{path} is the step curve of something else: {difference}; {_RUN} with the same flags")
    if profile.predicted and not predicted:
        raise ValueError(f"{path} was predicted, not measured: {_RUN} on this machine")
    return profile


def _read(path: Path) -> Profile:
    value = read_object(path, _AGAIN)
    version = value.get("step_curve")
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"{path} is not a step curve of version {VERSION} (its step_curve is {shown(version)}): {_AGAIN}"
        )
    try:
        fingerprint = Fingerprint.from_json(value["fingerprint"])
        return Profile(
            fingerprint=fingerprint,
            curve=StepCurve(dict(_round(row, fingerprint.block) for row in _typed(value, "rounds", list))),
            method=_typed(value, "method", str),
            predicted=_typed(value, "predicted", bool),
        )
    except KeyError as error:
        raise ValueError(f"{path} is damaged: it has no {error}; {_AGAIN}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; {_AGAIN}") from None


def _typed(value: dict[str, Any], name: str, kind: type[Kind]) -> Kind:
    found = value[name]
    if not isinstance(found, kind):
        raise ValueError(f"its {name} is {shown(found)}")
    return found


def _round(row: Any, block: int) -> tuple[Shape, float]:
    if not isinstance(row, dict):
        raise ValueError(f"{shown(row)} is no round")
    sizes = [row[name] for name in Shape._fields]
    if any(type(size) is not int or not 0 <= size <= _LARGEST for size in sizes):
        raise ValueError(f"no round has the shape {shown(sizes)}")
    shape = Shape(*sizes)
    if not 0 < shape.rows <= shape.tokens <= shape.rows * (shape.drafts + 1) or shape.drafts > block:
        raise ValueError(f"no round has the shape {shown(sizes)}")
    seconds = number(row["seconds"])
    if not 0 < seconds < math.inf:
        raise ValueError(f"the seconds of a round are a positive number, not {shown(row['seconds'])}")
    return shape, seconds
