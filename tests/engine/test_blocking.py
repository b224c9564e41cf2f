"""The engine without an event loop."""

from dataclasses import replace

import pytest

from dspark_jax.decoding.slots import Sampling
from dspark_jax.engine.blocking import stream_choice
from dspark_jax.engine.errors import Refusal
from dspark_jax.engine.request import ChoiceRequest

CHOICE = ChoiceRequest(index=0, prompt=tuple(b"prompt"), sampling=Sampling(temperature=1.0), max_tokens=20)
LONG = replace(CHOICE, max_tokens=100)


def test_a_choice_can_be_read_without_an_event_loop_and_left_early(make_engine, make_slots, scripted_text):
    slots = make_slots()
    engine = make_engine(slots)
    said = scripted_text(b"prompt", Sampling(temperature=1.0, seed=0))
    assert "".join(progress.text for progress in stream_choice(engine, CHOICE)) == said[:20].decode()
    rounds = stream_choice(engine, LONG)
    assert next(rounds).text
    rounds.close()
    slots.wait_for(lambda slots: not slots.requests)


def test_reading_a_choice_raises_the_refusal_it_ended_with(make_engine, make_slots, caplog):
    engine = make_engine(make_slots(failures=[RuntimeError("hiccup")]))
    with pytest.raises(Refusal):
        list(stream_choice(engine, CHOICE))
