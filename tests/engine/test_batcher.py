"""The bounded queue: order, capacity, and what leaves it early."""

import threading

import pytest

from dspark_jax.engine.batcher import Batcher


def test_jobs_come_out_in_the_order_they_came():
    batcher = Batcher(max_batch=1, max_queue=5)
    assert batcher.offer(["a", "b"])
    assert batcher.offer(["c"])
    assert [batcher.take() for _ in range(4)] == ["a", "b", "c", None]


def test_slots_and_queue_together_bound_what_is_outstanding():
    batcher = Batcher(max_batch=2, max_queue=1)
    assert batcher.offer(["a", "b", "c"])
    assert not batcher.offer(["d"])
    assert batcher.take() == "a"
    assert not batcher.offer(["d"]), "a job in a slot still counts"
    batcher.done("a")
    assert batcher.offer(["d"])
    assert batcher.outstanding == ("b", "c", "d")


def test_all_jobs_of_a_request_or_none():
    batcher = Batcher(max_batch=1, max_queue=1)
    assert not batcher.offer(["a", "b", "c"])
    assert batcher.waiting == 0
    assert batcher.offer(["a", "b"])


def test_a_withdrawn_job_frees_its_place_and_a_taken_one_cannot_be_withdrawn():
    batcher = Batcher(max_batch=1, max_queue=1)
    batcher.offer(["a", "b"])
    assert batcher.withdraw("b")
    assert not batcher.withdraw("b")
    assert batcher.take() == "a"
    assert not batcher.withdraw("a")
    assert batcher.outstanding == ("a",)


def test_a_closed_batcher_takes_nothing_and_keeps_what_it_has():
    batcher = Batcher(max_batch=1, max_queue=1)
    batcher.offer(["a"])
    batcher.close()
    assert not batcher.offer(["b"])
    assert batcher.take() == "a"


@pytest.mark.parametrize("event", [lambda batcher: batcher.offer(["a"]), lambda batcher: batcher.close()])
def test_waiting_ends_with_a_job_and_with_closing(event):
    batcher = Batcher(max_batch=1, max_queue=1)
    waiter = threading.Thread(target=batcher.wait)
    waiter.start()
    waiter.join(0.02)
    assert waiter.is_alive()
    event(batcher)
    waiter.join(10.0)
    assert not waiter.is_alive()


def test_places_are_never_lost_under_concurrent_use():
    batcher = Batcher(max_batch=2, max_queue=3)
    accepted = []

    def offer(name):
        for i in range(200):
            job = (name, i)
            if batcher.offer([job]):
                accepted.append(job)
                if i % 3 == 0:
                    batcher.withdraw(job)
                elif (taken := batcher.take()) is not None:
                    batcher.done(taken)

    threads = [threading.Thread(target=offer, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while (taken := batcher.take()) is not None:
        batcher.done(taken)
    assert accepted
    assert batcher.outstanding == ()
