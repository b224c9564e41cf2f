import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.data.packing import first_fit
from dspark_jax.data.pipeline import (
    Batch,
    Buckets,
    Host,
    Packed,
    PadTo,
    evaluation_batches,
    fed_rows,
    iterate,
    lay_out,
    numbered_batches,
    numbered_rows,
    training_batches,
)
from dspark_jax.data.store import TokenStore
from dspark_jax.data.supervision import Supervised


def store_of(lengths):
    """Row i holds tokens 100 * i + 1, ..; the second half of a row is supervised."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.concatenate([100 * i + 1 + np.arange(length) for i, length in enumerate(lengths)]).astype(np.int32)
    mask = np.concatenate([np.arange(length) >= length // 2 for length in lengths])
    return TokenStore(tokens, mask, offsets, np.arange(len(lengths), dtype=np.uint64))


def rows_of(batch):
    """Which row each document of a batch came from."""
    first = np.diff(batch.segments_BT, axis=1, prepend=0) > 0
    return [int(token) // 100 for token in batch.tokens_BT[first]]


def test_rows_keep_tokens_masks_and_documents_and_are_cut_at_the_end():
    rows = [
        Supervised(tokens=np.array([5, 6, 7], np.int32), loss_mask=np.array([False, True, True])),
        Supervised(tokens=np.array([8], np.int32), loss_mask=np.array([True])),
    ]
    batch = lay_out([rows, rows[::-1], rows[1:], []], 3)
    assert batch.tokens_BT.tolist() == [[5, 6, 7], [8, 5, 6], [8, 0, 0], [0, 0, 0]]
    assert batch.loss_mask_BT.tolist() == [[False, True, True], [True, False, True], [True, False, False], [False] * 3]
    assert batch.segments_BT.tolist() == [[1, 1, 1], [1, 2, 2], [1, 0, 0], [0, 0, 0]]


def test_a_batch_is_a_pytree_of_its_three_arrays():
    batch = lay_out([[Supervised(tokens=np.ones(2, np.int32), loss_mask=np.ones(2, bool))]], 4)
    doubled = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), batch)
    assert isinstance(doubled, Batch)
    assert doubled.segments_BT.shape == (2, 4)


@pytest.mark.parametrize("padding", [PadTo(length=40), Buckets(lengths=(10, 20, 40), window=3)])
def test_an_epoch_uses_every_row_once_and_the_next_one_in_another_order(padding):
    lengths = np.random.default_rng(0).integers(2, 40, 24)
    batches = training_batches(store_of(lengths), np.arange(24), batch_size=4, padding=padding, seed=1, epochs=2)
    assert len(batches) == 12
    first = [row for batch in batches[:6] for row in rows_of(batch)]
    second = [row for batch in batches[6:] for row in rows_of(batch)]
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second
    assert first != sorted(first)


def test_the_order_follows_the_seed():
    store = store_of([5] * 16)
    orders = [
        [
            rows_of(batch)
            for batch in training_batches(
                store, np.arange(16), batch_size=4, padding=PadTo(length=5), seed=seed, epochs=1
            )
        ]
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(9, 40),
    count=st.sampled_from([1, 2, 4]),
    padding=st.sampled_from([PadTo(length=12), Buckets(lengths=(6, 12), window=2), Packed(length=16)]),
)
def test_hosts_share_each_global_batch_and_take_the_same_number_of_steps(rows, count, padding):
    store = store_of(np.random.default_rng(rows).integers(2, 12, rows))
    args = {"batch_size": 4, "padding": padding, "seed": 3, "epochs": 2}
    whole = training_batches(store, np.arange(rows), **args)
    parts = [training_batches(store, np.arange(rows), host=Host(index=i, count=count), **args) for i in range(count)]
    assert {len(part) for part in parts} == {len(whole)}
    assert len(whole) == rows * 2 // 4 or isinstance(padding, Packed)
    for step in range(len(whole)):
        shares = [part[step] for part in parts]
        assert {share.tokens_BT.shape for share in shares} == {(4 // count, whole[step].tokens_BT.shape[1])}
        np.testing.assert_array_equal(np.concatenate([share.tokens_BT for share in shares]), whole[step].tokens_BT)


@pytest.mark.parametrize("padding", [PadTo(length=12), Buckets(lengths=(6, 12), window=2), Packed(length=16)])
def test_a_restored_iterator_goes_on_with_the_batch_that_was_due(padding):
    store = store_of(np.random.default_rng(0).integers(2, 12, 10))

    def fresh():
        return iterate(training_batches(store, np.arange(10), batch_size=3, padding=padding, seed=7, epochs=None))

    uninterrupted = fresh()
    for _ in range(5):
        next(uninterrupted)
    state = uninterrupted.get_state()
    restored = fresh()
    restored.set_state(state)
    for _ in range(7):
        for expected, found in zip(next(uninterrupted), next(restored), strict=True):
            np.testing.assert_array_equal(expected, found)


def test_buckets_pad_less_than_one_length_and_hold_their_longest_row():
    store = store_of(np.random.default_rng(0).integers(2, 64, 64))
    args = {"batch_size": 4, "seed": 0, "epochs": 1}
    bucketed = list(training_batches(store, np.arange(64), padding=Buckets(lengths=(16, 32, 64), window=16), **args))
    plain = list(training_batches(store, np.arange(64), padding=PadTo(length=64), **args))
    assert {batch.tokens_BT.shape[1] for batch in bucketed} == {16, 32, 64}
    assert sum((batch.segments_BT > 0).sum() for batch in bucketed) == store.lengths.sum()
    assert sum(batch.tokens_BT.size for batch in bucketed) < 0.8 * sum(batch.tokens_BT.size for batch in plain)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 14), min_size=1, max_size=40))
def test_packing_loses_nothing_and_leaves_no_two_rows_that_would_fit_in_one(lengths):
    store, length = store_of(lengths), 12
    (batch,) = evaluation_batches(store, np.arange(len(lengths)), batch_size=40, padding=Packed(length=length))
    assert sorted(rows_of(batch)) == list(range(len(lengths)))
    used = (batch.segments_BT > 0).sum(axis=1)
    assert used.sum() == np.minimum(lengths, length).sum()
    fullness = np.sort(used[used > 0])
    assert len(fullness) < 2 or fullness[0] + fullness[1] > length
    for row, segments in zip(batch.tokens_BT, batch.segments_BT, strict=True):
        for number in range(1, segments.max() + 1):
            document = row[segments == number]
            assert document.tolist() == list(range(document[0], document[0] + len(document)))


def test_the_fullest_row_closes_when_too_many_are_open():
    lengths = np.random.default_rng(0).integers(600, 1000, 3000)
    lengths[-500:] = 100
    packs = first_fit(np.arange(3000), lengths, 1000)
    groups = [packs[group] for group in range(len(packs))]
    assert np.concatenate(groups).tolist() != list(range(3000))
    assert sorted(np.concatenate(groups).tolist()) == list(range(3000))
    assert max(lengths[group].sum() for group in groups) <= 1000
    assert len(packs) < 2600


@pytest.mark.parametrize("count", [1, 2])
def test_evaluation_sees_every_row_once_in_full_batches(count):
    store = store_of([3, 4, 5, 6, 7])
    parts = [
        list(
            evaluation_batches(
                store, np.arange(5), batch_size=4, padding=PadTo(length=8), host=Host(index=i, count=count)
            )
        )
        for i in range(count)
    ]
    assert [len(part) for part in parts] == [2] * count
    assert {batch.tokens_BT.shape for part in parts for batch in part} == {(4 // count, 8)}
    assert sorted(row for part in parts for batch in part for row in rows_of(batch)) == [0, 1, 2, 3, 4]
    assert not any(batch.loss_mask_BT[batch.segments_BT == 0].any() for part in parts for batch in part)


def test_only_the_rows_given_are_used():
    store = store_of([4] * 12)
    rows = np.array([1, 3, 5, 7])
    batches = training_batches(store, rows, batch_size=2, padding=PadTo(length=4), seed=0, epochs=3)
    assert {row for batch in batches for row in rows_of(batch)} == {1, 3, 5, 7}


def test_impossible_batches_are_refused():
    store = store_of([4] * 3)
    args = {"padding": PadTo(length=4), "seed": 0}
    with pytest.raises(ValueError, match="does not divide over 2 hosts"):
        training_batches(store, np.arange(3), batch_size=3, epochs=1, host=Host(count=2), **args)
    with pytest.raises(ValueError, match="do not fill one batch of 4"):
        training_batches(store, np.arange(3), batch_size=4, epochs=1, **args)
    with pytest.raises(ValueError, match="bucket lengths rise"):
        Buckets(lengths=(32, 16))


@pytest.mark.parametrize("padding", [PadTo(length=8), Packed(length=8)])
def test_a_row_has_the_same_number_in_every_epoch_and_in_the_list_of_all(padding):
    args = {"batch_size": 3, "padding": padding, "seed": 5}
    store = store_of([3, 5, 2, 8, 4, 1, 6])
    packs, listed = numbered_rows(store, np.arange(7), padding=padding, seed=5), {}
    numbers = range(len(packs))
    for batch in numbered_batches(store, packs, numbers, batch_size=2, batches=5, padding=padding):
        assert len(batch.rows_B) == 2
        for row, number in enumerate(batch.rows_B.tolist()):
            if number >= 0:
                listed[number] = batch.tokens_BT[row].tolist()
    assert sorted(listed) == list(range(len(listed)))
    seen = set()
    for batch in training_batches(store, np.arange(7), epochs=3, numbered=True, **args):
        for row, number in enumerate(batch.rows_B.tolist()):
            assert listed[number] == batch.tokens_BT[row].tolist()
            seen.add(number)
    assert seen == set(listed)


@pytest.mark.parametrize("padding", [PadTo(length=8), Packed(length=8)])
def test_which_rows_a_host_feeds_is_known_beforehand(padding):
    store, args = store_of([5] * 30), {"batch_size": 4, "seed": 5}
    count = len(numbered_rows(store, np.arange(30), padding=padding, seed=5))
    hosts = [Host(index=index, count=4) for index in range(4)]
    for feeding in (hosts, hosts[1:3]):
        fed = set()
        for host in feeding:
            batches = training_batches(
                store, np.arange(30), epochs=None, numbered=True, host=host, padding=padding, **args
            )
            fed.update(*(batches[step].rows_B.tolist() for step in range(9)))
        assert fed_rows(count, steps=9, hosts=feeding, **args) == sorted(fed)
        assert (len(fed) < count) == (len(feeding) < 4)
