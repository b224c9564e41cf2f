"""The feed reads ahead, but its position is that of the batch in hand."""

import jax
import numpy as np

from dspark_jax.data.pipeline import Batch
from dspark_jax.training.feed import AHEAD, Feed


class Counting:
    """Batches whose every token is their number."""

    def __init__(self, count: int):
        self.at, self._count = 0, count

    def __next__(self) -> Batch:
        if self.at == self._count:
            raise StopIteration
        self.at += 1
        return Batch(
            tokens_BT=np.full((2, 3), self.at, np.int32),
            loss_mask_BT=np.ones((2, 3), bool),
            segments_BT=np.ones((2, 3), np.int32),
        )

    def get_state(self) -> int:
        return self.at

    def set_state(self, state: int) -> None:
        self.at = state


def feed_of(batches: Counting) -> Feed:
    return Feed(batches, jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def numbers(feed: Feed) -> list[int]:
    return [int(batch.tokens_BT[0, 0]) for batch in feed]


def test_every_batch_once_in_order_on_the_device():
    feed = feed_of(Counting(5))
    first = next(feed)
    assert isinstance(first.tokens_BT, jax.Array)
    assert [int(first.tokens_BT[0, 0]), *numbers(feed)] == [1, 2, 3, 4, 5]


def test_the_position_is_that_of_the_batch_in_hand():
    batches = Counting(9)
    feed = feed_of(batches)
    assert feed.state == 0
    for expected in (1, 2, 3):
        next(feed)
        assert feed.state == expected
    assert batches.at == 3 + AHEAD
    resumed = Counting(9)
    resumed.set_state(feed.state)
    assert numbers(feed_of(resumed)) == numbers(feed)
