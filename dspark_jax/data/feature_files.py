"""Arrays of numbered rows in ArrayRecord files: a cache that a killed process leaves usable, and that has a bound."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

_KEY = "key.json"
_SUFFIX = ".arrayrecord"
_FILE_BYTES = 256 * 2**20
# What the format adds, from above: whole blocks of 64 KiB, two of them for the index, a head for every record.
_BLOCK, _HEAD, _PER_BLOCK = 2**16, 64, 64


class FeatureFiles:
    """Rows are kept in memory until they fill a file, which appears whole or not at all.

    key: what the arrays depend on, by field. layout: shape and dtype of each array of a row.
    writer: begins the names of this process's files; writers: how many processes write to the folder. Rows are found
    whoever wrote them; of what is left of max_bytes each writer takes an equal part.
    ValueError when the folder holds rows that were made with another key, which names the field, or a broken file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        key: Mapping[str, Any],
        layout: Sequence[tuple[tuple[int, ...], np.dtype]],
        max_bytes: float,
        file_bytes: int = _FILE_BYTES,
        writer: str = "0-of-1",
        writers: int = 1,
    ):
        self.folder, self.max_bytes, self._layout = folder, max_bytes, tuple(layout)
        self._writer, self._writers = writer, writers
        self.row_bytes = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self._layout)
        self._rows_a_file = max(1, file_bytes // self.row_bytes)
        self._waiting: dict[int, bytes] = {}
        self._places: dict[int, tuple[Path, int]] = {}
        self._sizes: dict[Path, int] = {}
        self._ours = 0
        self._claim(key)
        self._list()
        self._found = self.bytes_written

    def __contains__(self, row: int) -> bool:
        return row in self._waiting or row in self._places

    @property
    def bytes_written(self) -> int:
        return sum(self._sizes.values())

    @property
    def bytes_free(self) -> int:
        """Of the disk."""
        return shutil.disk_usage(self.folder).free

    def size(self, rows: int) -> int:
        """Bytes that so many rows take, from above, with an equal part of them by each writer."""
        whole, rest = divmod(-(-rows // self._writers), self._rows_a_file)
        return self._writers * (whole * self._file_size(self._rows_a_file) + (self._file_size(rest) if rest else 0))

    def has_room(self) -> bool:
        """Whether another row stays within this writer's part of max_bytes."""
        return self._ours + self._file_size(len(self._waiting) + 1) <= (self.max_bytes - self._found) / self._writers

    def look_again(self) -> None:
        """Rows that other processes wrote by now are here after this."""
        if self._writers > 1:
            self._list()

    def read(self, rows: Sequence[int]) -> list[np.ndarray]:
        """The arrays of these rows, stacked. KeyError for a row that is not here."""
        records = {row: self._waiting[row] for row in rows if row in self._waiting}
        by_file: dict[Path, list[int]] = {}
        for row in rows:
            if row not in records:
                by_file.setdefault(self._places[row][0], []).append(row)
        for file, wanted in by_file.items():
            with _reader(file) as reader:
                records |= zip(wanted, reader.read([self._places[row][1] for row in wanted]), strict=True)
        arrays, first = [], 0
        for shape, dtype in self._layout:
            size = int(np.prod(shape)) * dtype.itemsize
            parts = [np.frombuffer(records[row][first : first + size], dtype).reshape(shape) for row in rows]
            arrays.append(np.stack(parts))
            first += size
        return arrays

    def write(self, rows: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        """Keep the rows that are not here yet, while there is room."""
        for index, row in enumerate(rows):
            if row in self:
                continue
            if not self.has_room():
                return
            self._waiting[row] = b"".join(np.ascontiguousarray(array[index]).tobytes() for array in arrays)
            if len(self._waiting) == self._rows_a_file:
                self.flush()

    def flush(self) -> None:
        """Everything kept so far is on disk after this."""
        if not self._waiting:
            return
        number = sum(file.name.startswith(f"{self._writer}-") for file in self._sizes)
        file = self.folder / f"{self._writer}-{number:06d}{_SUFFIX}"
        partial = file.with_name(f".{file.name}")
        with _writer(partial) as writer:
            for record in self._waiting.values():
                writer.write(record)
            # Last, so that the records before it are numbered from 0: whose they are.
            writer.write(np.asarray(list(self._waiting), np.int64).tobytes())
        os.replace(partial, file)
        self._note(file)
        self._ours += self._sizes[file]
        self._waiting.clear()

    def _file_size(self, rows: int) -> int:
        content = rows * (self.row_bytes + _HEAD + 8) + _HEAD
        return (content * (_BLOCK + _PER_BLOCK) // _BLOCK // _BLOCK + 3) * _BLOCK

    def _list(self) -> None:
        for file in sorted(self.folder.glob(f"[!.]*{_SUFFIX}")):
            if file not in self._sizes:
                self._note(file)

    def _note(self, file: Path) -> None:
        try:
            with _reader(file) as reader:
                (numbers,) = reader.read([reader.num_records() - 1])
        except RuntimeError as error:
            raise ValueError(f"features.directory: {file} is not whole ({error}): delete it") from None
        self._places |= {int(row): (file, place) for place, row in enumerate(np.frombuffer(numbers, np.int64))}
        self._sizes[file] = file.stat().st_size

    def _claim(self, key: Mapping[str, Any]) -> None:
        path = self.folder / _KEY
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{self._writer}-{_KEY}")
            partial.write_text(json.dumps(dict(key), indent=2) + "\n", encoding="utf-8")
            os.replace(partial, path)
            return
        held = json.loads(path.read_text(encoding="utf-8"))
        for field in sorted(held.keys() | key.keys()):
            if held.get(field) != key.get(field):
                raise ValueError(
                    f"features.directory: {self.folder} was made with {field} {held.get(field)}, and this run has "
                    f"{key.get(field)}: give another directory, or delete that one"
                )


def _reader(file: Path) -> closing:
    return closing(ArrayRecordReader(str(file), "readahead_buffer_size:0,max_parallelism:0"))


def _writer(file: Path) -> closing:
    return closing(ArrayRecordWriter(str(file), "group_size:1,uncompressed"))
