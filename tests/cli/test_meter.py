"""How far a long command is, in a log."""

import io

import pytest
from rich.console import Console

from dspark_jax.cli import _meter
from dspark_jax.cli._meter import Meter


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_meter.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_now_and_then_of_what_counts_and_of_what_does_not(clock):
    out = io.StringIO()
    with Meter("rounds", total=8, console=Console(file=out, force_terminal=False)) as meter:
        for clock[0], done in ((1.0, 1), (16.0, 3), (17.0, 4)):
            meter.show(done)
        for clock[0], text in ((20.0, "1 of 4 compiled"), (31.5, "2 of 4 compiled")):
            meter.note(text)
    assert out.getvalue().splitlines() == ["rounds 3/8  ", "rounds: 2 of 4 compiled"]
