"""A log gets whole plain lines, a terminal gets a bar."""

import io

from rich.console import Console

from dspark_jax.training.progress import Display

VALUES = {"loss": 1.5, "accepted_length": 2.25, "tokens_per_second": 12345.0, "skipped": 0.0}


def shown(terminal: bool, **values) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=140)
    with Display(100, 400, console) as display:
        display.say("step 100: a [bracket] in " + "a/long/path/" * 10)
        display.advance(101)
        display.show(200, VALUES | values)
    return stream.getvalue()


def test_plain_lines_have_every_number_and_no_escape_codes():
    text = shown(False)
    assert "\x1b" not in text
    first, second = text.splitlines()
    assert first == "step 100: a [bracket] in " + "a/long/path/" * 10
    assert second.startswith("step 200/400  loss 1.500  accepted length ~2.25  12,345 tokens/s  eta 0:00:0")


def test_skipped_steps_are_shown_when_there_are_any():
    assert "skipped" not in shown(False)
    assert "skipped 25%" in shown(False, skipped=0.25)


def test_a_terminal_gets_a_bar_and_no_plain_lines():
    text = shown(True)
    assert "200/400" in text
    assert "step 200/400" not in text
