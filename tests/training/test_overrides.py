"""Overrides parse by annotation, refuse by name, and flatten is what they are checked against."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.drafters.heads import RnnMarkov
from dspark_jax.training.config import find_config
from dspark_jax.training.draft import DFlashShape
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
        ("iner.rate=3", r"there is no field iner\.rate; the nearest are inner\.rate$"),
        ("other.RATE=3", r"there is no field other\.RATE; the nearest are inner\.rate$"),
        ("inner.lmit=3", r"there is no field inner\.lmit; the nearest are limit$"),
        ("inner.zzz=3", r"there is no field inner\.zzz; the nearest are inner\.on, inner\.rate, inner\.taps$"),
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


@dataclass(frozen=True, kw_only=True)
class Plain:
    rank: int = 2


@dataclass(frozen=True, kw_only=True)
class Rich:
    rank: int = 2
    width: int = 3


@dataclass(frozen=True, kw_only=True)
class Strict:
    rank: int
    needed: int


@dataclass(frozen=True, kw_only=True)
class Holder:
    head: Plain | Rich | Strict | None = field(default_factory=Plain)

    SHORT_PATHS: ClassVar[dict[str, str]] = {"head_rank": "head.rank"}


def test_a_variant_is_named_and_keeps_what_both_have():
    assert apply_overrides(Holder(), ["head.rank=7", "head=rich", "head.width=5"]).head == Rich(rank=7, width=5)
    assert apply_overrides(Holder(), ["head=Rich", "head=plain"]).head == Plain(rank=2)
    assert apply_overrides(Holder(), ["head=none"]).head is None
    assert apply_overrides(Holder(head=None), ["head=none", "head=rich"]).head == Rich()


def test_short_paths_stand_for_long_ones():
    assert apply_overrides(Holder(), ["head_rank=9"]).head == Plain(rank=9)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("head=poor", r"head is a Plain; set one of head\.rank, or name its type: Plain, Rich, Strict"),
        ("head=strict", r"head=strict: Strict needs needed, which has no default"),
        ("head_rank=x", r"head_rank takes a whole number"),
    ],
)
def test_variants_that_cannot_be(assignment, message):
    with pytest.raises(ValueError, match=message):
        apply_overrides(Holder(), [assignment])


def test_the_heads_of_a_drafter_by_name():
    config = find_config("qwen3_4b", Path(__file__).parents[2] / "configs")
    assert apply_overrides(config, ["drafter.markov_rank=64", "drafter.markov_head=rnn"]).drafter.markov_head == (
        RnnMarkov(rank=64)
    )
    dflash = apply_overrides(config, ["drafter=dflash"]).drafter
    assert dflash == DFlashShape(mask_token_id=151669, tapped_layers=(1, 9, 17, 25, 33))


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
