"""Where training tokens come from: chat files, rows packed before, or the target itself."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import jax
import numpy as np

from dspark_jax.core.logs import NowAndThen
from dspark_jax.data.chat import read_conversations
from dspark_jax.data.shards import MANIFEST, PackedRows
from dspark_jax.data.store import TokenStore, fingerprint, split
from dspark_jax.data.supervision import supervise_all
from dspark_jax.data.tokenizer import load_tokenizer
from dspark_jax.decoding.generate import Completion, Job, generate
from dspark_jax.decoding.slots import DecodeSlots, Sampling, SlotRound
from dspark_jax.drafters.base import NoDrafter
from dspark_jax.targets.model import Target

_SLOTS = 256
_MIX = 1_000_003


@dataclass(frozen=True, kw_only=True)
class ChatFiles:
    """Conversations in JSONL files, answers preferably the target's own; `validation` is the share held out."""

    paths: tuple[str, ...]
    validation: float = 0.02

    def __post_init__(self):
        if not self.paths:
            raise ValueError("data.paths names no file")
        _require_share(self.validation)


@dataclass(frozen=True, kw_only=True)
class SelfSampled:
    """On-policy text without any data: the target continues prompts of random tokens.

    sequences: how many; prompt_tokens: length of each prompt, which is not learnt; validation: the share held out.
    """

    sequences: int = 2048
    prompt_tokens: int = 6
    temperature: float = 1.0
    validation: float = 0.05

    def __post_init__(self):
        for name, least in (("sequences", 2), ("prompt_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"data.{name} must be at least {least}, not {getattr(self, name)}")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"data.temperature must be at least 0, not {self.temperature}")
        _require_share(self.validation)


def _require_share(validation: float) -> None:
    # Something must be held out: a run is judged by it.
    if not 0.0 < validation < 1.0:
        raise ValueError(f"data.validation is a share above 0 and below 1, not {validation}")


@dataclass(frozen=True, kw_only=True)
class PackedShards:
    """Rows that `dspark data pack` made, read from disk as they are due; what is held out was decided there."""

    path: str = "data/packed"


Source = ChatFiles | PackedShards | SelfSampled


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The frozen target as data needs it: the model, its directory, the ids that end an answer."""

    target: Target
    directory: Path
    stop_ids: frozenset[int]


def fingerprint_of(source: Source, reader: Reader, *, length: int, seed: int) -> str:
    """A digest of all that the rows of `open_store` depend on. FileNotFoundError names a file that is missing."""
    if isinstance(source, ChatFiles):
        if missing := [path for path in source.paths if not Path(path).is_file()]:
            raise FileNotFoundError(f"data.paths: there is no file {missing[0]}")
        files = [*source.paths, reader.directory / "tokenizer.json"]
    elif isinstance(source, PackedShards):
        files = [Path(source.path) / MANIFEST]
    else:
        files = sorted(reader.directory.glob("*.safetensors"))
    return fingerprint(files, source, sorted(reader.stop_ids), length, seed)


def open_store(
    source: Source, reader: Reader, folder: Path, *, length: int, seed: int, say: Callable[[str], None]
) -> TokenStore | PackedRows:
    """The source as rows of at most `length` tokens, made once and kept in `folder` unless they are packed already.

    A store made from anything else is made again. ValueError when nothing in the source is usable, or when packed rows
    are longer or another target's.
    """
    if isinstance(source, PackedShards):
        return _open_packed(source, reader, length, say)
    mark = fingerprint_of(source, reader, length=length, seed=seed)
    if TokenStore.open(folder, fingerprint=mark) is None:
        made = (
            _read_files(source, reader, length, say)
            if isinstance(source, ChatFiles)
            else _sample(source, reader, length, seed, say)
        )
        made.save(folder, fingerprint=mark)
    store = TokenStore.open(folder, fingerprint=mark)
    assert store is not None
    return store


def split_rows(source: Source, store: TokenStore | PackedRows) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers (training, validation)."""
    if isinstance(store, PackedRows):
        return store.split()
    assert not isinstance(source, PackedShards)
    return split(store, validation=source.validation)


def token_facts(directory: Path, stop_ids: frozenset[int]) -> dict[str, str]:
    """What a target's tokens depend on, by name: digests of tokenizer and chat template, and the stop tokens."""
    return {
        "tokenizer": fingerprint([directory / "tokenizer.json"]),
        "chat template": fingerprint([], load_tokenizer(directory).chat_template),
        "stop tokens": ", ".join(map(str, sorted(stop_ids))),
    }


def _open_packed(source: PackedShards, reader: Reader, length: int, say: Callable[[str], None]) -> PackedRows:
    rows = PackedRows.open(source.path)
    packed = rows.manifest
    for name, ours in token_facts(reader.directory, reader.stop_ids).items():
        if packed[name] != ours:
            raise ValueError(
                f"{source.path} was packed for {packed['target']}, whose {name} differs from that of the target in "
                f"{reader.directory}: pack it again with this --target"
            )
    if packed["length"] > length:
        raise ValueError(
            f"{source.path} has rows of {packed['length']} tokens, which sequence_length {length} would cut: set it to "
            f"{packed['length']}"
        )
    if not packed["rows"]["validation"]:
        raise ValueError(
            f"{source.path} holds nothing out, and a run is judged by that: pack it with --validation 0.02"
        )
    say(f"Reading {packed['conversations']:,} conversations with {packed['tokens']:,} tokens in {len(rows):,} rows.")
    return rows


def _read_files(source: ChatFiles, reader: Reader, length: int, say: Callable[[str], None]) -> TokenStore:
    tokenizer = load_tokenizer(reader.directory)
    rows = supervise_all(
        chain.from_iterable(map(read_conversations, source.paths)),
        tokenizer,
        stop_ids=reader.stop_ids,
        max_len=length,
    )
    store, bad = TokenStore.collect(rows)
    note = f"; {len(bad)} rows were left out, the first because {bad[0].error}" if bad else ""
    say(f"Read {len(store):,} conversations with {len(store.tokens):,} tokens{note}.")
    return store


def _sample(source: SelfSampled, reader: Reader, length: int, seed: int, say: Callable[[str], None]) -> TokenStore:
    if not 0 < source.prompt_tokens < length:
        raise ValueError(f"data.prompt_tokens must lie between 1 and sequence_length - 1, not {source.prompt_tokens}")
    say(f"Sampling {source.sequences:,} sequences from the target at temperature {source.temperature:g}.")
    slots = DecodeSlots(
        reader.target,
        NoDrafter(),
        max_batch=min(_SLOTS, source.sequences),
        max_len=length,
        dtype=jax.tree.leaves(reader.target)[0].dtype,
    )
    ordinary = np.setdiff1d(np.arange(reader.target.spec.vocab_size), sorted(reader.stop_ids))
    prompts = np.random.default_rng(seed).choice(ordinary, (source.sequences, source.prompt_tokens))
    jobs = (
        Job(
            prompt=tuple(prompt.tolist()),
            sampling=Sampling(temperature=source.temperature, seed=seed * _MIX + row),
            max_new_tokens=length - source.prompt_tokens,
            stop_ids=reader.stop_ids,
            tag=row,
        )
        for row, prompt in enumerate(prompts)
    )
    rows: list[Completion] = []
    made, progress = 0, NowAndThen(say)

    def observe(_: Job, out: SlotRound) -> None:
        nonlocal made
        made += len(out.tokens)
        progress(f"Sampling: {len(rows):,} of {source.sequences:,} sequences are done, {made:,} tokens.")

    for completion in generate(slots, jobs, observe):
        rows.append(completion)
    # In the order of the prompts: that in which they finish is nothing to build a reproducible run on.
    rows.sort(key=lambda completion: completion.job.tag)
    return _as_store(rows, reader.stop_ids)


def _as_store(rows: list[Completion], stop_ids: frozenset[int]) -> TokenStore:
    # Which stop id ended an answer is not reported, so its end can be learnt only where there is just one.
    end = tuple(stop_ids) if len(stop_ids) == 1 else ()
    answers = [row.tokens + (end if row.finish == "stop" else ()) for row in rows]
    lengths = [len(row.job.prompt) + len(answer) for row, answer in zip(rows, answers, strict=True)]
    masks = [np.arange(length) >= len(row.job.prompt) for row, length in zip(rows, lengths, strict=True)]
    return TokenStore(
        np.concatenate([[*row.job.prompt, *answer] for row, answer in zip(rows, answers, strict=True)]).astype(
            np.int32
        ),
        np.concatenate(masks),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.asarray([_hash(row.job.prompt) for row in rows], np.uint64),
    )


def _hash(prompt: tuple[int, ...]) -> int:
    """64 bits of a prompt, the same in every process (Python's own hash of numbers is not documented to be)."""
    digest = fingerprint([], *prompt)
    return int(digest[:16], 16)
