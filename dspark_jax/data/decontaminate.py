"""Decontamination: nothing that shares a run of ten words with a test set may be trained on."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dspark_jax.data.chat import BadRow, read_rows
from dspark_jax.data.words import normalised_words

RUN = 10
_SHORTEST = 3


class TestSets:
    """Every run of ten words in the test files, compared exactly.

    A test text of three to nine words has no such run: it is matched as a whole instead.
    """

    __test__ = False

    def __init__(self, texts: Iterable[str], run: int = RUN):
        self._run = run
        self._runs: set[str] = set()
        for text in texts:
            words = normalised_words(text)
            if len(words) >= _SHORTEST:
                self._runs.update(self._all_runs(words))

    @classmethod
    def read(cls, paths: Iterable[str | Path], run: int = RUN) -> "TestSets":
        """Every string in JSONL files, whatever their fields are called, or the whole of any other text file.

        ValueError when a line of a .jsonl file is not JSON: an unread test row would go unprotected.
        """
        return cls((text for path in paths for text in _texts(Path(path))), run)

    def shared_run(self, text: str) -> str | None:
        """The first run of words the text shares with a test set, or None."""
        return next((run for run in self._all_runs(normalised_words(text)) if run in self._runs), None)

    def __len__(self) -> int:
        return len(self._runs)

    def _all_runs(self, words: list[str]) -> Iterator[str]:
        for start in range(max(1, len(words) - self._run + 1)):
            yield " ".join(words[start : start + self._run])


def _texts(path: Path) -> Iterator[str]:
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8")
        return
    for row in read_rows(path):
        if isinstance(row, BadRow):
            raise ValueError(f"{row.error}; test files must be readable throughout")
        yield from strings_in(row.value)


def strings_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value, in order, except the keys of its objects."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            waiting.extend(reversed(item.values()))
        elif isinstance(item, list):
            waiting.extend(reversed(item))
