"""Connections: bodies that are too big, and clients that go away."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from dspark_jax.engine import connection
from dspark_jax.engine.connection import MAX_BODY

CHAT = "/v1/chat/completions"
PROMPT = b"user: hi\nassistant: "


def chat_body(**fields):
    return {"model": "tiny/model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, **fields}


def test_a_body_that_is_too_big_is_refused_whether_announced_or_not(serve, client):
    server = serve()
    big = b" " * (MAX_BODY + 1)
    pieces = (big[i : i + 2**16] for i in range(0, len(big), 2**16))
    for content in (big, pieces):
        response = client.post(server.url + CHAT, content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_of_a_body_before_it_reads_still_gets_the_refusal(serve, chunked):
    size = 8 * MAX_BODY
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (size, bytes(size)) if chunked else bytes(size)
    with opened(serve(), "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}") as sock:
        sock.sendall(body)
        assert read_refusal(sock)["code"] == "body_too_large"


def test_a_client_that_asks_first_is_refused_before_it_sends(serve):
    with opened(serve(), f"Content-Length: {MAX_BODY + 1}", "Expect: 100-continue") as sock:
        assert read_refusal(sock)["code"] == "body_too_large"


def test_a_body_without_an_end_is_not_read_for_ever(serve, monkeypatch):
    monkeypatch.setattr(connection, "_MAX_WASTE", MAX_BODY)
    with opened(serve(), f"Content-Length: {10**12}") as sock, pytest.raises(ConnectionError):
        sock.sendall(bytes(32 * MAX_BODY))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(serve, client, make_slots, monkeypatch, stream, wait_until):
    slots = make_slots()
    server = serve(slots)
    tickets, submit = [], server.engine.submit
    monkeypatch.setattr(server.engine, "submit", lambda *args: tickets.append(submit(*args)) or tickets[-1])
    slots.gate.clear()
    connection = raw_request(server, chat_body(stream=stream, max_tokens=150))
    slots.wait_for(lambda slots: slots.requests)
    connection.close()
    wait_until(lambda: tickets[0].cancelled)
    slots.gate.set()
    slots.wait_for(lambda slots: not slots.requests)
    assert slots.ended_at[0] < 150
    assert client.post(server.url + CHAT, json=chat_body()).status_code == 200


def test_a_client_that_stops_reading_a_stream_frees_its_slot(serve, make_slots):
    slots = make_slots(script={PROMPT: b"x" * 10_000}, max_len=20_000)
    server = serve(slots)
    with (
        httpx.Client(timeout=20) as client,
        client.stream("POST", server.url + CHAT, json=chat_body(stream=True, max_tokens=10_000)) as response,
    ):
        next(response.iter_lines())
    slots.wait_for(lambda slots: not slots.requests)
    assert slots.ended_at[0] < 10_000


def test_a_client_that_leaves_the_queue_gives_its_place_back(serve, client, make_slots, wait_until):
    slots = make_slots(max_batch=1)
    server = serve(slots, max_queue=1)
    slots.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(client.post, server.url + CHAT, json=chat_body())
        slots.wait_for(lambda slots: slots.requests)
        waiting = raw_request(server, chat_body(seed=1))
        wait_until(lambda: server.engine.outstanding >= 2)
        waiting.close()
        wait_until(lambda: server.engine.outstanding < 2)
        slots.gate.set()
        assert running.result().status_code == 200
    assert len(slots.admitted) == 1


def opened(server, *headers):
    """A connection that has sent the head of a request."""
    sock = socket.create_connection(server.listener.getsockname(), timeout=20)
    sock.sendall("\r\n".join([f"POST {CHAT} HTTP/1.1", "Host: x", *headers, "", ""]).encode())
    return sock


def read_refusal(sock):
    """The error object of a 413, as soon as all of it is there."""
    with sock.makefile("rb") as answer:
        head = b"".join(iter(answer.readline, b"\r\n")).decode()
        assert head.startswith("HTTP/1.1 413 ")
        return json.loads(answer.read(int(re.search(r"content-length: (\d+)", head, re.IGNORECASE)[1])))["error"]


def raw_request(server, body):
    """A request on a connection that the test can drop."""
    content = json.dumps(body).encode()
    sock = opened(server, f"Content-Length: {len(content)}")
    sock.sendall(content)
    return sock
