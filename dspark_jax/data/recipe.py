"""The whole making of a training set as one config: written down, rerun by anyone, changed by `--set`."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from dspark_jax.data.filters import PromptFilters
from dspark_jax.data.regenerate import Answering

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class SeededCounts:
    """How many prompts the model writes itself, by the section of the seeds file they open with."""

    maths: int = 14_000
    code: int = 12_000
    reasoning: int = 4_000
    writing: int = 7_000
    explanation: int = 9_000
    roleplay: int = 3_000
    extraction: int = 3_000
    everyday: int = 8_000


@dataclass(frozen=True, kw_only=True)
class ProceduralCounts:
    """How many prompts are made by rule."""

    maths: int = 8_000
    logic: int = 2_000
    code: int = 10_000


@dataclass(frozen=True, kw_only=True)
class PromptSampling:
    """How the model continues a seed; temperatures are used in turn."""

    temperatures: tuple[float, ...] = (0.8, 0.9, 1.0)
    top_p: float = 0.95
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        if not self.temperatures or min(self.temperatures) <= 0:
            raise ValueError("prompts are sampled at temperatures above 0: a greedy model writes one prompt a seed")
        if self.max_new_tokens < 1 or not 0 < self.top_p <= 1:
            raise ValueError("prompts need max_new_tokens >= 1 and 0 < top_p <= 1")


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """seeds: a file of openings by section (None: the one that ships with this package).

    near_duplicates: seeded prompts with at least this Jaccard similarity of 3-word shingles count as one.
    attempts: seeded prompts tried at most, for each wanted one.
    instructions: share of seeded maths prompts that get a line on how to answer.
    follow_ups: share of prompts that get a second user turn.
    decontaminate: test files; a prompt that shares ten words in a row with one is dropped.
    """

    seeded: SeededCounts = field(default_factory=SeededCounts)
    procedural: ProceduralCounts = field(default_factory=ProceduralCounts)
    seeds: str | None = None
    prompts: PromptSampling = field(default_factory=PromptSampling)
    filters: PromptFilters = field(default_factory=PromptFilters)
    near_duplicates: float = 0.6
    attempts: float = 4.0
    instructions: float = 0.5
    follow_ups: float = 0.1
    decontaminate: tuple[str, ...] = ()
    answers: Answering = field(default_factory=Answering)
    seed: int = 0


def read_recipe(path: str | Path) -> DataRecipe:
    """A recipe from JSON; what the file leaves out keeps its default. ValueError names a field that is not one."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    return _build(DataRecipe, value, str(path))


def recipe_text(recipe: DataRecipe) -> str:
    """The recipe as JSON, every field written out."""
    return json.dumps(asdict(recipe), indent=2) + "\n"


def _build(kind: type[Config], value: Any, where: str) -> Config:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is an object with the fields of {kind.__name__}, not {value!r}")
    hints = get_type_hints(kind)
    known = {each.name for each in fields(kind)}  # pyrefly: ignore[bad-argument-type]
    if unknown := sorted(set(value) - known):
        raise ValueError(f"{where} has no field {unknown[0]}; there are {', '.join(sorted(known))}")
    try:
        return kind(**{name: _convert(hints[name], inner, f"{where}: {name}") for name, inner in value.items()})
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def _convert(hint: Any, value: Any, where: str) -> Any:
    """A JSON value as the annotation wants it: nested configs, tuples of one type, options, plain values."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        (hint,) = [argument for argument in arguments if argument is not NoneType]
        return _convert(hint, value, where)
    if is_dataclass(hint):
        return _build(hint, value, where)  # pyrefly: ignore[bad-argument-type]
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} is a list, not {value!r}")
        return tuple(_convert(arguments[0], inner, where) for inner in value)
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        raise ValueError(f"{where} is of type {hint.__name__}, not {value!r}")
    return value
