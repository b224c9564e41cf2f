"""Chat rows from wherever they are: JSONL, a JSON array, parquet, or a data set that the library `datasets` finds."""

import json
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from dspark_jax.data.chat import BadRow, Row, read_rows

_FILES = (".jsonl", ".json", ".parquet")
# What `save_to_disk` leaves, of one data set and of several splits.
_SAVED = ("state.json", "dataset_dict.json")


def read_input(name: str, *, split: str = "train", config_name: str | None = None) -> Iterator[Row | BadRow]:
    """The rows of a JSON or parquet file, a folder that `datasets` reads or wrote, or a data set of the Hub, in order.

    `split` and `config_name` are those of a data set. Nothing is read ahead. FileNotFoundError when a file is missing,
    ValueError, one sentence, when a data set cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.suffix != ".parquet":
        yield from _array(path) if _begins_an_array(path) else read_rows(path)
    elif not path.exists() and path.suffix in _FILES:
        raise FileNotFoundError(f"there is no file {name}")
    else:
        for number, value in enumerate(_data_set(name, path, split, config_name), start=1):
            given = _given(value)
            text = json.dumps(given, ensure_ascii=False, default=str)
            yield Row(value=given, text=text, where=f"{name}:{number}")


def _begins_an_array(path: Path) -> bool:
    # In JSONL a list would be a row, and a wrong one.
    with open(path, "rb") as file:
        return path.suffix == ".json" and file.read(1024).removeprefix(BOM_UTF8).lstrip().startswith(b"[")


def _array(path: Path) -> Iterator[Row]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    for number, value in enumerate(values, start=1):
        yield Row(value=value, text=json.dumps(value, ensure_ascii=False), where=f"{path}:[{number}]")


def _given(value: Any) -> Any:
    """Without the columns and fields that a table has in every row because others need them."""
    if isinstance(value, Mapping):
        return {name: _given(entry) for name, entry in value.items() if entry is not None}
    return [_given(entry) for entry in value] if isinstance(value, list) else value


def _data_set(name: str, path: Path, split: str, config_name: str | None) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"to read {name} the library datasets is needed: pip install 'dspark-jax[datasets]'") from None
    # What goes wrong is said below, once.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        if path.is_file():
            rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        elif any((path / mark).is_file() for mark in _SAVED):
            rows = datasets.load_from_disk(str(path))
            if isinstance(rows, datasets.DatasetDict):
                if split not in rows:
                    raise ValueError(f"it has no split {split}, but {', '.join(map(str, rows))}")
                rows = rows[split]
        else:
            where = str(path) if path.exists() else name
            rows = datasets.load_dataset(where, name=config_name, split=split, streaming=True)
        yield from cast(Iterable[Any], rows)
    except Exception as error:  # whatever its many readers raise
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(f"{name} cannot be read as a data set ({reason})") from error
