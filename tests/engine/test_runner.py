"""Stopping: what happens to accepted work, and to the server when its engine fails."""

import contextlib
import logging
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from dspark_jax.decoding.slots import Sampling
from dspark_jax.engine.engine import EngineState
from dspark_jax.engine.leaving import leave
from dspark_jax.engine.openai import Served
from dspark_jax.engine.request import ChoiceRequest
from dspark_jax.engine.runner import serve_until_signal
from dspark_jax.engine.server import build_app

BODY = {"model": "tiny/model", "prompt": "hi", "max_tokens": 20}


def test_accepted_requests_finish_and_new_ones_find_nobody(serve, client, make_slots, wait_until):
    slots = make_slots(max_batch=1)
    server = serve(slots, max_queue=4)
    slots.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        replies = [pool.submit(client.post, server.url + "/v1/completions", json=BODY) for _ in range(3)]
        wait_until(lambda: server.engine.outstanding == 3)
        server.stop()
        wait_until(lambda: server.engine.state is EngineState.DRAINING)
        with pytest.raises(httpx.ConnectError):
            wait_until_refused(server.url)
        slots.gate.set()
        assert [reply.result().status_code for reply in replies] == [200, 200, 200]
    server.join()
    assert server.engine.join(10.0)
    assert not any("cut short" in line for line in server.said)
    assert server.said[-1] == "Stopped."


def wait_until_refused(url):
    for _ in range(2000):
        httpx.get(url + "/health", timeout=0.5)


@pytest.mark.parametrize("stream", [False, True])
def test_what_outlives_the_grace_period_is_told_so(serve, client, make_slots, stream, wait_until):
    # Far from its end when it is stopped, with few events on their way to a client that is short of time.
    slots = make_slots(script={b"hi": b"x" * 100_000}, max_len=200_000, pace=0.002)
    server = serve(slots, grace=0)
    body = {**BODY, "max_tokens": 100_000, "stream": stream}
    pool = ThreadPoolExecutor(1)
    with pool:
        reply = pool.submit(client.post, server.url + "/v1/completions", json=body)
        # Before its first round a stream has not begun, and would be refused with a status like any other.
        wait_until(lambda: any(request.rounds for request in list(slots.requests.values())))
        server.stop()
        response = reply.result()
    assert "stopped before this request was done" in response.text
    assert response.status_code == (200 if stream else 503)
    server.join()
    assert server.engine.state is EngineState.STOPPED
    assert server.said[-2:] == ["1 request was cut short after 0 s; --grace allows more.", "Stopped."]


def test_how_many_requests_were_cut_short_is_said_whatever_the_engine_is_at(serve, client, make_slots, wait_until):
    slots = make_slots(script={b"hi": b"x" * 100_000}, max_len=200_000, max_batch=2)
    server = serve(slots, grace=0, max_queue=4)
    with ThreadPoolExecutor(2) as pool:
        # One has both slots and one waits: two requests, of four choices.
        bodies = [{**BODY, "max_tokens": 100_000, "n": 2}] * 2
        replies = [pool.submit(client.post, server.url + "/v1/completions", json=body) for body in bodies]
        wait_until(lambda: server.engine.outstanding == 4)
        server.stop()
        assert [reply.result().status_code for reply in replies] == [503, 503]
    server.join()
    assert server.said[-2].startswith("2 requests were cut short")


@pytest.mark.parametrize("held_at", ["gate", "door"])
def test_requests_of_an_engine_that_cannot_end_are_told_and_counted_too(serve, client, make_slots, wait_until, held_at):
    """As in the middle of a compilation, of a round or of a prefill."""
    slots = make_slots()
    server = serve(slots, grace=0)
    getattr(slots, held_at).clear()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(client.post, server.url + "/v1/completions", json=BODY)
        wait_until(lambda: slots.asked)
        server.stop()
        answer = reply.result()
        server.join()
        getattr(slots, held_at).set()
    assert answer.status_code == 503
    assert "stopped before this request was done" in answer.json()["error"]["message"]
    assert server.said[-2].startswith("1 request was cut short")


def test_leaving_waits_for_an_engine_that_can_end(make_engine, make_slots):
    engine = make_engine(make_slots())
    assert leave(engine, 0) == 0
    assert engine.state is EngineState.STOPPED


def test_leaving_ends_the_process_where_the_engine_cannot(make_engine, make_slots, monkeypatch, capsys):
    slots = make_slots()
    engine = make_engine(slots)
    slots.gate.clear()
    engine.submit([ChoiceRequest(index=0, prompt=(1,), sampling=Sampling(), max_tokens=5)], lambda event: None)
    slots.wait_for(lambda slots: slots.requests)
    exits = []
    monkeypatch.setattr("os._exit", exits.append)
    leave(engine, 130, "Interrupted.\n")
    assert exits == [130]
    assert capsys.readouterr().err == "Interrupted.\n"


def test_an_idle_connection_does_not_hold_up_the_end(serve, client):
    server = serve(grace=60)
    assert client.get(server.url + "/health").status_code == 200
    server.stop()
    server.join()


class Kept(logging.Handler):
    """A handler that its owner means to go on using."""

    def __init__(self):
        super().__init__()
        self.said, self.closed = [], False

    def emit(self, record):
        self.said.append((record.levelname, record.getMessage()))

    def close(self):
        self.closed = True
        super().close()


def test_a_handler_on_the_root_logger_survives_and_hears_the_server(serve, wait_until):
    handler = Kept()
    logging.getLogger().addHandler(handler)
    try:
        server = serve()
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
            connection.sendall(b"\0 no request\r\n\r\n")
            assert b"400 Bad Request" in connection.recv(1000)
        wait_until(lambda: handler.said == [("WARNING", "Invalid HTTP request received.")])
        assert not handler.closed
    finally:
        logging.getLogger().removeHandler(handler)


@pytest.fixture
def free_listener():
    """A socket bound to a free loopback port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener


@pytest.fixture
def run_to_the_end(make_engine, make_slots, byte_tokenizer, free_listener):
    """Runs a server until it stops by itself; its exit code and what it said."""

    def run(slots, during):
        engine = make_engine(slots, start=False)
        app = build_app(engine, tiny_served(engine), byte_tokenizer)
        said = []
        with ThreadPoolExecutor(1) as pool:
            code = pool.submit(
                serve_until_signal, app, engine, free_listener, grace=5, say=said.append, model="tiny/model"
            )
            during(f"http://127.0.0.1:{free_listener.getsockname()[1]}")
            return code.result(), said

    return run


def tiny_served(engine):
    return Served(name="tiny/model", max_len=200, vocab_size=256, max_choices=engine.capacity)


def test_a_server_whose_engine_cannot_start_ends_with_code_1(run_to_the_end, make_slots, caplog):
    slots = make_slots(warm_up_failures=[RuntimeError("no such device")])
    code, said = run_to_the_end(slots, lambda url: None)
    assert code == 1
    assert any("no such device" in line for line in said)
    assert not any("Ready" in line for line in said)


def test_a_server_whose_engine_gives_up_ends_with_code_1(run_to_the_end, make_slots, caplog):
    slots = make_slots(failures=[RuntimeError("device lost") for _ in range(5)])

    def ask(url):
        for _ in range(5):
            with contextlib.suppress(httpx.TransportError):
                httpx.post(url + "/v1/completions", json=BODY, timeout=20)

    code, said = run_to_the_end(slots, ask)
    assert code == 1
    assert any(line.startswith("Ready: http://127.0.0.1:") for line in said)
    assert any("device lost" in line for line in said)
