"""How far a long command is, in a log."""

import io

import pytest
from rich.console import Console

from dspark_jax.cli import _meter
from dspark_jax.cli._meter import Meter, time_left


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_meter.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_now_and_then_of_what_counts_and_of_what_does_not(clock):
    out = io.StringIO()
    with Meter("rounds", total=8, console=Console(file=out, force_terminal=False)) as meter:
        meter.show(2, already=2)
        for clock[0], text in ((1.0, "1 of 4 compiled"), (16.0, "2 of 4 compiled")):
            meter.note(text)
        for clock[0], done in ((500.0, 3), (501.0, 4)):
            meter.show(done, already=2)
        clock[0] = 551.0
        meter.note("1 of 4 compiled")
    # Two took 501 s, so the other four take 1,002 from then on.
    assert out.getvalue().splitlines() == [
        "rounds 2/8, 2 of 4 compiled",
        "rounds 3/8, about 42 min left",
        "rounds 4/8, about 16 min left, 1 of 4 compiled",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5.0, "under a minute"),
        (59.0, "under a minute"),
        (100.0, "about 2 min"),
        (5000.0, "about 83 min"),
        (9000.0, "about 2.5 h"),
    ],
)
def test_estimates_are_told_as_such(seconds, words):
    assert time_left(seconds) == f"{words} left"
