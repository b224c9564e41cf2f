"""Measuring rounds: what is asked for is what runs, and an interrupted run goes on."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dspark_jax.core.signals import last_words
from dspark_jax.decoding import round as round_module
from dspark_jax.decoding.fingerprint import Fingerprint
from dspark_jax.decoding.measure import default_spans, fill, measure, plans, profile, row_buckets, typical_seconds
from dspark_jax.decoding.profile import Shape
from dspark_jax.decoding.profile_file import load_profile
from dspark_jax.decoding.programs import Programs
from dspark_jax.decoding.rejection import Rule

BLOCK = 2


@pytest.fixture(scope="module")
def fingerprint(five):
    return Fingerprint.of(*five, dtype="float32", rule=Rule.TOKEN)


@pytest.fixture(scope="module")
def measured(five, fingerprint, tmp_path_factory):
    """Rounds of 2 rows of 40 positions that take 1000 s the first time and then 5, 7, 7, 100, 7 and 1 s, all four plans
    in turn: path, profile, what was packed."""
    path = tmp_path_factory.mktemp("profile") / "curve.json"
    elapsed = iter([each for turn in (1000.0, 5.0, 7.0, 7.0, 100.0, 7.0, 1.0) for each in [0.0, turn] * 4])
    now, packed, seen, laws, told = [0.0], [], [], [], []
    packing = round_module.packing

    def clock():
        now[0] += next(elapsed)
        return now[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_module, "packing", lambda *shape: packed.append(shape[1:]) or packing(*shape))
        patch.setattr("dspark_jax.decoding.measure.row_buckets", lambda max_batch: (max_batch,))
        programs = Programs(*five, dtype="float32")
        run = programs.round

        def spied(plan, state, guide, draws):
            laws.append((state.position_B.tolist(), state.law.temperature_B.tolist()))
            return run(plan, state, guide, draws)

        patch.setattr(programs, "round", spied)
        options = {"max_batch": 2, "spans": (40,), "repeats": 3, "clock": clock}
        options |= {"watch": lambda done, already: seen.append((done, already)), "tell": told.append}
        found = profile(path, fingerprint, programs, **options)
    return SimpleNamespace(path=path, profile=found, packed=packed, seen=seen, laws=laws, told=told)


def test_d_31_the_widths_that_are_asked_for_are_the_widths_that_are_measured(measured):
    shapes = list(measured.profile.curve.measured)
    assert shapes == [Shape(2, 40, 2, 0), Shape(2, 40, 4, 1), Shape(2, 40, 4, 2), Shape(2, 40, 6, 2)]
    assert [(shape.tokens, shape.drafts) for shape in shapes] == [(size, p.drafts) for p, size in plans(2, BLOCK)]
    assert measured.packed == [(BLOCK + 1, 4)], "the budget of 4 tokens is computed on an axis of 4"


def test_every_round_is_of_a_full_state_that_samples_over_contexts_of_all_lengths(measured):
    # Four plans, three times there and back, after a turn before them.
    assert len(measured.laws) == 4 * (1 + 2 * 3)
    longest = 40 - BLOCK - 1
    assert all(law == ([longest // 2, longest], [1.0, 1.0]) for law in measured.laws)


@pytest.mark.parametrize(("span", "in_a_row"), [(3, 1), (12, 3), (90, 16)])
def test_where_programs_wait_for_none_rounds_are_timed_from_end_to_end_after_one_of_their_kind(
    five, span, in_a_row, monkeypatch
):
    monkeypatch.setattr("dspark_jax.decoding.measure.plans", lambda *args: plans(*args)[:1])
    programs = Programs(*five, dtype="float32")
    programs.branch_free = True
    run, heard, now = programs.round, [], [0.0]

    def spied(*args):
        heard.append("start")
        state, sent = run(*args)
        said = sent.read()

        def read():
            heard.append("read")
            # A thousand seconds to the first end, one to each that follows.
            now[0] += 1000.0 if heard.count("read") % (in_a_row + untimed) == 1 and untimed else 1.0
            return said

        return state, SimpleNamespace(read=read)

    untimed = int(span > BLOCK + 1)
    programs.round = spied
    found = list(measure(programs, 1, span, block=BLOCK, rule=Rule.TOKEN, repeats=1, clock=lambda: now[0]))
    one_run = ["start", *["start", "read"] * (untimed + in_a_row - 1), "read"]
    assert heard == one_run * 5
    assert [seconds for _, seconds in found] == [pytest.approx(1.0)]


def test_the_median_is_taken_after_a_round_that_compiles(measured):
    assert list(measured.profile.curve.measured.values()) == pytest.approx([7.0] * 4)
    assert "median of 6" in measured.profile.method


def test_neither_a_slow_turn_nor_a_round_that_was_held_up_favours_a_plan():
    true_P, pace_N = np.array([1.0, 3.0, 4.0]), np.array([1.0, 1.0, 2.0, 4.0, 8.0, 2.0])
    seconds_NP = pace_N[:, None] * true_P
    np.testing.assert_allclose(typical_seconds(seconds_NP), 2 * true_P)
    seconds_NP[0, 1] *= 8
    found_P = typical_seconds(seconds_NP)
    np.testing.assert_allclose(found_P / found_P[0], true_P)


def test_what_was_measured_is_written_and_nothing_partial_stays(measured, fingerprint):
    assert load_profile(measured.path, fingerprint) == measured.profile
    assert list(measured.path.parent.iterdir()) == [measured.path]
    assert measured.seen == [(1, 0), (2, 0), (3, 0), (4, 0)]
    assert measured.told == [
        *(f"{done} of the next 4 compiled" for done in range(1, 5)),
        *(f"the next 4 timed {turn} of 6 times" for turn in range(1, 7)),
    ]


def script(asked, stop_at=None):
    """Rounds that take no time at all."""

    def rounds_of(rows, span):
        if (rows, span) == stop_at:
            raise KeyboardInterrupt
        asked.append((rows, span))
        for plan, tokens in plans(rows, BLOCK):
            yield Shape(rows, span, tokens, plan.drafts), float(rows + span)

    return rounds_of


def test_an_interrupted_run_goes_on_where_it_was(fingerprint, tmp_path):
    path, asked = tmp_path / "curve.json", []
    options = {"max_batch": 4, "spans": (256, 512), "method": "by script"}
    with pytest.raises(KeyboardInterrupt) as ended:
        fill(path, fingerprint, script(asked, stop_at=(2, 512)), **options)
    assert "The 10 kinds of round measured so far are kept" in last_words("", ended.value)
    assert not path.exists()
    assert asked == [(1, 256), (1, 512), (2, 256)]
    seen = []
    found = fill(path, fingerprint, script(asked), **options, watch=lambda *counts: seen.append(counts))
    assert asked == [(1, 256), (1, 512), (2, 256), (2, 512), (4, 256), (4, 512)]
    assert seen[-1] == (len(found.curve.measured), 10) == (22, 10)
    assert found == load_profile(path, fingerprint)


def test_what_was_measured_in_another_way_is_not_gone_on_with_and_that_is_said(fingerprint, tmp_path):
    path, asked, said = tmp_path / "curve.json", [], []
    for stop_at, words in (((1, 256), "Nothing was measured"), ((2, 256), "The 3 kinds of round")):
        with pytest.raises(KeyboardInterrupt) as ended:
            fill(path, fingerprint, script(asked, stop_at), max_batch=2, spans=(256,), method="one", say=said.append)
        assert words in last_words("", ended.value)
    assert said == []
    fill(path, fingerprint, script(asked), max_batch=2, spans=(256,), method="two", say=said.append)
    assert asked == [(1, 256), (1, 256), (2, 256)]
    assert said == ["The 3 kinds of round that an interrupted run timed in another way (one) are timed anew."]


def test_what_an_interrupted_run_of_another_machine_left_is_refused(fingerprint, tmp_path):
    path = tmp_path / "curve.json"
    with pytest.raises(KeyboardInterrupt):
        fill(path, fingerprint, script([], stop_at=(2, 256)), max_batch=2, spans=(256,), method="m")
    with pytest.raises(ValueError, match=r"and here it is another; .* or remove what an interrupted run left"):
        fill(path, replace(fingerprint, device="another"), script([]), max_batch=2, spans=(256,), method="m")


def test_a_smaller_run_keeps_what_a_fuller_one_knows(fingerprint, tmp_path):
    path, said = tmp_path / "curve.json", []

    def run(seconds, **options):
        def rounds_of(rows, span):
            return ((shape, seconds) for shape, _ in script([])(rows, span))

        return fill(path, fingerprint, rounds_of, say=said.append, **options)

    fuller = run(1.0, max_batch=4, spans=(256, 512), method="one")
    assert said == []
    merged = run(2.0, max_batch=2, spans=(512, 640), method="two")
    assert load_profile(path, fingerprint) == merged
    renewed = {(rows, span) for rows in (1, 2) for span in (512, 640)}
    for shape, seconds in merged.curve.measured.items():
        assert seconds == (2.0 if (shape.rows, shape.span) in renewed else 1.0)
    assert set(fuller.curve.measured) < set(merged.curve.measured)
    kept = sum((shape.rows, shape.span) not in renewed for shape in merged.curve.measured)
    assert said == [f"{path} keeps {kept} other kinds of round that earlier runs left."]
    assert merged.method == "two; also one"
    assert run(3.0, max_batch=2, spans=(256,), method="one").method == "one; also two"
    # Nothing of another way is left.
    assert run(4.0, max_batch=4, spans=(256, 512, 640), method="three").method == "three"


def test_what_a_longer_run_left_when_it_was_interrupted_is_kept_too(fingerprint, tmp_path):
    path = tmp_path / "curve.json"
    with pytest.raises(KeyboardInterrupt):
        fill(path, fingerprint, script([], stop_at=(4, 256)), max_batch=4, spans=(256,), method="m")
    found = fill(path, fingerprint, script([]), max_batch=1, spans=(256,), method="m")
    assert {shape.rows for shape in found.curve.measured} == {1, 2}


def test_a_file_that_cannot_be_added_to_is_not_written_over(fingerprint, tmp_path):
    path, asked = tmp_path / "curve.json", []
    options = {"max_batch": 1, "spans": (256,), "method": "m"}
    fill(path, fingerprint, script([]), **options)
    mine, other = path.read_text(), replace(fingerprint, device="another")
    for words, text, arguments in (
        ("its device is .*, and here it is another; .*, or name another file with --out", mine, {"fingerprint": other}),
        ("was measured, not predicted: .*name another file with --out", mine, {"predicted": True}),
        ("is not valid JSON .*: remove it and .*, or name another file with --out", mine[:-9], {}),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            fill(path, arguments.pop("fingerprint", fingerprint), script(asked), **options, **arguments)
        assert path.read_text() == text
    assert asked == [], "it is known before anything is measured"


def test_states_are_those_that_serving_holds():
    assert row_buckets(1) == (1,)
    assert row_buckets(6) == (1, 2, 4, 6)
    assert default_spans(60, 3, on_cpu=True) == (64,)
    assert default_spans(8192, 7, on_cpu=True) == (256, 2048)
    assert default_spans(8192, 7, on_cpu=False) == (256, 2048, 8192)
    assert default_spans(4000, 7, on_cpu=False) == (256, 2048, 4096)
