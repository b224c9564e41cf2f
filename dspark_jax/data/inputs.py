"""Chat rows from wherever they are: JSONL, parquet, or a data set that the library `datasets` finds."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dspark_jax.data.chat import BadRow, Row, read_rows

_FILES = (".jsonl", ".json", ".parquet")


def read_input(name: str, *, split: str = "train", config_name: str | None = None) -> Iterator[Row | BadRow]:
    """The rows of a JSONL file, a parquet file, a folder that `datasets` knows or a data set of the Hub, in order.

    `split` and `config_name` are those of a data set. Nothing is read ahead. FileNotFoundError when a file is missing,
    ValueError, one sentence, when a data set cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.suffix != ".parquet":
        yield from read_rows(name)
    elif not path.exists() and path.suffix in _FILES:
        raise FileNotFoundError(f"there is no file {name}")
    else:
        for number, value in enumerate(_data_set(name, path, split, config_name), start=1):
            # A table has every column in every row.
            given = {column: entry for column, entry in value.items() if entry is not None}
            text = json.dumps(given, ensure_ascii=False, default=str)
            yield Row(value=given, text=text, where=f"{name}:{number}")


def _data_set(name: str, path: Path, split: str, config_name: str | None) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"to read {name} the library datasets is needed: pip install 'dspark-jax[datasets]'") from None
    try:
        rows: Iterable[Any]
        if path.is_file():
            rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        else:
            where = str(path) if path.exists() else name
            rows = datasets.load_dataset(where, name=config_name, split=split, streaming=True)
        yield from rows
    except Exception as error:  # whatever its many readers raise
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(f"{name} cannot be read as a data set ({reason})") from error
