"""Tokenised conversations on disk: written once, then memory-mapped by every run and every host."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from dspark_jax.data.chat import BadRow, Conversation
from dspark_jax.data.supervision import Supervised
from dspark_jax.data.words import normalised

_META = "store.json"


class TokenStore:
    """A sequence of Supervised rows over three flat arrays; random access copies nothing.

    offsets [rows + 1] int64; prompt_hashes [rows] uint64 of each conversation's first user message.
    """

    def __init__(self, tokens: np.ndarray, loss_mask: np.ndarray, offsets: np.ndarray, prompt_hashes: np.ndarray):
        self.tokens, self.loss_mask, self.offsets, self.prompt_hashes = tokens, loss_mask, offsets, prompt_hashes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int | np.integer) -> Supervised:
        span = slice(self.offsets[row], self.offsets[row + 1])
        return Supervised(tokens=self.tokens[span], loss_mask=self.loss_mask[span])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        return np.diff(self.offsets)

    def documents(self, row: int | np.integer) -> list[Supervised]:
        """The conversation of a row."""
        return [self[row]]

    @classmethod
    def collect(cls, rows: Iterable[tuple[Conversation, Supervised] | BadRow]) -> "tuple[TokenStore, list[BadRow]]":
        """A store in memory, and the rows that could not be used. ValueError when none could."""
        tokens, masks, hashes, bad = [], [], [], []
        for row in rows:
            if isinstance(row, BadRow):
                bad.append(row)
                continue
            conversation, supervised = row
            tokens.append(supervised.tokens)
            masks.append(supervised.loss_mask)
            hashes.append(prompt_hash(conversation.prompts[0]))
        if not tokens:
            first = f": {bad[0].error}" if bad else ""
            raise ValueError(f"there is no usable conversation among {len(bad)} rows{first}")
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in tokens])]).astype(np.int64)
        store = cls(np.concatenate(tokens), np.concatenate(masks), offsets, np.asarray(hashes, np.uint64))
        return store, bad

    def save(self, directory: str | Path, *, fingerprint: str) -> None:
        """Writes the store; the directory appears whole or not at all, replacing what was there."""
        directory = Path(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
        try:
            for name in _ARRAYS:
                np.save(partial / f"{name}.npy", getattr(self, name))
            (partial / _META).write_text(json.dumps({"fingerprint": fingerprint}), encoding="utf-8")
            partial.chmod(0o755)
            if directory.exists():
                shutil.rmtree(directory)
            os.replace(partial, directory)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    @classmethod
    def open(cls, directory: str | Path, *, fingerprint: str) -> "TokenStore | None":
        """The memory-mapped store, or None when there is none or it was made from something else."""
        directory = Path(directory)
        try:
            meta = json.loads((directory / _META).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if meta["fingerprint"] != fingerprint:
            return None
        return cls(*(np.load(directory / f"{name}.npy", mmap_mode="r") for name in _ARRAYS))


_ARRAYS = ("tokens", "loss_mask", "offsets", "prompt_hashes")


def fingerprint(files: Sequence[str | Path], *facts: object) -> str:
    """A digest of the files' bytes and of whatever else the tokens depend on (tokenizer, lengths)."""
    digest = hashlib.sha256(json.dumps([str(fact) for fact in facts]).encode())
    for file in files:
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def prompt_hash(prompt: str) -> int:
    """64 bits that are equal for prompts that differ only in case, punctuation or spacing."""
    return int.from_bytes(hashlib.blake2b(normalised(prompt).encode(), digest_size=8).digest(), "little")


def split(store: TokenStore, *, validation: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers (training, validation). Rows with the same first prompt always land on the same side.

    `validation` is the share of distinct prompts held out. The choice depends on the prompt and the seed alone, so
    adding rows moves none of the old ones. ValueError when a side that should have rows would be empty.
    """
    chosen = held_out(store.prompt_hashes, validation, seed)
    train_rows, validation_rows = np.flatnonzero(~chosen), np.flatnonzero(chosen)
    require_two_sides(len(train_rows), len(validation_rows), validation=validation, what="conversations")
    return train_rows, validation_rows


def held_out(prompt_hashes: np.ndarray, validation: float, seed: int) -> np.ndarray:
    """Which prompts, by their hashes [rows] uint64, are for validation, as bools [rows]."""
    if not 0 <= validation < 1:
        raise ValueError(f"validation is a share from 0 to below 1, not {validation}")
    # splitmix64: the seed must change the order of the hashes, not shift them.
    mixed = prompt_hashes.astype(np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53 < validation


def require_two_sides(train: int, validation_rows: int, *, validation: float, what: str) -> None:
    """ValueError when a side of the split that should have rows has none."""
    if not train or (validation > 0 and not validation_rows):
        raise ValueError(
            f"{train + validation_rows} {what} are too few to hold out {validation:.3g} of them: "
            "give more, or hold out 0"
        )
