"""What the Hub's libraries have to say is said once by every program, and how far one is not too often."""

import importlib.util
import logging
import sys
from pathlib import Path

import pytest

from dspark_jax.cli import main as cli
from dspark_jax.core import logs
from dspark_jax.core.logs import _SPEAKERS, NowAndThen
from dspark_jax.engine import launch


def train(flags):
    spec = importlib.util.spec_from_file_location("train_entry", Path(__file__).parents[2] / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *flags])
        module.main()


PROGRAMS = {
    "train.py": (train, "--config", "nonsense"),
    "serve.py": (launch.main, "--host", "nowhere.invalid"),
    "dspark": (cli.main, "convert", "--in", "nowhere", "--out", "out", "--to", "deepspec", "--target", "nowhere"),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("library", _SPEAKERS)
def test_a_line_of_a_library_that_prints_its_own_is_not_printed_again(program, library, monkeypatch):
    main, *flags = PROGRAMS[program]
    printed = []
    # Of our own: pytest's handler is also on loggers that passed nothing on when the test began.
    root_prints = logging.Handler()
    root_prints.emit = lambda record: printed.append(record.getMessage())
    monkeypatch.setattr(logging.getLogger(), "handlers", [root_prints])
    for name in _SPEAKERS:
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    logging.getLogger(library).warning("the first time")
    main(flags)
    logging.getLogger(library).warning("the second time")
    assert [line for line in printed if line.endswith("time")] == ["the first time"]


def test_ten_seconds_pass_between_lines(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    tell = NowAndThen(said.append)
    for now[0] in (4.0, 11.0, 12.0, 25.0):
        tell(f"at {now[0]:g}")
    assert said == ["at 11", "at 25"]
