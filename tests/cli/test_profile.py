"""`dspark profile` on the tiny golden model, its rounds timed by a script."""

import importlib.util
from types import SimpleNamespace

import pytest

from dspark_jax.cli import profile as verb
from dspark_jax.cli._step_curve import chosen
from dspark_jax.cli.main import main
from dspark_jax.decoding import measure as measuring
from dspark_jax.decoding.measure import plans
from dspark_jax.decoding.profile import Shape
from dspark_jax.decoding.profile_file import load_profile
from dspark_jax.engine.assembly import load_model
from dspark_jax.engine.launch import parse_arguments
from dspark_jax.interop.smollm2 import cache_root
from dspark_jax.training import compiler

SPANS = (256, 640)


@pytest.fixture(autouse=True)
def scripted(monkeypatch, tmp_path):
    """Every token takes a second, beside ten for a round; the states that were asked for."""
    asked = []

    def measure(programs, rows, span, *, block, rule, repeats, tell, clock):
        asked.append((rows, span, repeats))
        for plan, tokens in plans(rows, block, rule):
            yield Shape(rows, span, tokens, plan.drafts), 10.0 + tokens

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    return asked


@pytest.fixture
def flags(chat_target, golden):
    return ["--target", str(chat_target), "--draft", str(golden / "drafters" / "dspark_vanilla_llama")]


def refused(capsys, *flags):
    assert main(["profile", *flags]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


def test_serving_finds_what_was_measured(scripted, flags, capsys):
    assert main(["profile", *flags, "--max-batch", "2", "--repeats", "3"]) == 0
    out, err = capsys.readouterr()
    assert "Measuring 26 kinds of round" in err
    assert scripted == [(rows, span, 3) for rows in (1, 2) for span in SPANS]
    assert "1.1e+04" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "26 kinds of round, measured (median of 6 rounds" in err
    said = []
    model = load_model(parse_arguments([*flags, "--max-batch", "2"]), said.append)
    assert said[-1] == "Verification follows the load (two-step)."
    assert model.scheduling.curve.seconds(2, 256, 12, 5) == 22
    (file,) = (cache_root() / "profiles").glob("*.json")
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_smaller_run_says_what_it_leaves_in_place(flags, capsys):
    assert main(["profile", *flags, "--max-batch", "2"]) == 0
    assert main(["profile", *flags, "--max-batch", "1", "--spans", "256"]) == 0
    err = capsys.readouterr().err
    (file,) = (cache_root() / "profiles").glob("*.json")
    assert f"{file} keeps 21 other kinds of round that earlier runs left." in err
    assert "26 kinds of round, measured" in err.splitlines()[-1]


def test_a_place_that_cannot_be_written_is_said_before_anything_is_loaded(flags, tmp_path, capsys, read_only):
    read_only(tmp_path)
    assert f"{tmp_path} cannot be written: set DSPARK_CACHE to a writable" in refused(capsys, *flags)
    out = ["--out", str(tmp_path / "mine.json")]
    assert f"{tmp_path} cannot be written: name another file with --out" in refused(capsys, *flags, *out)
    assert "--out" in refused(capsys, *flags, *out, "--topology", "v5e:2x2")


def test_the_table_shows_what_the_scheduler_would_choose(flags, tmp_path, capsys):
    out = tmp_path / "mine.json"
    assert main(["profile", *flags, "--max-batch", "1", "--spans", "300,256", "--out", str(out)]) == 0
    capsys.readouterr()
    found = load_profile(out, fingerprint_of(flags))
    assert {shape.span for shape in found.curve.measured} == {256, 300}
    # Of 10 + tokens seconds, drafts that are kept nearly always pay up to the last, and others never.
    assert chosen(found, 1, 256, 0.99) == 6
    assert chosen(found, 1, 256, 0.01) == 1


def fingerprint_of(flags):
    model = load_model(parse_arguments(flags), lambda line: None)
    return verb.Fingerprint.of(model.target, model.drafter, dtype=model.dtype, rule=verb.Rule.TOKEN)


def test_mistakes_are_one_sentence(flags, capsys, monkeypatch):
    assert "--spans: 5000 is more than the 640 positions" in refused(capsys, *flags, "--spans", "256,5000")
    assert "there is no drafter" in refused(capsys, *flags[:2], "--draft", "none")
    assert "known kinds are" in refused(capsys, *flags, "--topology", "v9:1")
    assert "for TPUs only" in refused(capsys, *flags, "--topology", "h200:1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'jax[tpu]'" in refused(capsys, *flags, "--topology", "v5e:2x2")
    with pytest.raises(SystemExit):
        main(["profile", *flags, "--spans", "8"])
    assert "at least 16" in capsys.readouterr().err


def test_a_prediction_says_that_it_is_one(flags, tmp_path, capsys, monkeypatch):
    """The compiling processes are replaced; everything else happens."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    fingerprint = fingerprint_of(flags)

    class Pool:
        def __init__(self, *_, **__): ...

        def submit(self, call, subject):
            assert subject.kind == "v6e"
            assert subject.dtype == "bfloat16"
            return SimpleNamespace(result=lambda: fingerprint)

        def map(self, call, subjects, rows, spans, indices):
            for index, row, span in zip(indices, rows, spans, strict=False):
                plan, tokens = plans(row, 5)[index]
                yield Shape(row, span, tokens, plan.drafts), 1.0 + tokens

        def shutdown(self, cancel_futures):
            assert cancel_futures

    monkeypatch.setattr(compiler, "ProcessPoolExecutor", Pool)
    out = tmp_path / "v6e.json"
    assert main(["profile", *flags, "--topology", "v6e:2x2", "--max-batch", "1", "--out", str(out)]) == 0
    assert (
        "10 kinds of round, predicted (roofline of the program compiled for one v6e device" in capsys.readouterr().err
    )
    found = load_profile(out, fingerprint, predicted=True)
    assert found.predicted
    assert "918 TFLOP/s (bfloat16) and its bytes over 1638 GB/s" in found.method
    assert {shape.span for shape in found.curve.measured} == set(SPANS)
    with pytest.raises(ValueError, match="was predicted, not measured"):
        load_profile(out, fingerprint)
