"""Change fields of a frozen config by dotted path: `drafter.block_size=5`."""

import difflib
import math
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def apply_overrides(config: Config, assignments: Iterable[str]) -> Config:
    """The config with every `path=value` applied in order; values are parsed by the field's annotation.

    ValueError, one sentence, for a missing `=`, an unknown field (naming the nearest ones) or a value that is
    not of the field's type. A field that holds a config is assigned through its fields; where it may hold configs of
    several types, the start of a type's name puts that type there, with what the two have in common kept:
    `drafter.markov_head=gated`. A type's SHORT_PATHS are read as the longer paths that they stand for.
    """
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set takes path=value, for example drafter.block_size=5, not {assignment!r}")
        config = _assign(config, path.strip().split("."), text.strip(), path.strip(), list(flatten(config)))
    return config


def flatten(config: object, prefix: str = "") -> dict[str, Any]:
    """Every field of a config by dotted path, as JSON values; a config's own path maps to its type's name."""
    flat: dict[str, Any] = {}
    for field in fields(config):  # pyrefly: ignore[bad-argument-type]
        path, value = prefix + field.name, getattr(config, field.name)
        if is_dataclass(value):
            flat[path] = type(value).__name__
            flat |= flatten(value, path + ".")
        else:
            flat[path] = list(value) if isinstance(value, tuple) else value
    return flat


def nearest(word: str, known: Iterable[str]) -> str:
    """The known names most like `word`, or all of them when none is, as a phrase for an error."""
    known = sorted(known)
    return ", ".join(difflib.get_close_matches(word, known, n=3) or known)


def _assign(config: Any, parts: list[str], text: str, path: str, everywhere: list[str]) -> Any:
    name, *rest = (*getattr(config, "SHORT_PATHS", {}).get(parts[0], parts[0]).split("."), *parts[1:])
    known = {field.name for field in fields(config)}
    if name not in known:
        like = _like(path, everywhere) or [path.removesuffix(".".join(parts)) + field for field in sorted(known)]
        raise ValueError(f"there is no field {path}; the nearest are {', '.join(like)}")
    value = getattr(config, name)
    annotation = get_type_hints(type(config))[name]
    if not rest and (variants := _variants(annotation)) and not (value is None and text.lower() == "none"):
        return replace(config, **{name: _as_variant(annotation, variants, value, text, path)})
    if is_dataclass(value):
        return replace(config, **{name: _assign(value, rest, text, path, everywhere)})
    if rest:
        raise ValueError(f"{path.removesuffix('.' + '.'.join(rest))} is a plain value and has no field {rest[0]}")
    try:
        parsed = _parse(annotation, text)
    except ValueError:
        raise ValueError(f"{path} takes {_describe(annotation)}, not {text!r}") from None
    return replace(config, **{name: parsed})


def _variants(annotation: Any) -> dict[str, type]:
    """The config types that a field may hold, by name."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return {option.__name__: option for option in options if is_dataclass(option)}


def _as_variant(annotation: Any, variants: dict[str, type], value: Any, text: str, path: str) -> Any:
    if text.lower() == "none" and NoneType in get_args(annotation):
        return None
    named = [variant for name, variant in variants.items() if text and name.lower().startswith(text.lower())]
    if len(named) != 1:
        inner = {field.name for field in fields(value)} if value is not None else set()
        holds = (
            f"is a {type(value).__name__}; set one of {', '.join(f'{path}.{name}' for name in sorted(inner))}"
            if inner
            else "is none"
        )
        others = f", or name its type: {', '.join(variants)}" if len(variants) > 1 else ""
        raise ValueError(f"{path} {holds}{others}")
    own = {field.name for field in fields(named[0])}
    kept = {field.name: getattr(value, field.name) for field in fields(value) if field.name in own} if value else {}
    try:
        return named[0](**kept)
    except TypeError:
        missing = ", ".join(name for name in own - kept.keys() if _required(named[0], name))
        raise ValueError(f"{path}={text}: {named[0].__name__} needs {missing}, which has no default") from None


def _required(config: type, name: str) -> bool:
    field = config.__dataclass_fields__[name]
    return field.default is MISSING and field.default_factory is MISSING


def _like(path: str, everywhere: list[str]) -> list[str]:
    """The paths of a config that are spelt nearly as this one is, or else those whose last name is."""
    if whole := difflib.get_close_matches(path.lower(), everywhere, n=3, cutoff=0.8):
        return whole
    names = {known: known.rpartition(".")[2] for known in everywhere}
    near = difflib.get_close_matches(path.lower().rpartition(".")[2], set(names.values()), n=3)
    return sorted((known for known in names if names[known] in near), key=lambda known: near.index(names[known]))[:3]


def _parse(annotation: Any, text: str) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        if NoneType in arguments and text.lower() == "none":
            return None
        (inner,) = [argument for argument in arguments if argument is not NoneType]
        return _parse(inner, text)
    if origin is tuple:
        items = [item.strip() for item in text.strip("()[]").split(",")]
        return tuple(_parse(arguments[0], item) for item in items if item)
    if origin is Literal:
        if text not in arguments:
            raise ValueError(text)
        return text
    if annotation is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError(text)
        return text.lower() in _TRUE
    value = annotation(text)
    if annotation is float and not math.isfinite(value):
        raise ValueError(text)
    return value


def _describe(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_describe(argument) for argument in arguments)
    if origin is tuple:
        inner = arguments[0]
        return f"a comma-separated list of {', '.join(get_args(inner)) or inner.__name__}"
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "none"}
    return words[annotation]
