"""The first signal waits for the step, the second does not, and handlers come back."""

import signal

import pytest

from dspark_jax.training.interrupt import Interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_once_and_announced(number):
    before, announced = signal.getsignal(number), []
    with Interrupt(lambda: announced.append(True)) as interrupt:
        assert interrupt.signal is None
        signal.raise_signal(number)
        assert interrupt.signal is number
        assert signal.getsignal(number) is before
    assert announced == [True]
    assert signal.getsignal(number) is before


@pytest.fixture
def interactive():
    """Ctrl-C as in a terminal: what starts in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interactive")
def test_a_second_ctrl_c_stops_at_once():
    def twice():
        with Interrupt(lambda: None):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        twice()
