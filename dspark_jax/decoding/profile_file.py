"""Step curves on disk: JSON with the fingerprint of what was measured, refused wherever it is not the same."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark_jax.data.journal import write_whole
from dspark_jax.decoding.fingerprint import Fingerprint
from dspark_jax.decoding.profile import Shape, StepCurve

VERSION = 1

_AGAIN = "run `dspark profile`"


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
        raise ValueError(f"{path} is the step curve of something else: {difference}; {_AGAIN} with the same flags")
    if profile.predicted and not predicted:
        raise ValueError(f"{path} was predicted, not measured: {_AGAIN} on this machine")
    return profile


def _read(path: Path) -> Profile:
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except ValueError as error:
        raise ValueError(f"{path} is not the JSON of a step curve ({error}): {_AGAIN} again") from None
    version = value.get("step_curve") if isinstance(value, dict) else None
    if version != VERSION:
        raise ValueError(f"{path} is not a step curve of version {VERSION} (its step_curve is {version}): {_AGAIN}")
    try:
        return Profile(
            fingerprint=Fingerprint.from_json(value["fingerprint"]),
            curve=StepCurve({_shape(row): _seconds(row["seconds"]) for row in value["rounds"]}),
            method=str(value["method"]),
            predicted=value["predicted"] is not False,
        )
    except KeyError as error:
        raise ValueError(f"{path} is damaged: it has no {error}; {_AGAIN} again") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}; {_AGAIN} again") from None


def _shape(row: dict[str, Any]) -> Shape:
    shape = Shape(*(row[name] for name in Shape._fields))
    if any(type(size) is not int or size < 0 for size in shape) or not 0 < shape.rows <= shape.tokens:
        raise ValueError(f"no round has the shape {shape}")
    return shape


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"the seconds of a round are a number, not {value!r}")
    return float(value)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of seconds")
