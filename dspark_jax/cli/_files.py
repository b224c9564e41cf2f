"""What the verbs that write data share: names of files beside each other, and lines for people."""

import sys
from pathlib import Path


def beside(out: str, word: str, suffix: str = ".jsonl") -> Path:
    """The companion of an output: train.jsonl -> train.rejected.jsonl."""
    return Path(out).with_suffix(f".{word}{suffix}")


def refuse_same(source: str, out: str) -> None:
    """ValueError when an output would overwrite its input."""
    if Path(source).resolve() == Path(out).resolve():
        raise ValueError(f"--in and --out are both {out}: write to another file")


def say(message: str) -> None:
    """A line on standard error."""
    print(message, file=sys.stderr, flush=True)
