"""calibration.json: the fitted estimators of one drafter, and how good they were on prompts they had not seen."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float

from dspark_jax.data.journal import write_whole
from dspark_jax.decoding.confidence import HEAD_AND_DRAFT
from dspark_jax.decoding.fitted import Fitted
from dspark_jax.decoding.json_file import number, read_object, shown
from dspark_jax.decoding.reliability import Quality, Report

NAME = "calibration.json"
VERSION = 1
EstimatorName = Literal["sts", "combined", "raw"]

_AGAIN = "run `dspark calibrate` again"
# Devices compute with float32, where what is larger is infinite.
_LARGEST = 1e30


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the fit was made from: half of the prompts; the other half gave the metrics."""

    temperature: float
    prompts: int
    rounds: int
    max_new_tokens: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Estimators of one drafter."""

    fingerprint: str
    use: EstimatorName
    measured: Measured
    temperature_K: Float[np.ndarray, "K"] | None
    """Of STS; None for a drafter without a confidence head."""
    combined: Fitted

    def estimator(self, name: EstimatorName | None = None) -> Fitted:
        """The one asked for, by default the one the calibration chose. ValueError where it does not exist."""
        name = self.use if name is None else name
        if name == "combined":
            return self.combined
        if name == "raw":
            return Fitted.tempered(np.ones(self.combined.block_size))
        if self.temperature_K is None:
            raise ValueError("the drafter has no confidence head, hence no estimator sts: choose combined")
        return Fitted.tempered(self.temperature_K)


def write_calibration(directory: Path, calibration: Calibration, reports: Mapping[str, Report]) -> Path:
    """Writes the file whole or not at all, with the reports of estimators on the held-out half; its path."""
    value = {
        "version": VERSION,
        "drafter": calibration.fingerprint,
        "block_size": calibration.combined.block_size,
        "estimator": calibration.use,
        "measured": asdict(calibration.measured),
        "sts_temperatures": None if calibration.temperature_K is None else calibration.temperature_K.tolist(),
        "combined": {
            "weights": calibration.combined.weights_KF.tolist(),
            "bias": calibration.combined.bias_K.tolist(),
        },
        "held_out": {
            name: {
                "conditional": [_summary(quality) for quality in report.conditional],
                "cumulative": [_summary(quality) for quality in report.cumulative],
            }
            for name, report in reports.items()
        },
    }
    path = directory / NAME
    write_whole(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
    return path


def read_calibration(path: Path, *, fingerprint: str, block_size: int) -> Calibration:
    """ValueError, naming file, field and values, for a file of another version or drafter, or a damaged one."""
    file = _File(path)
    file.expect("version", VERSION, _AGAIN)
    file.expect("drafter", fingerprint, f"it was measured with another drafter: {_AGAIN} with this one")
    file.expect("block_size", block_size, _AGAIN)
    use = file.get("estimator")
    if use not in get_args(EstimatorName):
        raise file.wrong("estimator", use, f"one of {', '.join(get_args(EstimatorName))}")
    temperature_K = file.temperatures("sts_temperatures", block_size)
    if use == "sts" and temperature_K is None:
        raise file.wrong("sts_temperatures", None, "the temperatures that its estimator sts takes")
    return Calibration(
        fingerprint=fingerprint,
        use=use,
        measured=file.measured(),
        temperature_K=temperature_K,
        combined=file.estimator("combined", block_size),
    )


class _File:
    """The fields of the JSON object in a file; what is wrong with one is said with its name."""

    def __init__(self, path: Path):
        self._path, self._fields = path, read_object(path, _AGAIN)

    def get(self, name: str) -> Any:
        """A field by dotted path."""
        value: Any = self._fields
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                raise ValueError(f"{self._path} has no field {name}: {_AGAIN}")
            value = value[part]
        return value

    def wrong(self, name: str, value: Any, wanted: str) -> ValueError:
        return ValueError(f"{self._path}: {name} is {shown(value)}, not {wanted}: {_AGAIN}")

    def expect(self, name: str, expected: Any, remedy: str) -> None:
        found = self.get(name)
        if type(found) is not type(expected) or found != expected:
            raise ValueError(f"{self._path}: {name} is {shown(found)} and {shown(expected)} here: {remedy}")

    def estimator(self, name: str, block_size: int) -> Fitted:
        return Fitted(
            weights_KF=self._numbers(f"{name}.weights", (block_size, HEAD_AND_DRAFT)),
            bias_K=self._numbers(f"{name}.bias", (block_size,)),
        )

    def temperatures(self, name: str, block_size: int) -> Float[np.ndarray, "K"] | None:
        value = self.get(name)
        if value is None:
            return None
        temperature_K = self._numbers(name, (block_size,))
        if not (temperature_K > 1 / _LARGEST).all():
            raise self.wrong(name, value, "temperatures above 0")
        return temperature_K

    def measured(self) -> Measured:
        temperature = float(self._numbers("measured.temperature", ()))
        if temperature < 0:
            raise self.wrong("measured.temperature", temperature, "a number from 0 up")
        counts = {name: self.get(f"measured.{name}") for name in ("prompts", "rounds", "max_new_tokens", "seed")}
        for name, value in counts.items():
            if type(value) is not int or value < 0:
                raise self.wrong(f"measured.{name}", value, "a whole number from 0 up")
        return Measured(temperature=temperature, **counts)

    def _numbers(self, name: str, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
        value = self.get(name)
        try:
            numbers = np.asarray(_each(value), np.float64)
        except (ValueError, RecursionError):
            # Lists of several lengths, or far too many within each other.
            numbers = np.full(shape, np.nan)
        if numbers.shape != shape or not (np.abs(numbers) < _LARGEST).all():
            size = " by ".join(map(str, shape))
            raise self.wrong(name, value, f"{size} finite numbers" if shape else "a finite number")
        return numbers


def _each(value: Any) -> Any:
    """The numbers of lists within lists."""
    return [_each(each) for each in value] if isinstance(value, list) else number(value)


def _summary(quality: Quality) -> dict[str, Any]:
    return {
        "outcomes": quality.count,
        "kept": int(quality.kept_Q.sum()),
        "ece": quality.ece,
        "ece_if_true": quality.ece_if_true,
        "auc": quality.auc,
        "brier": quality.brier,
        "bins": {
            "outcomes": quality.count_Q.tolist(),
            "predicted": np.round(quality.predicted_Q, 4).tolist(),
            "kept": quality.kept_Q.tolist(),
        },
    }
