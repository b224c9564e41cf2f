"""An append-only JSONL file that outlives the process writing it: the record of what is done."""

import fcntl
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TextIO


class Journal:
    """Rows with a `key` each, one flushed line a row; `keys` holds those already there.

    Opening repairs what a killed process left: half a last line is removed. One process at a time may hold it.
    ValueError when a whole line is not one of its rows; BlockingIOError when another process writes it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        make_room(self.path)
        self._file = open(self.path, "a+b")  # noqa: SIM115 (closed in __exit__)
        try:
            _lock(self._file, self.path)
            _repair_end(self._file)
            self.keys = {row["key"] for row in _rows(self._file, self.path)}
        except BaseException:
            self._file.close()
            raise

    def append(self, key: str, row: Mapping[str, Any]) -> None:
        """Writes the row as a whole line and flushes it."""
        line = json.dumps({"key": key, **row}, ensure_ascii=False) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        self.keys.add(key)

    def rows(self) -> list[dict[str, Any]]:
        """All rows in the order they were written."""
        return _rows(self._file, self.path)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def write_whole(path: str | Path, text: str) -> None:
    """Writes a text file that is either the old one or the whole new one, whenever the process is killed."""
    with whole_file(path) as file:
        file.write(text)


@contextmanager
def whole_file(path: str | Path) -> Generator[TextIO, None, None]:
    """Yields a text file that takes its place at `path` when the block ends without an error, and only then."""
    path = Path(path)
    make_room(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def make_room(path: Path) -> None:
    """The folder that a file is to be written to. OSError, before any work is done, where the file cannot be."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: give the name of a file")
    if taken := next((parent for parent in path.parents if parent.is_file()), None):
        raise NotADirectoryError(f"{taken} is a file, so {path} cannot be written")
    path.parent.mkdir(parents=True, exist_ok=True)


def require_writable(folder: Path, remedy: str) -> None:
    """OSError with the remedy, before any work is done, where no file can be made in a folder (which may be new)."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if os.path.exists(parent))
    if not os.path.isdir(there):
        raise NotADirectoryError(f"{there} is a file, not a folder: {remedy}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{there} cannot be written: {remedy}")


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(f"another process is writing {path}: wait for it or write to another file") from None


def _repair_end(file: BinaryIO) -> None:
    """Ends the file with a newline: after its last whole row, or after a last row that lacks only the newline."""
    size = file.seek(0, os.SEEK_END)
    start, tail = size, b""
    while start > 0 and b"\n" not in tail:
        start = max(0, start - 65536)
        file.seek(start)
        tail = file.read(size - start)
    rest = tail[tail.rfind(b"\n") + 1 :]
    if not rest:
        return
    try:
        json.loads(rest)
        file.write(b"\n")
    except ValueError:
        file.truncate(size - len(rest))
    file.flush()


def _rows(file: BinaryIO, path: Path) -> list[dict[str, Any]]:
    file.seek(0)
    rows = []
    for number, line in enumerate(file, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: the line is not JSON ({error}); repair or remove the file") from None
        if not isinstance(row, dict) or not isinstance(row.get("key"), str):
            raise ValueError(f"{path}:{number}: the row has no `key`, so this file is not one to continue")
        rows.append(row)
    return rows
