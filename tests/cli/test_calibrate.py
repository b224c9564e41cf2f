"""`dspark calibrate` on the tiny golden model: from prompts to a file that serving takes."""

import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from dspark_jax.cli import calibrate as verb
from dspark_jax.cli.main import main
from dspark_jax.decoding.calibration import MIN_OUTCOMES, calibrate
from dspark_jax.decoding.calibration_file import read_calibration
from dspark_jax.decoding.outcomes import Outcomes
from dspark_jax.engine.calibrated import load_estimator
from dspark_jax.interop.fingerprint import drafter_fingerprint

PROMPTS = [
    {"turns": ["Why?", "Never asked without the answer"]},
    {"messages": [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]},
    {"conversations": [{"from": "human", "value": "When?"}, {"from": "gpt", "value": "Now."}]},
    {"turns": ["Who?"]},
    {"turns": ["Why?"]},
    "nonsense",
]


@pytest.fixture(scope="module")
def drafter(golden, tmp_path_factory):
    directory = tmp_path_factory.mktemp("drafters") / "mine"
    shutil.copytree(golden / "drafters" / "dspark_vanilla_llama", directory)
    return directory


@pytest.fixture(scope="module")
def flags(chat_target, drafter, tmp_path_factory):
    data = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    flags = ["--target", str(chat_target), "--draft", str(drafter), "--data", str(data)]
    return [*flags, "--max-new-tokens", "160", "--batch", "4"]


@pytest.fixture(scope="module")
def said(flags):
    """What one run on the model says on its two streams."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert main(["calibrate", *flags, "--temperature", "0.8"]) == 0
    return out.getvalue(), err.getvalue()


@pytest.fixture
def outcomes(monkeypatch, drafter):
    """Nothing is loaded and decoded: these are the outcomes."""
    rng = np.random.default_rng(0)
    accepted_B = rng.binomial(3, 0.6, 900)
    rounds = Outcomes(
        evidence_BKF=rng.normal(size=(900, 3, 3)),
        verified_B=np.full(900, 3),
        accepted_B=accepted_B,
        prompt_B=np.arange(900) // 9,
    )
    monkeypatch.setattr(verb, "load_model", lambda args, say: SimpleNamespace(draft=drafter))
    monkeypatch.setattr(verb, "_decode", lambda *_: rounds)
    return rounds


def test_it_writes_what_serving_loads(said, drafter):
    fields = json.loads((drafter / "calibration.json").read_text())
    written = read_calibration(
        drafter / "calibration.json", fingerprint=drafter_fingerprint(drafter), block_size=fields["block_size"]
    )
    assert written.use == "sts"
    assert (written.measured.temperature, written.measured.max_new_tokens, written.measured.seed) == (0.8, 160, 0)
    assert written.measured.prompts == 4, "equal prompts are one, and of unanswered turns the first is asked"
    held_out = fields["held_out"]
    assert list(held_out) == ["raw", "sts", "combined"]
    first = held_out["raw"]["conditional"][0]
    assert 0 < first["outcomes"] < written.measured.rounds
    assert 0 < first["kept"] < first["outcomes"]
    # A draft is reached when the one before it was kept; of every round all drafts are verified.
    for before, after in pairwise(held_out["sts"]["conditional"]):
        assert after["outcomes"] == before["kept"]
    assert {each["outcomes"] for each in held_out["sts"]["cumulative"]} == {first["outcomes"]}
    assert (drafter / "reliability.png").read_bytes().startswith(b"\x89PNG")

    spoken = []
    for name, features in ((None, 1), ("sts", 1), ("combined", 3)):
        assert load_estimator(name, drafter, 5, spoken.append).weights_KF.shape == (5, features)
    assert [line.partition("(")[2].partition(",")[0] for line in spoken] == ["sts", "sts", "combined"]
    assert load_estimator("raw", drafter, 5, spoken.append) is None


def test_it_says_what_it_found_and_what_it_left_out(said):
    out, err = said
    assert [line.split()[0] for line in out.splitlines() if line.strip()[:1].isdigit()] == list("0123401234")
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "1 rows are left out; the first: " in err
    assert f"fewer than {MIN_OUTCOMES} were reached in the half that fits" in err
    assert "of 4 prompts; sts is what serving takes" in err


def test_the_choice_of_estimator_and_place_is_the_users(outcomes, flags, tmp_path, capsys):
    out = tmp_path / "elsewhere"
    assert main(["calibrate", *flags, "--estimator", "combined", "--out", str(out)]) == 0
    assert "100 prompts; combined is what serving takes" in capsys.readouterr().err
    fields = json.loads((out / "calibration.json").read_text())
    assert fields["estimator"] == "combined"
    fitting, held_out = outcomes.halves(0)
    assert fields["held_out"]["raw"]["cumulative"][1]["outcomes"] == held_out.rounds
    np.testing.assert_array_equal(fields["sts_temperatures"], calibrate(fitting).temperature_K)


def test_without_a_confidence_head_the_drafts_own_probabilities_are_taken(outcomes, flags, tmp_path, capsys):
    outcomes.evidence_BKF[..., 0] = 30
    out = tmp_path / "elsewhere"
    assert main(["calibrate", *flags, "--out", str(out)]) == 0
    fields = json.loads((out / "calibration.json").read_text())
    assert (fields["estimator"], fields["sts_temperatures"]) == ("combined", None)
    assert main(["calibrate", *flags, "--out", str(out), "--estimator", "sts"]) == 2
    assert "no confidence head, so --estimator sts cannot be" in capsys.readouterr().err


def test_a_calibration_of_another_drafter_is_refused_where_it_is_loaded(outcomes, flags, drafter, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(drafter, other)
    assert main(["calibrate", *flags, "--out", str(other)]) == 0
    assert load_estimator(None, other, 3, print) is not None
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"note": 1}))
    with pytest.raises(ValueError, match=r"drafter is .* it was measured with another drafter: run `dspark calibrate`"):
        load_estimator(None, other, 3, print)
    (other / "calibration.json").unlink()
    assert load_estimator(None, other, 3, print) is None
    with pytest.raises(ValueError, match=r"--estimator sts needs .*calibration\.json"):
        load_estimator("sts", other, 3, print)


def test_mistakes_are_one_sentence(outcomes, flags, monkeypatch, capsys):
    def refused(*more):
        assert main(["calibrate", *flags, *more]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert "--temperature is a number from 0 up" in refused("--temperature", "-1")
    assert "none.jsonl: No such file" in refused("--data", "none.jsonl")
    monkeypatch.setattr(verb, "load_model", lambda args, say: SimpleNamespace(draft=None))
    assert "there is no drafter to calibrate" in refused()


def test_a_place_that_cannot_be_written_is_said_before_anything_is_decoded(
    outcomes, flags, drafter, monkeypatch, capsys, read_only
):
    monkeypatch.delattr(verb, "_decode")
    read_only(drafter)
    assert main(["calibrate", *flags]) == 2
    assert f"{drafter} cannot be written: copy the drafter" in capsys.readouterr().err
    assert main(["calibrate", *flags, "--out", str(drafter / "mine")]) == 2
    assert f"{drafter} cannot be written: name another directory with --out" in capsys.readouterr().err


def test_too_few_prompts_are_refused(flags, tmp_path, capsys):
    lonely = tmp_path / "lonely.jsonl"
    lonely.write_text('{"turns": ["One?"]}\n' * 3)
    assert main(["calibrate", *flags, "--data", str(lonely)]) == 2
    assert "has 1 different prompts that leave room for --max-new-tokens 160 within 512" in capsys.readouterr().err


def test_prompts_without_room_for_an_answer_are_counted(flags, tmp_path, capsys):
    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("One?", "One " * 600, "Two " * 600)))
    assert main(["calibrate", *flags, "--data", str(long)]) == 2
    assert "2 prompts are left out: with 160 new tokens they exceed 512." in capsys.readouterr().err


@pytest.mark.parametrize(("fitting", "code"), [(MIN_OUTCOMES - 1, 2), (MIN_OUTCOMES, 0)])
def test_what_too_few_rounds_would_say_replaces_nothing(outcomes, flags, monkeypatch, tmp_path, capsys, fitting, code):
    few = outcomes.take(np.arange(900) < fitting)
    monkeypatch.setattr(Outcomes, "halves", lambda self, seed: (few, self))
    (tmp_path / "calibration.json").write_text("before")
    assert main(["calibrate", *flags, "--out", str(tmp_path)]) == code
    assert ((tmp_path / "calibration.json").read_text() == "before") == (code == 2)
    assert (f"{fitting} rounds in the half that fits are too few" in capsys.readouterr().err) == (code == 2)


def test_an_interrupt_leaves_what_was_there(outcomes, flags, monkeypatch, tmp_path, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    (tmp_path / "calibration.json").write_text("before")
    monkeypatch.setattr(verb, "calibrate", interrupted)
    assert main(["calibrate", *flags, "--out", str(tmp_path)]) == 130
    assert "Interrupted. Nothing is written: the same command starts over." in capsys.readouterr().err
    assert (tmp_path / "calibration.json").read_text() == "before"


def test_it_says_what_a_calibration_takes_the_place_of(outcomes, flags, tmp_path, capsys):
    said = []
    for _ in range(2):
        assert main(["calibrate", *flags, "--out", str(tmp_path)]) == 0
        said.append("They replace a calibration of 900 rounds." in capsys.readouterr().err)
    assert said == [False, True]
