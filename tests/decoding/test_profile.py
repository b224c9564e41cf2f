"""The step curve: what it says between what was measured, and whose it is."""

import json
from dataclasses import asdict, fields, replace
from itertools import pairwise

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.decoding.buckets import verify_sizes
from dspark_jax.decoding.fingerprint import Fingerprint
from dspark_jax.decoding.planner import Planner
from dspark_jax.decoding.profile import Shape, StepCurve
from dspark_jax.decoding.profile_file import VERSION, Profile, load_profile, save_profile
from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.scheduler import EarlyStop

MINE = Fingerprint(
    target="llama 0a",
    drafter="DSpark 0b",
    dtype="bfloat16",
    block=7,
    rule="token",
    mesh="1",
    device="TPU v5 lite",
    devices=1,
    jax="0.10.2",
)
SIZES = verify_sizes(2, 7)


def curve_of(seconds, span=256):
    return {Shape(2, span, size, 0 if size == 2 else 7): float(s) for size, s in zip(SIZES, seconds, strict=True)}


PROFILE = Profile(fingerprint=MINE, curve=StepCurve(curve_of([1, 2, 3, 4, 5, 6.5])), method="by hand")


@pytest.fixture
def file(tmp_path):
    save_profile(tmp_path / "deep" / "curve.json", PROFILE)
    return tmp_path / "deep" / "curve.json"


def refusal(file, fingerprint=MINE):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load_profile(file, fingerprint)
    assert str(file) in str(error.value)
    assert "dspark profile" in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_written_is_what_is_read(file):
    assert load_profile(file, MINE) == PROFILE


@pytest.mark.parametrize("field", [field.name for field in fields(Fingerprint)])
def test_d_32_another_fingerprint_is_refused_by_the_field_that_differs(file, field):
    here = getattr(MINE, field)
    other = replace(MINE, **{field: here + 1 if isinstance(here, int) else "another"})
    assert f"its {field} is {here}, and here it is {getattr(other, field)}" in refusal(file, other)
    assert other.digest != MINE.digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step_curve": VERSION + 1}, f"not a step curve of version {VERSION} (its step_curve is {VERSION + 1})"),
        ({"rounds": []}, "no measured rounds"),
        (
            {"rounds": [{"rows": 1, "span": 256, "tokens": 1, "drafts": 0, "seconds": -1.0}]},
            "a positive number, not -1.0",
        ),
        (
            {"rounds": [{"rows": 1, "span": 256, "tokens": 1, "drafts": 0, "seconds": float("nan")}]},
            "a positive number, not NaN",
        ),
        (
            {"rounds": [{"rows": 1, "span": 256, "tokens": 1, "drafts": 0, "seconds": "1"}]},
            'a positive number, not "1"',
        ),
        ({"rounds": [{"rows": 1, "span": 256, "tokens": 0.5, "drafts": 0, "seconds": 1}]}, "no round has the shape"),
        ({"rounds": [{"rows": 1}]}, "it has no 'span'"),
        ({"rounds": 3}, "its rounds is 3"),
        ({"rounds": [3]}, "3 is no round"),
        ({"rounds": [{"rows": 1, "span": 256, "tokens": 1, "drafts": 0, "seconds": 1}]}, "no round with drafts"),
        ({"rounds": [{"rows": 1, "span": 256, "tokens": 9, "drafts": 7, "seconds": 1}]}, "no round has the shape"),
        ({"rounds": [{"rows": 1, "span": 256, "tokens": 2, "drafts": 8, "seconds": 1}]}, "no round has the shape"),
        ({"fingerprint": {"target": "llama 0a"}}, "its fingerprint has other fields"),
        ({"fingerprint": asdict(MINE) | {"block": "7"}}, "its fingerprint has a field of another type"),
        ({"predicted": True}, "was predicted, not measured"),
    ],
)
def test_a_damaged_file_is_refused(file, change, words):
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert words in refusal(file)


@pytest.mark.parametrize("text", ["", "{", "[]", '"step curve"'])
def test_a_file_of_something_else_is_refused(file, text):
    file.write_text(text)
    refusal(file)


def test_a_predicted_curve_is_taken_only_where_it_is_asked_for(file):
    save_profile(file, replace(PROFILE, predicted=True))
    refusal(file)
    assert load_profile(file, MINE, predicted=True).predicted


def test_a_fingerprint_is_of_shapes_and_place_not_of_weights(small, five):
    def of(pair, dtype="float32", rule=Rule.TOKEN):
        return Fingerprint.of(*pair, dtype=dtype, rule=rule)

    target, drafter = small
    mine = of(small)
    assert (mine.block, mine.devices, mine.mesh, mine.dtype) == (3, 1, "1", "float32")
    assert "cores of" in mine.device
    assert mine == of(jax.tree.map(lambda leaf: leaf + 1, (target, drafter)))
    changed = {"dtype": of(small, dtype="bfloat16"), "rule": of(small, rule=Rule.BLOCK), "target": of(five)}
    for field, other in changed.items():
        assert getattr(other, field) != getattr(mine, field)
    assert of(five).drafter != mine.drafter


times = st.lists(st.floats(0.01, 10), min_size=len(SIZES), max_size=len(SIZES))


@settings(deadline=None)
@given(times)
def test_more_tokens_never_take_less_time(seconds):
    curve = StepCurve(curve_of(seconds))
    found = [curve.seconds(2, 256, tokens, 7) for tokens in range(3, 17)]
    assert all(before <= after for before, after in pairwise(found))
    assert found[-1] == max(seconds[1:])
    for interpolate in (False, True):
        rates = curve.rates(2, 256, SIZES, interpolate=interpolate)
        assert rates.shape == (17,)
        assert (np.diff(rates) <= 0).all()
        at_edges = [found[size - 3] for size in SIZES[1:]]
        np.testing.assert_allclose(1 / rates[list(SIZES[1:])], at_edges, rtol=1e-5)


def test_rates_are_a_staircase_or_the_lines_between_its_edges():
    curve = StepCurve(curve_of([1, 2, 4, 6, 10, 20]))
    stairs, lines = (1 / curve.rates(2, 256, SIZES, interpolate=each) for each in (False, True))
    # 8 tokens are measured, and 12.
    assert stairs[8:13].tolist() == pytest.approx([6, 10, 10, 10, 10])
    assert lines[8:13].tolist() == pytest.approx([6, 7, 8, 9, 10])


def test_algorithm_1_is_given_the_rates_it_asks_for():
    curve = StepCurve(curve_of([1, 2, 4, 6, 10, 20]))
    for interpolate in (False, True):
        planner = Planner(EarlyStop(interpolate=interpolate), block=7, curve=curve)
        assert planner.rates(2, 256).tolist() == curve.rates(2, 256, (2, 4, 8, 16), interpolate=interpolate).tolist()


def test_time_is_linear_between_spans_and_the_nearest_beyond():
    curve = StepCurve(curve_of([1] * 6) | curve_of([3] * 6, span=1280))
    found = [curve.seconds(2, span, 16, 7) for span in (100, 256, 768, 1280, 5000)]
    assert found == pytest.approx([1, 1, 2, 3, 3])
