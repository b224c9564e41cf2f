"""Which policy is served: by the flags, by the drafter, and by the step curve that this machine has."""

import argparse
from dataclasses import replace

import pytest

from dspark_jax.core import logs
from dspark_jax.decoding.fingerprint import Fingerprint
from dspark_jax.decoding.profile import Shape, StepCurve
from dspark_jax.decoding.profile_file import Profile, save_profile
from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.scheduler import EarlyStop, FixedLength, Threshold, TwoStep
from dspark_jax.drafters.base import NoDrafter
from dspark_jax.engine import scheduling
from dspark_jax.engine.scheduling import (
    NO_FLAGS,
    Scheduling,
    Subject,
    add_scheduling_arguments,
    choose_scheduling,
    knows_chances,
    profile_path,
)

CURVE = StepCurve({Shape(1, 256, 1, 0): 1.0, Shape(1, 256, 6, 5): 2.0})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))


@pytest.fixture
def subject(tiny_target, tiny_drafter):
    return Subject(target=tiny_target, drafter=tiny_drafter, dtype="float32", confident=True)


@pytest.fixture
def mine(subject):
    return Fingerprint.of(subject.target, subject.drafter, dtype="float32", rule=Rule.TOKEN)


@pytest.fixture
def profile(mine):
    return Profile(fingerprint=mine, curve=CURVE, method="by hand")


@pytest.fixture
def choose(subject):
    def run(*flags, subject=subject, max_batch=1):
        parser = argparse.ArgumentParser()
        add_scheduling_arguments(parser)
        said = []
        args = parser.parse_args([str(flag) for flag in flags])
        found = choose_scheduling(args, subject, max_batch=max_batch, max_len=500, say=said.append)
        return found, said

    return run


def test_without_a_curve_every_draft_is_verified_and_it_says_so(choose):
    fixed = Scheduling(policy=FixedLength())
    assert choose() == (fixed, ["Every draft is verified (fixed; `dspark profile` lets that follow the load)."])
    assert choose("--step-curve", "none") == (fixed, ["Every draft is verified (fixed)."])
    assert choose("--policy", "fixed") == (fixed, ["Every draft is verified (fixed)."])


def test_a_curve_of_this_machine_is_found_and_followed(choose, profile, mine):
    save_profile(profile_path(mine), profile)
    assert choose() == (
        Scheduling(policy=TwoStep(), curve=CURVE),
        ["Verification follows the load (two-step)."],
    )
    assert choose("--policy", "early-stop")[0] == Scheduling(policy=EarlyStop(interpolate=True), curve=CURVE)
    assert choose("--policy", "fixed")[0].curve is None
    assert choose("--step-curve", "none")[0].policy == FixedLength()
    assert choose("--rule", "block")[0] == Scheduling(rule=Rule.BLOCK), "its rounds take another time"
    too_small = "holds rounds of at most 1 request; rounds of more are taken to last as long."
    assert choose(max_batch=2)[1][0] == f"{profile_path(mine)} {too_small}"


def test_a_curve_is_of_no_use_without_confidences(choose, profile, mine, subject):
    save_profile(profile_path(mine), profile)
    silent = replace(subject, confident=False)
    assert choose(subject=silent) == (Scheduling(), ["Every draft is verified (fixed)."])
    for flags in (["--policy", "two-step"], ["--confidence-threshold", 0.5], ["--step-curve", "measure"]):
        with pytest.raises(ValueError, match=f"{flags[0]}.* needs a drafter with a confidence head or a calibration"):
            choose(*flags, subject=silent)


def test_chances_are_known_by_a_head_or_a_calibration(tiny_drafter):
    headless = replace(tiny_drafter.config, confidence=False)
    assert knows_chances(tiny_drafter.config, calibrated=False)
    assert not knows_chances(headless, calibrated=False)
    assert not knows_chances(None, calibrated=False)
    assert knows_chances(headless, calibrated=True)


def test_a_curve_that_is_named_is_taken_or_refused_by_the_field(choose, profile, tmp_path):
    file = tmp_path / "curve.json"
    save_profile(file, profile)
    assert choose("--step-curve", file)[0] == Scheduling(policy=TwoStep(), curve=CURVE)
    save_profile(file, replace(profile, predicted=True))
    found, said = choose("--step-curve", file)
    assert found.curve == CURVE
    assert said[0] == f"{file} was predicted, not measured: by hand."
    save_profile(file, replace(profile, fingerprint=replace(profile.fingerprint, jax="0.0.1")))
    with pytest.raises(ValueError, match=r"its jax is 0\.0\.1, and here it is"):
        choose("--step-curve", file)
    with pytest.raises(OSError, match=r"--step-curve .*none\.json: there is no such file; `dspark profile` writes one"):
        choose("--step-curve", tmp_path / "none.json")


def test_a_damaged_file_in_the_cache_keeps_nobody_from_serving(choose, mine):
    profile_path(mine).parent.mkdir()
    profile_path(mine).write_text("{")
    found, said = choose()
    assert found.policy == FixedLength()
    assert "is not valid JSON" in said[0]
    with pytest.raises(ValueError, match="is not valid JSON"):
        choose("--policy", "two-step")


def test_a_prediction_in_the_cache_is_not_taken_for_a_measurement(choose, profile, mine):
    save_profile(profile_path(mine, predicted=True), replace(profile, predicted=True))
    found, said = choose()
    assert found.policy == FixedLength()
    assert len(said) == 1, "nothing lies where the measurement would"


def test_a_curve_can_be_measured_at_the_start(choose, profile, mine, monkeypatch):
    asked = []

    def measured(path, fingerprint, programs, **options):
        asked.append((path, fingerprint, options))
        options["watch"](13, 0)
        options["tell"]("1 of the next 8 compiled")
        return profile

    monkeypatch.setattr(scheduling, "profile", measured)
    monkeypatch.setattr(logs, "_SECONDS_BETWEEN_LINES", 0.0)
    found, said = choose("--step-curve", "measure", max_batch=2)
    assert found == Scheduling(policy=TwoStep(), curve=CURVE)
    options = asked[0][2]
    assert asked[0][:2] == (profile_path(mine), mine)
    assert (options["max_batch"], options["spans"]) == (2, (256, 512))
    assert str(profile_path(mine)) in said[0]
    assert said[1] == "13 of 26 kinds of round are measured, 1 of the next 8 compiled ..."


def test_lengths_and_thresholds_name_their_policy(choose):
    assert choose("--verify-length", 3) == (
        Scheduling(policy=FixedLength(length=3)),
        ["Drafts verified a round: 3 (fixed)."],
    )
    assert choose("--policy", "fixed", "--verify-length", 0)[0].policy == FixedLength(length=0)
    assert choose("--verify-length", 5)[1] == ["Every draft is verified (fixed)."]
    assert choose("--confidence-threshold", 0.25) == (
        Scheduling(policy=Threshold(confidence=0.25)),
        ["Drafts before the first whose confidence is under 0.25 are verified (threshold)."],
    )


def test_where_no_flags_are_offered_nothing_is_said(subject):
    said = []
    found = choose_scheduling(argparse.Namespace(**NO_FLAGS), subject, max_batch=1, max_len=500, say=said.append)
    assert (found, said) == (Scheduling(), [])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--verify-length", 6], "--verify-length 6 is more than the drafter's block of 5"),
        (["--policy", "two-step", "--verify-length", 2], "--verify-length belongs to --policy fixed, not to two-step"),
        (["--verify-length", 2, "--confidence-threshold", 0.5], "belongs to --policy fixed, not to threshold"),
        (["--policy", "fixed", "--confidence-threshold", 0.5], "belongs to --policy threshold, not to fixed"),
        (["--policy", "threshold"], "--policy threshold needs --confidence-threshold P"),
        (["--policy", "two-step"], "needs a step curve, and none was measured"),
        (["--policy", "early-stop", "--step-curve", "none"], "--step-curve none forgoes it: give one of them"),
        (["--policy", "fixed", "--step-curve", "measure"], "--step-curve is for --policy two-step and early-stop"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(choose, flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        choose(*flags)


def test_without_a_drafter_there_is_nothing_to_choose(choose, subject):
    alone = replace(subject, drafter=NoDrafter(), confident=False)
    assert choose(subject=alone) == (Scheduling(), [])
    with pytest.raises(ValueError, match="--policy two-step needs a drafter"):
        choose("--policy", "two-step", subject=alone)
