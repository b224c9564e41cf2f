"""Rows come out masked, in a fixed order, and are made only once for the same source."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_jax.core import logs
from dspark_jax.data.chat import parse_conversation
from dspark_jax.data.shards import MANIFEST, write_shards
from dspark_jax.data.store import TokenStore, split
from dspark_jax.data.supervision import supervise_all
from dspark_jax.data.tokenizer import load_tokenizer
from dspark_jax.interop.huggingface import load_target
from dspark_jax.training.sources import (
    ChatFiles,
    PackedShards,
    Reader,
    SelfSampled,
    fingerprint_of,
    open_store,
    split_rows,
    token_facts,
)

SOURCE = SelfSampled(sequences=20, prompt_tokens=3)


@pytest.fixture(scope="module")
def reader(small_target):
    return Reader(target=load_target(small_target), directory=small_target, stop_ids=frozenset({1}))


@pytest.fixture(scope="module")
def stopping(reader, tmp_path_factory):
    """The reader with the token that the target says most often as its stop token."""
    store = open_store(SOURCE, reader, tmp_path_factory.mktemp("any") / "t", length=12, seed=3, say=lambda text: None)
    return replace(reader, stop_ids=frozenset({int(np.bincount(store.tokens[store.loss_mask]).argmax())}))


@pytest.fixture(scope="module")
def sampled(reader, tmp_path_factory):
    said = []
    folder = tmp_path_factory.mktemp("sampled") / "tokens"
    return open_store(SOURCE, reader, folder, length=12, seed=3, say=said.append), folder, said


def test_the_prompt_is_not_learnt_and_the_answer_is(sampled):
    store, _, _ = sampled
    assert len(store) == 20
    for row in range(20):
        supervised = store[row]
        assert not supervised.loss_mask[:3].any()
        assert supervised.loss_mask[3:].all()
        assert 3 < len(supervised.tokens) <= 12
        assert 1 not in supervised.tokens[:-1]


def test_a_stopped_answer_ends_with_the_stop_token(stopping, tmp_path):
    (stop,) = stopping.stop_ids
    store = open_store(SOURCE, stopping, tmp_path / "t", length=12, seed=3, say=lambda text: None)
    rows = [store[row].tokens.tolist() for row in range(20)]
    ended = [row for row in rows if len(row) < 12]
    assert ended
    assert all(row[-1] == stop for row in ended)
    assert all(stop not in row[:-1] for row in rows)


def begun(said):
    return sum(line.startswith("Sampling 20 sequences") for line in said)


def test_it_is_made_once_and_again_when_something_differs(sampled, reader):
    store, folder, said = sampled
    assert begun(said) == 1
    again = open_store(SOURCE, reader, folder, length=12, seed=3, say=said.append)
    assert begun(said) == 1
    assert np.array_equal(again.tokens, store.tokens)
    colder = open_store(replace(SOURCE, temperature=0.5), reader, folder, length=12, seed=3, say=said.append)
    assert begun(said) == 2
    assert not np.array_equal(colder.tokens, store.tokens)


def test_the_same_seed_samples_the_same_rows_and_says_how_far_it_is(sampled, reader, tmp_path, monkeypatch):
    store, _, _ = sampled
    monkeypatch.setattr(logs, "_SECONDS_BETWEEN_LINES", 0.0)
    said = []
    same = open_store(SOURCE, reader, tmp_path / "same", length=12, seed=3, say=said.append)
    tokens = [int(line.split()[-2]) for line in said[1:]]
    assert tokens == sorted(tokens)
    assert said[1] == "Sampling: 0 of 20 sequences are done, 1 tokens."
    assert tokens[-1] >= store.loss_mask.sum()
    other = open_store(SOURCE, reader, tmp_path / "other", length=12, seed=4, say=lambda text: None)
    assert np.array_equal(same.tokens, store.tokens)
    assert np.array_equal(same.prompt_hashes, store.prompt_hashes)
    assert not np.array_equal(other.tokens, store.tokens)


def test_a_prompt_that_leaves_nothing_to_learn_is_refused(reader, tmp_path):
    with pytest.raises(ValueError, match=r"data\.prompt_tokens must lie between 1 and sequence_length - 1, not 12"):
        open_store(replace(SOURCE, prompt_tokens=12), reader, tmp_path / "t", length=12, seed=0, say=print)


@pytest.fixture
def chat_reader(reader, tmp_path):
    """The small target with a tokenizer of words: token 1 ends a turn."""
    words = ["<pad>", "<end>", "<user>", "<assistant>", "<unk>", "hello", "you", "there"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = (
        "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=template)
    fast.save_pretrained(tmp_path / "tokenizer")
    return replace(reader, directory=tmp_path / "tokenizer")


def test_chat_files_are_read_masked_and_counted(chat_reader, tmp_path):
    chats = tmp_path / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you there"}]},
        {"messages": [{"role": "user", "content": "unanswered"}]},
    ]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = []
    store = open_store(
        ChatFiles(paths=(str(chats),)), chat_reader, tmp_path / "tokens", length=16, seed=0, say=said.append
    )
    assert len(store) == 1
    assert store[0].tokens.tolist() == [2, 5, 1, 3, 6, 7, 1]
    assert store[0].loss_mask.tolist() == [False] * 4 + [True] * 3
    assert said[0].startswith("Read 1 conversations with 7 tokens; 1 rows were left out, the first because ")
    assert f"{chats}:2" in said[0]


@pytest.fixture
def packed(chat_reader, tmp_path):
    """A source of packed rows for `chat_reader`, made from eight conversations."""
    rows = [
        {"messages": [{"role": "user", "content": "hello " * (i + 1)}, {"role": "assistant", "content": "you there"}]}
        for i in range(8)
    ]
    conversations = [parse_conversation(row) for row in rows]
    tokenizer = load_tokenizer(chat_reader.directory)
    stops = chat_reader.stop_ids
    store, _ = TokenStore.collect(supervise_all(conversations, tokenizer, stop_ids=stops, max_len=16))
    (tmp_path / "packed").mkdir()
    facts = {"target": "the small one", **token_facts(chat_reader.directory, stops)}
    settings = {"length": 16, "validation": 0.4, "seed": 0, "shard_rows": 2}
    write_shards(tmp_path / "packed", store, facts=facts, **settings)
    return PackedShards(path=str(tmp_path / "packed")), store


def open_packed(source, reader, length=16, say=print):
    return open_store(source, reader, Path("unused"), length=length, seed=0, say=say)


def test_packed_rows_are_read_where_they_are_and_split_as_they_were(packed, chat_reader):
    source, store = packed
    said = []
    rows = open_packed(source, chat_reader, say=said.append)
    assert said == [f"Reading 8 conversations with {store.lengths.sum()} tokens in {len(rows)} rows."]
    for side, expected in zip(split_rows(source, rows), split(store, validation=0.4), strict=True):
        found = [document.tokens.tolist() for row in side for document in rows.documents(row)]
        assert sorted(found) == sorted(store[row].tokens.tolist() for row in expected)
    assert not Path("unused").exists()
    mark = fingerprint_of(source, chat_reader, length=16, seed=0)
    manifest = Path(source.path) / MANIFEST
    manifest.write_text(manifest.read_text() + "\n")
    assert fingerprint_of(source, chat_reader, length=16, seed=0) != mark


def test_packed_rows_of_another_target_are_refused_by_what_differs(packed, chat_reader):
    source, _ = packed
    with pytest.raises(ValueError, match="packed for the small one, whose stop tokens differs"):
        open_packed(source, replace(chat_reader, stop_ids=frozenset({1, 2})))
    config = chat_reader.directory / "tokenizer_config.json"
    template = next(file for file in (chat_reader.directory / "chat_template.jinja", config) if file.is_file())
    template.write_text(template.read_text().replace("<end>", "<end> "))
    with pytest.raises(ValueError, match="whose chat template differs from that of the target in"):
        open_packed(source, chat_reader)
    tokenizer = chat_reader.directory / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("there", "their"))
    with pytest.raises(ValueError, match="whose tokenizer differs"):
        open_packed(source, chat_reader)


def test_packed_rows_that_would_be_cut_or_have_nothing_held_out_are_refused(packed, chat_reader):
    source, _ = packed
    assert len(open_packed(source, chat_reader, length=17)) == len(open_packed(source, chat_reader))
    with pytest.raises(ValueError, match="rows of 16 tokens, which sequence_length 15 would cut"):
        open_packed(source, chat_reader, length=15)
    manifest = Path(source.path) / MANIFEST
    fields = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(fields | {"rows": {"train": 4, "validation": 0}}))
    with pytest.raises(ValueError, match="holds nothing out"):
        open_packed(source, chat_reader)
    with pytest.raises(FileNotFoundError, match="dspark data pack"):
        open_packed(PackedShards(path="nowhere"), chat_reader)


def test_a_missing_chat_file_is_named(reader, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.paths: there is no file nowhere\.jsonl"):
        open_store(ChatFiles(paths=("nowhere.jsonl",)), reader, tmp_path / "t", length=8, seed=0, say=print)
