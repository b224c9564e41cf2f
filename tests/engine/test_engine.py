"""The engine's thread over scripted slots: order, cancellation, failures, and its end."""

import contextlib
import queue

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_jax.decoding.slots import Sampling
from dspark_jax.engine.engine import PATIENCE, EngineState
from dspark_jax.engine.errors import Refusal
from dspark_jax.engine.request import ChoiceRequest


def choice(prompt=b"prompt", *, index=0, max_tokens=20, seed=0, stop=()):
    sampling = Sampling(temperature=1.0, seed=seed)
    return ChoiceRequest(index=index, prompt=tuple(prompt), sampling=sampling, max_tokens=max_tokens, stop=stop)


class Listener:
    """Collects a request's events on the test's side."""

    def __init__(self):
        self.events = queue.SimpleQueue()

    def __call__(self, event):
        self.events.put(event)

    def ends(self, count=1):
        """Events up to the end of so many choices, or to a refusal."""
        events = []
        while count:
            events.append(self.events.get(timeout=10))
            if isinstance(events[-1], Refusal):
                return events
            count -= events[-1].finish is not None
        return events

    def text(self, index=0, count=1):
        return "".join(event.text for event in self.ends(count) if event.index == index)


@pytest.fixture
def slots(make_slots):
    return make_slots()


def submit(engine, *choices):
    listener = Listener()
    listener.ticket = engine.submit(choices, listener)
    return listener


def test_a_request_is_answered_with_what_the_model_says(make_engine, slots, scripted_text):
    engine = make_engine(slots)
    said = scripted_text(b"prompt", Sampling(temperature=1.0, seed=4))[:20].decode()
    assert submit(engine, choice(seed=4)).text() == said
    slots.wait_for(lambda slots: not slots.requests)


def test_a_rehearsal_is_over_when_the_engine_is_ready(make_engine, slots):
    engine = make_engine(slots, rehearsal=b"rehearsal")
    assert slots.admitted == [tuple(b"rehearsal")]
    assert slots.free == slots.max_batch
    assert engine.state is EngineState.READY


def test_requests_are_admitted_in_the_order_they_came_and_share_rounds(make_engine, slots):
    slots.gate.clear()
    engine = make_engine(slots, max_queue=8)
    listeners = [submit(engine, choice(bytes([65 + i]))) for i in range(6)]
    slots.gate.set()
    for listener in listeners:
        listener.ends()
    assert [chr(prompt[0]) for prompt in slots.admitted] == list("ABCDEF")
    assert slots.largest_batch == slots.max_batch


def test_a_full_queue_refuses_with_429_and_a_time_to_wait(make_engine, slots):
    slots.gate.clear()
    engine = make_engine(slots, max_queue=1)
    listeners = [submit(engine, choice()) for _ in range(3)]
    with pytest.raises(Refusal) as refused:
        submit(engine, choice())
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert int(refused.value.headers["Retry-After"]) >= 1
    slots.gate.set()
    for listener in listeners:
        listener.ends()
    slots.wait_for(lambda slots: not slots.requests)
    assert submit(engine, choice()).ends()


def test_a_cancelled_request_frees_its_slot_and_says_nothing_more(make_engine, slots):
    engine = make_engine(slots)
    slots.gate.clear()
    listener = submit(engine, choice(max_tokens=100))
    slots.wait_for(lambda slots: slots.requests)
    listener.ticket.cancel()
    slots.gate.set()
    slots.wait_for(lambda slots: not slots.requests)
    assert submit(engine, choice()).ends()
    assert engine.outstanding == 0
    assert all(event.finish is None for event in iter_queue(listener.events))


def iter_queue(events):
    while not events.empty():
        yield events.get()


def test_a_request_cancelled_in_the_queue_gives_its_place_back_at_once(make_engine, slots):
    slots.gate.clear()
    engine = make_engine(slots, max_queue=1)
    running = [submit(engine, choice()) for _ in range(2)]
    slots.wait_for(lambda slots: len(slots.requests) == 2)
    waiting = submit(engine, choice(b"unwanted"))
    waiting.ticket.cancel()
    later = submit(engine, choice(b"wanted"))
    slots.gate.set()
    for listener in (*running, later):
        listener.ends()
    assert tuple(b"unwanted") not in slots.admitted


def test_a_failed_round_ends_its_requests_with_500_and_the_engine_goes_on(make_engine, slots, caplog):
    slots.gate.clear()
    slots.failures.append(RuntimeError("out of memory"))
    engine = make_engine(slots, max_queue=4)
    listeners = [submit(engine, choice()) for _ in range(3)]
    slots.gate.set()
    results = [listener.ends()[-1] for listener in listeners]
    assert [result.status for result in results[:2]] == [500, 500]
    assert "out of memory" not in results[0].message
    assert results[2].finish == "length", "the one that waited is served by the new slots"
    assert slots.built == 2
    assert engine.state is EngineState.READY
    assert "out of memory" in caplog.text


def test_an_engine_that_keeps_failing_gives_up_and_tells_everyone(make_engine, slots, caplog):
    slots.gate.clear()
    slots.failures.extend(RuntimeError("device lost") for _ in range(PATIENCE))
    engine = make_engine(slots, max_queue=2 * PATIENCE)
    listeners = [submit(engine, choice()) for _ in range(2 * PATIENCE + 2)]
    slots.gate.set()
    statuses = [listener.ends()[-1].status for listener in listeners]
    assert statuses == [500] * 2 * PATIENCE + [503] * 2
    assert engine.join(10.0)
    assert engine.state is EngineState.FAILED
    assert "device lost" in str(engine.error)
    with pytest.raises(Refusal) as refused:
        submit(engine, choice())
    assert refused.value.status == 503
    assert "device lost" in caplog.text


def test_failures_with_working_rounds_between_them_do_not_add_up(make_engine, slots, caplog):
    engine = make_engine(slots)
    for _ in range(PATIENCE + 1):
        slots.failures.append(RuntimeError("hiccup"))
        assert submit(engine, choice()).ends()[-1].status == 500
        assert submit(engine, choice()).ends()[-1].finish == "length"
    assert engine.state is EngineState.READY


@pytest.mark.parametrize(
    ("failure", "live_ends", "built"), [(RuntimeError("out of memory"), 500, 2), (ValueError("too long"), "length", 1)]
)
def test_admission_may_break_the_device_or_refuse_one_request(make_engine, slots, caplog, failure, live_ends, built):
    engine = make_engine(slots)
    slots.gate.clear()
    live = submit(engine, choice(b"live"))
    slots.wait_for(lambda slots: slots.requests)
    slots.admission_failures.append(failure)
    new = submit(engine, choice(b"new"))
    slots.gate.set()
    assert new.ends()[-1].status == 500
    end = live.ends()[-1]
    assert (end.status if isinstance(end, Refusal) else end.finish) == live_ends
    assert submit(engine, choice()).ends()[-1].finish == "length"
    assert slots.built == built


def test_a_request_whose_text_cannot_be_made_ends_alone(make_engine, slots, caplog):
    engine = make_engine(slots, detokenizer=FailingStream)
    assert submit(engine, choice()).ends()[-1].status == 500
    slots.wait_for(lambda slots: not slots.requests)
    assert engine.state is EngineState.READY


class FailingStream:
    def push(self, ids):
        raise KeyError("no such id")

    def flush(self):
        return ""


def test_one_failed_choice_ends_its_request_once(make_engine, slots, caplog):
    slots.gate.clear()
    slots.failures.append(RuntimeError("hiccup"))
    engine = make_engine(slots, max_queue=4)
    listener = submit(engine, *[choice(index=i) for i in range(4)])
    slots.gate.set()
    assert listener.ends(4)[-1].status == 500
    assert submit(engine, choice()).ends()[-1].finish == "length"
    assert engine.outstanding == 0
    assert listener.events.empty()


def test_a_listener_that_fails_counts_as_gone(make_engine, slots, caplog):
    engine = make_engine(slots)
    calls = []

    def fail(event):
        calls.append(event)
        raise OSError("the loop is closed")

    engine.submit([choice(max_tokens=100)], fail)
    slots.wait_for(lambda slots: slots.admitted and not slots.requests)
    assert len(calls) == 1
    assert submit(engine, choice()).ends()[-1].finish == "length"


def test_a_start_that_fails_tells_the_requests_that_already_wait(make_engine, slots, caplog):
    slots.warm_up_failures.append(RuntimeError("no such device"))
    engine = make_engine(slots, start=False)
    assert engine.state is EngineState.STARTING
    listener = submit(engine, choice())
    engine.start()
    assert not engine.wait_started()
    assert "no such device" in str(engine.error)
    assert listener.ends()[-1].status == 503
    assert engine.state is EngineState.FAILED


def test_slots_that_leak_end_the_engine_instead_of_letting_everyone_wait(make_engine, slots, caplog):
    engine = make_engine(slots)
    slots.admit_many([b"leaked"] * 2, [Sampling()] * 2)
    assert submit(engine, choice()).ends()[-1].status == 503
    assert engine.join(10.0)
    assert engine.state is EngineState.FAILED


def test_draining_finishes_what_was_accepted_and_takes_nothing_new(make_engine, slots):
    engine = make_engine(slots, max_queue=4)
    slots.gate.clear()
    listeners = [submit(engine, choice()) for _ in range(4)]
    engine.drain()
    assert engine.state is EngineState.DRAINING
    with pytest.raises(Refusal) as refused:
        submit(engine, choice())
    assert refused.value.status == 503
    slots.gate.set()
    assert [listener.ends()[-1].finish for listener in listeners] == ["length"] * 4
    assert engine.join(10.0)
    assert engine.state is EngineState.STOPPED


def test_aborting_tells_every_open_request(make_engine, slots):
    engine = make_engine(slots, max_queue=4)
    slots.gate.clear()
    listeners = [submit(engine, choice(max_tokens=100)) for _ in range(4)]
    engine.abort()
    slots.gate.set()
    assert [listener.ends()[-1].status for listener in listeners] == [503] * 4
    assert engine.join(10.0)


@given(st.lists(st.tuples(st.sampled_from(["submit", "cancel", "fail", "refuse"]), st.integers(1, 3)), max_size=60))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_slot_and_no_place_is_ever_lost(make_engine, make_slots, caplog, events):
    slots = make_slots()
    engine = make_engine(slots, max_queue=3)
    listeners = []
    for event, size in events:
        if event == "submit":
            with contextlib.suppress(Refusal):
                listeners.append((submit(engine, *[choice(index=i) for i in range(size)]), size))
        elif event == "cancel" and listeners:
            listeners.pop(size % len(listeners))[0].ticket.cancel()
        elif event == "fail" and not slots.failures:
            slots.failures.append(RuntimeError("hiccup"))
        elif event == "refuse" and not slots.admission_failures:
            slots.admission_failures.append(ValueError("no"))
    for listener, size in listeners:
        listener.ends(size)
    slots.failures.clear()
    slots.admission_failures.clear()
    engine.drain()
    assert engine.join(10.0)
    assert engine.outstanding == 0
    assert slots.requests == {} or engine.state is EngineState.FAILED
