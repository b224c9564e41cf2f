"""`serve.py`: flags, refusals at start, and signals, the latter on a real process."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from dspark_jax.decoding.fingerprint import Fingerprint
from dspark_jax.decoding.profile import Shape, StepCurve
from dspark_jax.decoding.profile_file import Profile, save_profile
from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.scheduler import FixedLength, Threshold, TwoStep
from dspark_jax.engine import assembly
from dspark_jax.engine.launch import compiling, main, parse_arguments
from dspark_jax.interop import huggingface
from dspark_jax.interop.drafter_kinds import abstract_drafter
from dspark_jax.interop.drafters import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def refused(capsys):
    """Runs `main` with flags it must refuse; the sentence."""

    def run(*flags):
        assert main(list(flags)) == 2
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        assert said.err.count("\n") == 1
        return said.err

    return run


@pytest.fixture
def bad_flags(capsys):
    def run(*flags):
        with pytest.raises(SystemExit) as left:
            parse_arguments(list(flags))
        assert left.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return run


def test_defaults_are_loopback_and_the_default_target():
    args = parse_arguments([])
    assert (args.host, args.port, args.target, args.draft) == ("127.0.0.1", 8000, "smollm2_135m", None)


@pytest.mark.parametrize(
    ("policy", "block", "max_batch", "words"),
    [
        (FixedLength(), 7, 4, "for up to 4 requests at once (7 drafts a round)"),
        (FixedLength(length=3), 7, 4, "(3 drafts a round)"),
        (FixedLength(length=1), 7, 4, "(1 draft a round)"),
        (FixedLength(length=0), 7, 4, "(no drafts)"),
        (FixedLength(), 0, 1, "for 1 request at a time (no drafts)"),
        (Threshold(confidence=0.5), 7, 4, "(7 drafts a round)"),
        (TwoStep(), 7, 4, "(up to 7 drafts a round)"),
    ],
)
def test_the_start_says_what_is_drafted_and_for_how_many(policy, block, max_batch, words):
    assert words in compiling(policy, block=block, max_batch=max_batch)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-batch", "0"], "at least 1"),
        (["--max-queue", "-1"], "at least 0"),
        (["--max-len", "1e3"], "at least 2"),
        (["--port", "70000"], "at most 65535"),
        (["--dtype", "int8"], "float32"),
        (["--api-key", " "], "empty"),
        (["--confidence-threshold", "1.5"], "from 0 to 1"),
        (["--confidence-threshold", "nan"], "from 0 to 1"),
        (["--policy", "best"], "two-step"),
        (["--verify-length", "-1"], "at least 0"),
        (["--rule", "none"], "block"),
    ],
)
def test_a_flag_out_of_range_is_refused_by_name(bad_flags, flags, words):
    sentence = bad_flags(*flags)
    assert flags[0] in sentence
    assert words in sentence


def test_a_busy_port_is_said_before_anything_is_loaded(refused, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        sentence = refused("--port", str(port), "--target", str(tmp_path))
    assert f"port {port}" in sentence
    assert "--port" in sentence


def test_an_address_of_another_machine_is_refused(refused, tmp_path):
    assert "--host" in refused("--host", "192.0.2.1", "--port", "0", "--target", str(tmp_path))


def test_a_directory_that_is_no_model_is_refused(refused, tmp_path):
    assert str(tmp_path) in refused("--port", "0", "--target", str(tmp_path))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda draft: shutil.rmtree(draft), "no such directory"),
        (lambda draft: (draft / "config.json").unlink(), "has no config.json"),
        (lambda draft: (draft / "config.json").write_text("{"), "is not valid JSON"),
        (lambda draft: edit(draft / "config.json", num_target_layers=9), "its num_target_layers is 9"),
        (lambda draft: edit(draft / "config.json", block_size=0), "block_size 0"),
        (lambda draft: (draft / "model.safetensors").unlink(), "neither model.safetensors"),
        (lambda draft: (draft / "model.safetensors").write_bytes(b""), "model.safetensors is damaged"),
    ],
)
def test_a_drafter_is_refused_by_what_is_wrong_before_the_target_is_loaded(
    refused, tiny_target_dir, tiny_drafter_dir, tmp_path, monkeypatch, spoil, words
):
    monkeypatch.delattr(huggingface, "load_target")
    draft = tmp_path / "draft"
    shutil.copytree(tiny_drafter_dir, draft)
    spoil(draft)
    sentence = refused("--port", "0", "--target", str(tiny_target_dir), "--draft", str(draft))
    assert words in sentence
    assert sentence.count(str(draft)) <= 1


def edit(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_more_context_than_the_target_has_is_refused(refused, tiny_target_dir):
    assert "512" in refused("--port", "0", "--target", str(tiny_target_dir), "--max-len", "513")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--policy", "two-step"], "run `dspark profile`, or give --step-curve measure"),
        (["--policy", "threshold"], "--policy threshold needs --confidence-threshold P"),
        (["--verify-length", "9"], "more than the drafter's block of 5"),
        (["--step-curve", "nowhere.json"], "nowhere.json: there is no such file"),
        (["--step-curve", "broken.json"], "broken.json is not valid JSON"),
        (["--step-curve", "other.json"], "other.json is the step curve of something else: its target is another"),
        (["--policy", "two-step", "--step-curve", "other.json"], "and here it is llama "),
        (["--estimator", "sts"], "--estimator sts needs"),
        (["--step-curve", "curve.json"], "load_target"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_before_the_target_is_loaded(
    refused, tiny_target_dir, tiny_drafter_dir, tmp_path, monkeypatch, flags, sentence
):
    def load_target(*_, **__):
        raise ValueError("load_target")

    monkeypatch.setattr(huggingface, "load_target", load_target)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    mine = Fingerprint.expected(
        huggingface.read_spec(tiny_target_dir),
        abstract_drafter(load_config(tiny_drafter_dir), "float32"),
        dtype="float32",
        rule=Rule.TOKEN,
    )
    curve = StepCurve({Shape(1, 256, 1, 0): 1.0, Shape(1, 256, 6, 5): 2.0})
    for name, target in (("curve.json", mine.target), ("other.json", "another")):
        save_profile(Path(name), Profile(fingerprint=replace(mine, target=target), curve=curve, method="by hand"))
    Path("broken.json").write_text("{")
    model = ["--target", str(tiny_target_dir), "--draft", str(tiny_drafter_dir)]
    assert sentence in refused("--port", "0", *model, *flags)


def test_a_cache_that_cannot_be_written_is_said_with_what_to_do(
    refused, tiny_target_dir, tiny_drafter_dir, tmp_path, monkeypatch, read_only
):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    monkeypatch.delattr(huggingface, "load_target")
    read_only(tmp_path)
    model = ["--target", str(tiny_target_dir), "--draft", str(tiny_drafter_dir)]
    sentence = f"{tmp_path} cannot be written: set DSPARK_CACHE to a writable directory"
    assert sentence in refused("--port", "0", *model, "--step-curve", "measure")
    monkeypatch.setattr(assembly, "jax", SimpleNamespace(config=SimpleNamespace()))
    said = []
    assembly.remember_compilations(said.append)
    assert said == [f"Compiled programs are not kept: {sentence}."]


def test_a_threshold_without_a_confidence_head_is_refused(refused, tiny_target_dir, monkeypatch):
    monkeypatch.delattr(huggingface, "load_target")
    sentence = refused(
        "--port", "0", "--target", str(tiny_target_dir), "--draft", "none", "--confidence-threshold", "0.5"
    )
    assert "--confidence-threshold" in sentence


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Shared, so that only the first process compiles."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def talkative_target(tiny_target_dir, tmp_path_factory):
    """It hardly ever ends an answer by itself: its end-of-turn token is one that training never used."""
    directory = tmp_path_factory.mktemp("talkative") / tiny_target_dir.name
    shutil.copytree(tiny_target_dir, directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": 0}')
    return directory


@pytest.fixture
def process(talkative_target, tiny_drafter_dir, cache):
    """serve.py as a user runs it; its lines can be read as they come."""
    started = []

    def start(*flags):
        command = [sys.executable, str(ROOT / "serve.py"), "--target", str(talkative_target), "--max-batch", "1"]
        command += ["--draft", str(tiny_drafter_dir), "--port", "0", *flags]
        # The tests' own cache of compilations would take the place of the one that is looked at.
        inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        environment = {**inherited, "DSPARK_CACHE": str(cache), "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
        started.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def read_until(process, pattern):
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"no line matched {pattern}")


def test_serves_then_ends_with_code_0_on_ctrl_c(process, cache, client):
    server = process()
    url = read_until(server, r"Ready: (http://\S+)/v1 serves 'llama_tiny'")[1]
    body = {"model": "llama_tiny", "prompt": "hello", "max_tokens": 200, "temperature": 0, "stream": True}
    with client.stream("POST", url + "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.send_signal(signal.SIGINT)
        assert [line for line in lines if line][-1] == "data: [DONE]", "accepted work is finished"
    rest, _ = server.communicate(timeout=20)
    assert server.returncode == 0
    assert rest.splitlines()[-1] == "Stopped."
    assert "Traceback" not in rest
    with pytest.raises(httpx.ConnectError):
        client.get(url + "/health")
    assert any((cache / "compiled").iterdir()), "the next start finds what this one compiled"


def test_a_signal_during_the_start_ends_with_code_0(process):
    server = process("--host", "0.0.0.0")
    assert next(server.stdout).startswith("Loading the target"), "nothing is said before, by no library either"
    read_until(server, "Anyone who can reach 0.0.0.0 can use this server: --api-key")
    read_until(server, "Compiling")
    server.send_signal(signal.SIGTERM)
    rest, _ = server.communicate(timeout=20)
    assert server.returncode == 0
    assert "Traceback" not in rest


def test_a_second_ctrl_c_ends_it_at_once(process, client):
    server = process("--max-queue", "200")
    url = read_until(server, r"Ready: (http://\S+)/v1")[1]
    body = {"model": "llama_tiny", "prompt": "hello", "n": 200, "temperature": 1.5}
    with client.stream("POST", url + "/v1/completions", json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        server.send_signal(signal.SIGINT)
        read_until(server, "Ctrl-C again")
        server.send_signal(signal.SIGINT)
        rest, _ = server.communicate(timeout=5)
    assert server.returncode == 0
    assert "Traceback" not in rest
