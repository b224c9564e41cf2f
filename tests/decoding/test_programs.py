"""What XLA is told when rounds are compiled."""

import os
import threading
from concurrent.futures import Executor, Future
from types import SimpleNamespace

import jax
import pytest

from dspark_jax.core import signals
from dspark_jax.decoding import programs as module
from dspark_jax.decoding.programs import Programs, RoundShape, compiler_options
from dspark_jax.decoding.round import RoundPlan
from dspark_jax.decoding.scheduler import Guide
from dspark_jax.ops.sampling import Draws


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_xla_knows_every_option(platform):
    options = compiler_options(platform)
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    if options:
        with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
            jax.jit(lambda x: x + 1, compiler_options={f"{next(iter(options))}s": True})(1)


def test_what_is_compiled_is_told_while_the_rest_is_being_lowered(five, monkeypatch):
    programs, events = Programs(*five, dtype="float32"), []

    class AtOnce(Executor):
        def __init__(self, *_, **__):
            pass

        def submit(self, compile_, /):
            future = Future()
            future.set_result(compile_())
            return future

    def lower(*_):
        events.append("lower")
        return SimpleNamespace(compile=lambda: None)

    def compile_rounds(*rows):
        wanted = [(RoundShape(RoundPlan(), n, 40, Draws.ANY), Guide.unguided(n, 2)) for n in rows]
        programs.compile_rounds(wanted, lambda *counts: events.append(counts))

    monkeypatch.setattr(module, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(programs, "empty", lambda rows, span: None)
    monkeypatch.setattr(programs, "lower", lower)
    compile_rounds(1, 2)
    assert events == ["lower", (1, 2), "lower", (2, 2)]
    events.clear()
    compile_rounds(1, 2, 3)
    assert events == ["lower", (1, 1)], "what is there already is no part of the total"


def test_an_interrupt_waits_for_no_compilation_and_starts_none(five, monkeypatch):
    programs, begun, over = Programs(*five, dtype="float32"), [], threading.Event()

    def compile_():
        begun.append(None)
        return len(begun) == 1 or over.wait(10)

    def interrupt(done, total):
        raise KeyboardInterrupt

    monkeypatch.setattr(programs, "empty", lambda rows, span: None)
    monkeypatch.setattr(programs, "lower", lambda *_: SimpleNamespace(compile=compile_))
    wanted = [
        (RoundShape(RoundPlan(), rows, 40, Draws.ANY), Guide.unguided(rows, 2))
        for rows in range(1, 4 * os.cpu_count() + 8)
    ]
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    try:
        with pytest.raises(KeyboardInterrupt):
            programs.compile_rounds(wanted, interrupt)
        assert signals.end(130) == 130
        assert exits == [130], "shutting down would wait for what is being compiled"
    finally:
        over.set()
    for thread in threading.enumerate():
        if thread.name.startswith(signals.COMPILING):
            thread.join()
    assert len(begun) <= 2 * os.cpu_count() + 1
    assert signals.end(143) == 143
    assert exits == [130]
