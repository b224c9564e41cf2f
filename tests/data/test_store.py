import numpy as np
import pytest

from dspark_jax.data.chat import BadRow, parse_conversation
from dspark_jax.data.store import TokenStore, fingerprint, prompt_hash, split
from dspark_jax.data.supervision import Supervised


def rows_of(prompts):
    for i, prompt in enumerate(prompts):
        conversation = parse_conversation({"turns": [prompt]})
        yield conversation, Supervised(tokens=np.arange(i + 1, dtype=np.int32), loss_mask=np.arange(i + 1) % 2 == 0)


def test_rows_come_back_as_they_went_in_and_bad_ones_are_handed_back():
    bad = BadRow(error="chat.jsonl:2: the line is not JSON", text="{")
    rows = list(rows_of(["one", "two", "three"]))
    store, rejected = TokenStore.collect([rows[0], bad, *rows[1:]])
    assert rejected == [bad]
    assert len(store) == 3
    assert store.lengths.tolist() == [1, 2, 3]
    for found, (_, expected) in zip([store[i] for i in range(3)], rows, strict=True):
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.loss_mask, expected.loss_mask)


def test_a_store_without_rows_names_the_first_fault():
    with pytest.raises(ValueError, match=r"no usable conversation among 1 rows: chat\.jsonl:1: the row is odd"):
        TokenStore.collect([BadRow(error="chat.jsonl:1: the row is odd", text="")])


def test_a_saved_store_opens_memory_mapped_and_only_under_its_fingerprint(tmp_path):
    store, _ = TokenStore.collect(rows_of(["one", "two", "three"]))
    store.save(tmp_path / "tokens", fingerprint="a")
    opened = TokenStore.open(tmp_path / "tokens", fingerprint="a")
    assert isinstance(opened.tokens, np.memmap)
    for name in ("tokens", "loss_mask", "offsets", "prompt_hashes"):
        np.testing.assert_array_equal(getattr(opened, name), getattr(store, name))
    assert TokenStore.open(tmp_path / "tokens", fingerprint="b") is None
    assert TokenStore.open(tmp_path / "nothing", fingerprint="a") is None


def test_saving_again_replaces_the_store_and_a_failed_save_leaves_the_old_one(tmp_path, monkeypatch):
    first, _ = TokenStore.collect(rows_of(["one"]))
    second, _ = TokenStore.collect(rows_of(["one", "two"]))
    first.save(tmp_path / "tokens", fingerprint="a")
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            second.save(tmp_path / "tokens", fingerprint="b")
    assert len(TokenStore.open(tmp_path / "tokens", fingerprint="a")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]
    second.save(tmp_path / "tokens", fingerprint="b")
    assert len(TokenStore.open(tmp_path / "tokens", fingerprint="b")) == 2


def test_the_fingerprint_follows_bytes_and_facts_but_not_names(tmp_path):
    one, same, other = tmp_path / "one", tmp_path / "same", tmp_path / "other"
    one.write_text("a")
    same.write_text("a")
    other.write_text("b")
    assert fingerprint([one], 512) == fingerprint([same], 512)
    assert len({fingerprint([one], 512), fingerprint([other], 512), fingerprint([one], 256), fingerprint([])}) == 4


def test_training_and_validation_share_no_prompt_however_it_is_written():
    prompts = [f"Question number {i}" for i in range(400)]
    store, _ = TokenStore.collect(rows_of(prompts + [prompt.upper() + "?" for prompt in prompts]))
    train, validation = split(store, validation=0.2, seed=0)
    assert sorted([*train, *validation]) == list(range(800))
    assert {row % 400 for row in train}.isdisjoint(row % 400 for row in validation)
    assert 50 < len(validation) / 2 < 110


def test_adding_rows_moves_no_row_to_the_other_side_but_another_seed_does():
    prompts = [f"Question number {i}" for i in range(300)]
    small, _ = TokenStore.collect(rows_of(prompts[:200]))
    large, _ = TokenStore.collect(rows_of(prompts))
    held_out = {row for row in split(large, validation=0.1)[1] if row < 200}
    assert held_out == set(split(small, validation=0.1)[1])
    others = [set(split(small, validation=0.1, seed=seed)[1]) for seed in (1, 2, 2**40)]
    assert held_out not in others
    assert others[0] != others[1]


def test_splits_that_leave_a_side_empty_are_refused():
    store, _ = TokenStore.collect(rows_of(["only one"]))
    with pytest.raises(ValueError, match="too few to hold out"):
        split(store, validation=0.5, seed=0)
    with pytest.raises(ValueError, match="from 0 to below 1"):
        split(store, validation=1.0)
    train, validation = split(store, validation=0.0)
    assert (len(train), len(validation)) == (1, 0)


def test_prompt_hashes_differ_for_different_words_and_are_stable_over_processes():
    assert prompt_hash("What is 2 + 2?") == prompt_hash("what is 2+2")
    assert prompt_hash("What is 2 + 2?") != prompt_hash("What is 2 + 3?")
    assert prompt_hash("stable") == 433403223077616731
