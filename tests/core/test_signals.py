"""Signals end programs, whatever they were at."""

import signal
from contextlib import suppress
from dataclasses import dataclass, field

import jax
import pytest

from dspark_jax.core.signals import Terminated, interruptible, keeping, terminable, unmasked

pytestmark = pytest.mark.usefixtures("heard_sigint")
SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


class Interrupting:
    """A signal comes while two of these are compared."""

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return hash(self.number)

    def __eq__(self, other):
        # Not where caches compare it with what another test left there.
        return self.number == other.number and signal.raise_signal(self.number)


@jax.tree_util.register_dataclass
@dataclass
class Tree:
    leaf: int
    static: Interrupting = field(metadata={"static": True})


def compare_structures(number):
    return jax.tree.structure(Tree(1, Interrupting(number))) == jax.tree.structure(Tree(1, Interrupting(number)))


def compare_static_arguments(number):
    call = jax.jit(lambda x, static: x, static_argnums=1)
    return [call(1, Interrupting(number)) for _ in range(2)]


@SIGNALS
@pytest.mark.parametrize("work", [signal.raise_signal, compare_structures, compare_static_arguments])
def test_a_signal_is_told_from_an_error_even_inside_jax(work, number, capsys):
    def run():
        with keeping(lambda: "All is kept."):
            return work(number)

    assert interruptible(run) == 128 + number
    assert capsys.readouterr().err == "Interrupted. All is kept.\n"


def test_errors_stay_what_they_are():
    with pytest.raises(ValueError, match="odd"), terminable(), unmasked(), keeping(lambda: "never"):
        raise ValueError("odd")
    assert interruptible(lambda: 7) == 7


def test_sigterm_ends_what_goes_on_after_ctrl_c():
    def chat():
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(KeyboardInterrupt):
                signal.raise_signal(number)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), terminable():
        chat()
    assert signal.getsignal(signal.SIGTERM) is before
