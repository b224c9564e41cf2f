"""Directories and pictures that appear whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTIAL = ".partial"
# Results of calibrating what the directory held. They say nothing of what replaces it, and go with it.
_MEASURED = frozenset({"calibration.json", "reliability.png"})


@contextmanager
def whole_directory(final: Path) -> Generator[Path, None, None]:
    """Yields a fresh directory beside `final` that takes its place when the block ends without an error.

    A process that dies inside the block leaves `final` as it was and a `*.partial` directory beside it. (One that
    dies between the two renames of a replacement leaves no `final`, and both the old and the new one beside it.)
    An existing `final` is replaced only when the new one has every file that it has, but for a calibration, so that a
    mistyped path cannot delete anything else: FileExistsError otherwise.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.", suffix=PARTIAL))
    try:
        yield partial
        _open_up(partial)
        _take_place(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_picture(figure: "Figure", path: Path) -> None:
    """Writes a PNG, the same bytes for the same figure."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(partial, format="png", metadata={"Software": None})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _take_place(partial: Path, final: Path) -> None:
    if not final.exists():
        os.rename(partial, final)
        return
    if not final.is_dir():
        raise FileExistsError(f"{final} is a file: give the path of a directory")
    others = sorted({entry.name for entry in final.iterdir()} - {entry.name for entry in partial.iterdir()} - _MEASURED)
    if others:
        raise FileExistsError(
            f"{final} holds files that would be lost ({', '.join(others[:3])}): give a new or empty directory"
        )
    replaced = partial.with_name(f"{partial.name}.replaced{PARTIAL}")
    os.rename(final, replaced)
    os.rename(partial, final)
    shutil.rmtree(replaced)


def _open_up(directory: Path) -> None:
    """Gives the modes that plain writing would have: temporary directories and safetensors files are private."""
    mask = os.umask(0o022)
    os.umask(mask)
    directory.chmod(0o777 & ~mask)
    for file in directory.iterdir():
        file.chmod((0o777 if file.is_dir() else 0o666) & ~mask)
