"""What is read back from packed shards is what training would have packed by itself."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.data.pipeline import Host, Packed, evaluation_batches, iterate, training_batches
from dspark_jax.data.shards import MANIFEST, PackedRows, decode, encode, read_manifest, write_shards
from dspark_jax.data.store import TokenStore, split
from dspark_jax.data.supervision import Supervised

LENGTH = 24


def store_of(count):
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, LENGTH, count)
    tokens = rng.integers(1, 2**31, lengths.sum()).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    hashes = rng.integers(0, 2**64, count, np.uint64)
    return TokenStore(tokens, rng.random(lengths.sum()) < 0.5, offsets, hashes)


STORE = store_of(60)


@pytest.fixture
def packed(tmp_path):
    """packed(**settings) -> the rows of STORE, from disk."""

    def make(name="packed", **settings):
        usual = {"length": LENGTH, "validation": 0.3, "seed": 5, "shard_rows": 4, "facts": {"target": "t"}}
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name, STORE, **(usual | settings))
        return PackedRows.open(tmp_path / name)

    return make


def documents(batches):
    """How often each document, tokens and mask, occurs in the batches."""
    found = Counter()
    for batch in batches:
        for tokens, mask, segments in zip(batch.tokens_BT, batch.loss_mask_BT, batch.segments_BT, strict=True):
            for number in range(1, segments.max() + 1):
                at = segments == number
                found[tokens[at].tobytes(), mask[at].tobytes()] += 1
    return found


@given(st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=20), min_size=1))
def test_a_record_is_its_documents(rows):
    written = [
        Supervised(tokens=np.asarray([t for t, _ in row], np.int32), loss_mask=np.asarray([m for _, m in row]))
        for row in rows
    ]
    read = decode(encode(written))
    assert len(read) == len(written)
    for found, expected in zip(read, written, strict=True):
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.loss_mask, expected.loss_mask)
        assert (found.tokens.dtype, found.loss_mask.dtype) == (np.int32, bool)


@pytest.mark.parametrize("shard_rows", [3, 1000])
def test_an_epoch_of_packed_rows_holds_the_documents_of_one_of_the_conversations(packed, shard_rows):
    rows = packed(shard_rows=shard_rows)
    train, held_out = rows.split()
    for from_disk, from_memory in zip((train, held_out), split(STORE, validation=0.3), strict=True):
        found, expected = (
            list(evaluation_batches(source, numbers, batch_size=4, padding=Packed(length=LENGTH)))
            for source, numbers in ((rows, from_disk), (STORE, from_memory))
        )
        assert documents(found) == documents(expected)
    # Twice over, an epoch that fills its batches exactly leaves nothing out.
    args = {"batch_size": 1, "padding": Packed(length=LENGTH), "seed": 5, "epochs": 2}
    shuffled = documents(training_batches(rows, train, **args))
    assert shuffled == documents(training_batches(STORE, split(STORE, validation=0.3)[0], **args))
    assert set(shuffled.values()) == {2}


def test_rows_are_packed_once_and_the_counts_are_true(packed):
    rows = packed()
    manifest = rows.manifest
    assert manifest["tokens"] == STORE.lengths.sum() == rows.lengths.sum()
    assert manifest["learnt_tokens"] == STORE.loss_mask.sum()
    assert manifest["rows"] == {"train": len(rows.split()[0]), "validation": len(rows.split()[1])}
    assert sum(len(rows.documents(row)) for row in range(len(rows))) == manifest["conversations"] == 60
    for row in range(len(rows)):
        assert sum(len(document.tokens) for document in rows.documents(row)) == rows.lengths[row] <= LENGTH
    assert len(manifest["shards"]["train"]) > 2
    contents = [
        [document.tokens.tobytes() for row in range(len(made)) for document in made.documents(row)]
        for made in (rows, packed("again"), packed("other", seed=6))
    ]
    assert contents[0] == contents[1] != contents[2]


def test_a_run_that_is_restored_goes_on_with_the_batch_that_was_due(packed):
    rows = packed()
    args = {"batch_size": 3, "padding": Packed(length=LENGTH), "seed": 7, "epochs": None}
    uninterrupted = iterate(training_batches(rows, rows.split()[0], **args))
    for _ in range(5):
        next(uninterrupted)
    restored = iterate(training_batches(rows, rows.split()[0], **args))
    restored.set_state(uninterrupted.get_state())
    for _ in range(9):
        for expected, found in zip(next(uninterrupted), next(restored), strict=True):
            np.testing.assert_array_equal(expected, found)


def test_hosts_share_each_batch(packed):
    rows = packed()
    args = {"batch_size": 4, "padding": Packed(length=LENGTH), "seed": 7, "epochs": 2}
    whole = training_batches(rows, rows.split()[0], **args)
    parts = [training_batches(rows, rows.split()[0], host=Host(index=i, count=2), **args) for i in range(2)]
    assert [len(part) for part in parts] == [len(whole)] * 2
    for step in range(len(whole)):
        shares = [part[step].tokens_BT for part in parts]
        np.testing.assert_array_equal(np.concatenate(shares), whole[step].tokens_BT)


def test_without_validation_there_is_one_side(packed):
    rows = packed(validation=0.0)
    assert len(rows.split()[1]) == 0
    assert (
        documents(evaluation_batches(rows, rows.split()[0], batch_size=1, padding=Packed(length=LENGTH))).total() == 60
    )


def test_a_folder_that_is_missing_or_not_whole_is_named(packed, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing has no manifest\.json: `dspark data pack --out .*nothing`"):
        PackedRows.open(tmp_path / "nothing")
    assert read_manifest(tmp_path / "nothing") is None
    packed()
    folder = tmp_path / "packed"
    shard = sorted(folder.glob("train-*"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"{shard.name} is missing or not whole"):
        PackedRows.open(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name} is missing or not whole"):
        PackedRows.open(folder)
    manifest = read_manifest(folder)
    (folder / MANIFEST).write_text(json.dumps(manifest | {"format": 2}))
    with pytest.raises(ValueError, match="is not of format 1"):
        PackedRows.open(folder)
    (folder / MANIFEST).write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        PackedRows.open(folder)
