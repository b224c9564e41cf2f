"""Overrides parse by annotation, refuse by name, and flatten is what they are checked against."""

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.training.overrides import apply_overrides, flatten


@dataclass(frozen=True, kw_only=True)
class Files:
    paths: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    count: int = 3


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5
    taps: tuple[int, ...] | None = None
    on: bool = True


@dataclass(frozen=True, kw_only=True)
class Outer:
    steps: int = 10
    limit: int | None = None
    name: str = "x"
    kind: Literal["bfloat16", "float32"] = "float32"
    inner: Inner = field(default_factory=Inner)
    data: Files | Sampled = field(default_factory=Sampled)

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError("steps must be at least 1")


def override(*assignments: str) -> Outer:
    return apply_overrides(Outer(), assignments)


@given(st.integers(min_value=1))
def test_integers_round_trip(number):
    assert override(f"steps={number}").steps == number
    assert override(f"limit={number}").limit == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_round_trip(number):
    assert override(f"inner.rate={number!r}").inner.rate == number


@given(st.text().filter(lambda text: text == text.strip()))
def test_text_is_taken_as_it_is(text):
    assert override(f"name={text}").name == text


@given(st.lists(st.integers()).map(tuple))
def test_tuples_round_trip_in_both_spellings(items):
    assert override(f"inner.taps={','.join(map(str, items))}").inner.taps == items
    assert override(f"inner.taps={items}").inner.taps == items


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False), ("on", True), ("0", False)])
def test_booleans(text, value):
    assert override(f"inner.on={text}").inner.on is value


def test_none_where_the_field_allows_it_and_in_order():
    assert override("limit=4", "limit=none", "inner.taps=1,2").limit is None


def test_fields_of_the_variant_in_use():
    assert override("data.count=7").data == Sampled(count=7)
    assert apply_overrides(Outer(data=Files(paths=("a",))), ["data.paths=b,c"]).data == Files(paths=("b", "c"))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("stepz=3", r"there is no field stepz; the nearest are steps"),
        ("inner.rat=3", r"there is no field inner\.rat; the nearest are inner\.rate"),
        ("data.paths=a", r"there is no field data\.paths; the nearest are data\.count"),
        ("steps.x=3", r"steps is a plain value and has no field x"),
        ("inner=3", r"inner is a Inner; set one of inner\.on, inner\.rate, inner\.taps"),
        ("steps=2.5", r"steps takes a whole number, not '2\.5'"),
        ("steps=", r"steps takes a whole number"),
        ("limit=x", r"limit takes a whole number or none, not 'x'"),
        ("inner.rate=fast", r"inner\.rate takes a number, not 'fast'"),
        ("inner.rate=nan", r"inner\.rate takes a number, not 'nan'"),
        ("inner.on=maybe", r"inner\.on takes true or false"),
        ("inner.taps=1,b", r"inner\.taps takes a comma-separated list of int or none"),
        ("kind=float16", r"kind takes one of bfloat16, float32"),
        ("steps", r"--set takes path=value"),
        ("steps=0", r"steps must be at least 1"),
    ],
)
def test_refusals_are_one_sentence_that_names_the_field(assignment, message):
    with pytest.raises(ValueError, match=message) as refused:
        override(assignment)
    assert "\n" not in str(refused.value)


def test_flatten_names_every_field_and_the_variant():
    assert flatten(Outer(inner=Inner(taps=(1, 2)))) == {
        "steps": 10,
        "limit": None,
        "name": "x",
        "kind": "float32",
        "inner": "Inner",
        "inner.rate": 0.5,
        "inner.taps": [1, 2],
        "inner.on": True,
        "data": "Sampled",
        "data.count": 3,
    }
