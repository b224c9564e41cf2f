"""Packed rows on disk: ArrayRecord shards beside a manifest, read one row at a time.

A record is one row: the number of its documents, their lengths, their tokens (all int32, little-endian), then the bits
of their loss mask.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import grain
import numpy as np

from dspark_jax.data.packing import Packs, first_fit
from dspark_jax.data.store import TokenStore, split
from dspark_jax.data.supervision import Supervised

MANIFEST = "manifest.json"
_LENGTHS = "lengths.npy"
_FORMAT = 1
_SIDES = ("train", "validation")
_INT = np.dtype("<i4")


def write_shards(
    directory: Path,
    store: TokenStore,
    *,
    length: int,
    validation: float,
    seed: int,
    shard_rows: int,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Packs a store's conversations into rows of `length` tokens, a share of them for validation; returns the manifest.

    The manifest is written last; `facts` are what it says beside files and counts. Rows of the two sides share no
    prompt (dspark_jax.data.store.split).
    """
    shards, lengths = {}, []
    for side, rows in zip(_SIDES, split(store, validation=validation), strict=True):
        # Conversations that lie side by side in a file may be alike.
        mixed = np.random.default_rng(seed).permutation(rows)
        packs = first_fit(mixed, store.lengths[mixed], length)
        shards[side] = [
            {"file": path.name, "rows": len(part), "bytes": path.stat().st_size}
            for path, part in _write_side(directory, side, store, packs, shard_rows)
        ]
        lengths += [store.lengths[packs[row]].sum() for row in range(len(packs))]
    np.save(directory / _LENGTHS, np.asarray(lengths, np.int64))
    manifest = {
        "format": _FORMAT,
        **facts,
        "length": length,
        "conversations": len(store),
        "tokens": int(store.lengths.sum()),
        "learnt_tokens": int(store.loss_mask.sum()),
        "rows": {side: sum(shard["rows"] for shard in shards[side]) for side in _SIDES},
        "shards": shards,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return manifest


class PackedRows:
    """The rows of a packed folder, training rows first; a record is read when its row is asked for."""

    def __init__(self, directory: Path, manifest: Mapping[str, Any]):
        self.manifest = manifest
        self.lengths: np.ndarray = np.load(directory / _LENGTHS)
        shards = list(chain.from_iterable(manifest["shards"][side] for side in _SIDES))
        # Told how many records there are, the reader opens no file before it is needed.
        parts = [f"{directory / shard['file']}[0:{shard['rows']}]" for shard in shards]
        self._records = grain.sources.ArrayRecordDataSource(parts)

    def __len__(self) -> int:
        return len(self._records)

    def documents(self, row: int | np.integer) -> list[Supervised]:
        """The conversations of a row, in the order in which it holds them."""
        return decode(self._records[row])

    def split(self) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers (training, validation)."""
        train = self.manifest["rows"]["train"]
        return np.arange(train), np.arange(train, len(self))

    @classmethod
    def open(cls, directory: str | Path) -> "PackedRows":
        """FileNotFoundError where there is no such folder; ValueError, one sentence, when it is not whole."""
        directory = Path(directory)
        manifest = read_manifest(directory)
        if manifest is None:
            raise FileNotFoundError(f"{directory} has no {MANIFEST}: `dspark data pack --out {directory}` makes it")
        for shard in chain.from_iterable(manifest["shards"][side] for side in _SIDES):
            file = directory / shard["file"]
            if not file.is_file() or file.stat().st_size != shard["bytes"]:
                raise ValueError(f"{file} is missing or not whole: copy the folder again, or pack it again")
        return cls(directory, manifest)


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """What a packed folder says of itself, None where there is none. ValueError when this version cannot read it."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ValueError(f"{directory / MANIFEST} is not JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise ValueError(f"{directory / MANIFEST} is not of format {_FORMAT}, which is what this version reads")
    return manifest


def encode(documents: Sequence[Supervised]) -> bytes:
    """One record."""
    sizes = [len(document.tokens) for document in documents]
    head = np.asarray([len(sizes), *sizes], _INT)
    tokens = np.concatenate([document.tokens for document in documents]).astype(_INT)
    mask = np.packbits(np.concatenate([document.loss_mask for document in documents]))
    return head.tobytes() + tokens.tobytes() + mask.tobytes()


def decode(record: bytes) -> list[Supervised]:
    """The documents of a record."""
    count = int(np.frombuffer(record, _INT, 1)[0])
    sizes = np.frombuffer(record, _INT, count, offset=_INT.itemsize)
    total, start = int(sizes.sum()), _INT.itemsize * (1 + count)
    tokens = np.frombuffer(record, _INT, total, offset=start)
    bits = np.frombuffer(record, np.uint8, offset=start + _INT.itemsize * total)
    mask = np.unpackbits(bits, count=total).astype(bool)
    ends = np.cumsum(sizes)
    return [
        Supervised(tokens=tokens[end - size : end], loss_mask=mask[end - size : end])
        for size, end in zip(sizes, ends, strict=True)
    ]


def _write_side(
    directory: Path, side: str, store: TokenStore, packs: Packs, shard_rows: int
) -> Iterator[tuple[Path, range]]:
    from array_record.python.array_record_module import ArrayRecordWriter

    starts = range(0, len(packs), shard_rows)
    for number, start in enumerate(starts):
        path = directory / f"{side}-{number:05d}-of-{len(starts):05d}.array_record"
        part = range(start, min(start + shard_rows, len(packs)))
        # One record a group: rows are read one by one, in a shuffled order.
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for row in part:
            writer.write(encode([store[document] for document in packs[row]]))
        writer.close()
        yield path, part
