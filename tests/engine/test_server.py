"""The HTTP application over scripted slots, spoken to over a real loopback connection."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from dspark_jax.decoding.slots import Sampling

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = b"user: hi\nassistant: "


def chat_body(**fields):
    return {"model": "tiny/model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, **fields}


def completion_body(**fields):
    return {"model": "tiny/model", "prompt": "hi", "max_tokens": 20, **fields}


def events_of(response):
    """The JSON objects of a stream, after checking its form; the last line must be [DONE]."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.read().decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def error_of(response, status):
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return error


def said(scripted_text, prompt, seed, size=20):
    return scripted_text(prompt, Sampling(temperature=1.0, seed=seed))[:size].decode()


def test_a_chat_answer_has_the_shape_of_openai(serve, client, scripted_text):
    server = serve()
    reply = client.post(server.url + CHAT, json=chat_body(seed=3)).json()
    assert reply["id"].startswith("chatcmpl-")
    assert (reply["object"], reply["model"]) == ("chat.completion", "tiny/model")
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": said(scripted_text, PROMPT, 3), "refusal": None}
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (20, 20, 40)
    details = usage["completion_tokens_details"]
    assert 0 < details["accepted_prediction_tokens"] < 20
    assert details["rejected_prediction_tokens"] > 0


def test_a_chat_stream_brings_the_same_text_role_first_and_usage_last(serve, client, scripted_text):
    server = serve()
    body = chat_body(seed=3, stream=True, stream_options={"include_usage": True})
    with client.stream("POST", server.url + CHAT, json=body) as response:
        *chunks, last = events_of(response)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == said(scripted_text, PROMPT, 3)
    assert len(deltas) > 5, "a delta a round, not one at the end"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    plain = client.post(server.url + CHAT, json=chat_body(seed=3)).json()
    assert last["usage"] == plain["usage"]


def test_without_the_option_a_stream_has_no_usage(serve, client):
    with client.stream("POST", serve().url + CHAT, json=chat_body(stream=True)) as response:
        events = events_of(response)
    assert all("usage" not in event and event["choices"] for event in events)


def test_completions_answer_every_prompt_and_choice(serve, client, scripted_text):
    server = serve(max_queue=4)
    reply = client.post(server.url + COMPLETIONS, json=completion_body(prompt=["a", "bc"], n=2, seed=5)).json()
    assert (reply["object"], reply["id"][:5]) == ("text_completion", "cmpl-")
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in reply["choices"]]
    assert texts[0] == said(scripted_text, b"a", 5)
    assert texts[2] == said(scripted_text, b"bc", 5)
    assert len(set(texts)) == 4
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (3, 80)
    single = client.post(server.url + COMPLETIONS, json=completion_body(prompt="bc", n=2, seed=5)).json()
    assert [choice["text"] for choice in single["choices"]] == texts[2:]


def test_a_completion_stream_with_choices_interleaved(serve, client):
    server = serve(max_queue=4)
    body = completion_body(n=3, seed=5)
    with client.stream("POST", server.url + COMPLETIONS, json={**body, "stream": True}) as response:
        choices = [event["choices"][0] for event in events_of(response)]
    plain = client.post(server.url + COMPLETIONS, json=body).json()
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == plain["choices"][index]["text"]
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["length"]


def test_stop_strings_and_stop_ids_end_a_text(serve, client, make_slots):
    slots = make_slots(script={b"one": b"some words, then more", b"two": b"short"})
    server = serve(slots)
    one = client.post(server.url + COMPLETIONS, json=completion_body(prompt="one", stop=[", then", "zz"])).json()
    assert (one["choices"][0]["text"], one["choices"][0]["finish_reason"]) == ("some words", "stop")
    assert one["usage"]["completion_tokens"] == 10
    two = client.post(server.url + COMPLETIONS, json=completion_body(prompt="two")).json()
    assert (two["choices"][0]["text"], two["choices"][0]["finish_reason"]) == ("short", "stop")
    assert two["usage"]["completion_tokens"] == 5


def test_a_seed_gives_the_same_text_alone_and_among_others_and_no_seed_fresh_ones(serve, client):
    server = serve(max_queue=32)

    def text(**fields):
        return client.post(server.url + CHAT, json=chat_body(**fields)).json()["choices"][0]["message"]["content"]

    alone = text(seed=9)
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(text) for _ in range(6)]
        among = pool.submit(text, seed=9)
        assert among.result() == alone
        assert len({other.result() for other in others}) == 6


def test_requests_that_come_together_share_rounds(serve, client, make_slots, wait_until):
    slots = make_slots(max_batch=4)
    server = serve(slots)
    slots.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(client.post, server.url + CHAT, json=chat_body()) for _ in range(4)]
        slots.wait_for(lambda slots: slots.requests)
        wait_until(lambda: server.engine.outstanding >= 4)
        slots.gate.set()
        assert [reply.result().status_code for reply in replies] == [200] * 4
    assert slots.largest_batch == 4


def test_models_and_health(serve, client):
    server = serve()
    listed = client.get(server.url + "/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny/model"]
    assert client.get(server.url + "/v1/models/tiny/model").json() == listed["data"][0]
    assert error_of(client.get(server.url + "/v1/models/other"), 404)["code"] == "model_not_found"
    health = client.get(server.url + "/health")
    assert (health.status_code, health.json()) == (200, {"status": "ready"})


def test_health_is_503_until_the_engine_is_ready_and_requests_wait(serve, client, wait_until):
    server = serve(start_engine=False)
    health = client.get(server.url + "/health")
    assert (health.status_code, health.json()) == (503, {"status": "starting"})
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(client.post, server.url + CHAT, json=chat_body())
        wait_until(lambda: server.engine.outstanding)
        server.engine.start()
        assert reply.result().status_code == 200


def test_a_failed_engine_is_503_everywhere(serve, client, make_slots, caplog):
    slots = make_slots(warm_up_failures=[RuntimeError("no device")])
    server = serve(slots)
    assert client.get(server.url + "/health").json() == {"status": "failed"}
    error = error_of(client.post(server.url + CHAT, json=chat_body()), 503)
    assert "no device" not in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/", 404, "/v1/chat/completions"),
        ("POST", "/v1/chat/completion", 404, "nothing at /v1/chat/completion"),
        ("POST", "/v1/models/", 405, "use"),
        ("GET", CHAT, 405, "use POST"),
        ("DELETE", "/v1/models", 405, "use"),
    ],
)
def test_unknown_paths_and_methods_get_the_error_shape(serve, client, method, path, status, words):
    assert words in error_of(client.request(method, serve().url + path), status)["message"]


def test_bad_bodies_get_the_error_shape(serve, client):
    server = serve()

    def post(**content):
        return client.post(server.url + CHAT, **content)

    assert error_of(post(content=b"{"), 400)["code"] == "invalid_json"
    assert error_of(post(content=b""), 400)["code"] == "invalid_json"
    assert error_of(post(json=[]), 400)["code"] == "invalid_json"
    assert error_of(post(json=chat_body(temperature="hot")), 400)["param"] == "temperature"
    assert error_of(post(json=chat_body(model="gpt")), 404)["code"] == "model_not_found"
    long = chat_body(messages=[{"role": "user", "content": "x" * 200}])
    assert error_of(post(json=long), 400)["code"] == "context_length_exceeded"
    refused = chat_body(messages=[{"role": "user", "content": "refuse me"}])
    assert "roles must alternate" in error_of(post(json=refused), 400)["message"]
    assert post(json=chat_body()).status_code == 200


def test_a_full_queue_is_429_with_retry_after(serve, client, make_slots, wait_until):
    slots = make_slots(max_batch=1)
    server = serve(slots, max_queue=1)
    slots.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        accepted = [pool.submit(client.post, server.url + CHAT, json=chat_body()) for _ in range(2)]
        wait_until(lambda: server.engine.outstanding >= 2)
        response = client.post(server.url + CHAT, json=chat_body())
        assert error_of(response, 429)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        slots.gate.set()
        assert [reply.result().status_code for reply in accepted] == [200, 200]


def test_an_api_key_is_asked_of_everything_but_health(serve, client):
    server = serve(api_key="geheim-ß")
    assert client.get(server.url + "/health").status_code == 200
    for header in ({}, {"Authorization": "Bearer geheim"}, {"Authorization": "geheim-ß".encode()}, {"X-Key": "geheim"}):
        response = client.post(server.url + CHAT, json=chat_body(), headers=header)
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert error_of(client.get(server.url + "/nothing"), 401)
    right = {"Authorization": "bearer geheim-ß".encode()}
    assert client.post(server.url + CHAT, json=chat_body(), headers=right).status_code == 200


def test_a_failed_round_is_an_ordinary_500_while_nothing_was_sent(serve, client, make_slots, caplog):
    slots = make_slots()
    server = serve(slots)
    for stream in (False, True):
        slots.failures.append(RuntimeError("out of memory"))
        error = error_of(client.post(server.url + CHAT, json=chat_body(stream=stream)), 500)
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert "out of memory" not in error["message"]
    assert client.post(server.url + CHAT, json=chat_body()).status_code == 200


def test_a_failure_in_the_middle_of_a_stream_is_sent_as_an_event(serve, client, make_slots, caplog):
    slots = make_slots()
    server = serve(slots)
    slots.failures += [None, None, RuntimeError("out of memory")]
    with client.stream("POST", server.url + CHAT, json=chat_body(stream=True, max_tokens=150)) as response:
        rest = [line for line in response.iter_lines() if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "internal_error"


def test_a_bug_is_a_500_without_a_traceback_for_the_client(serve, client, make_slots, caplog):
    server = serve()
    server.server.config.app.state.encoder = None
    assert error_of(client.post(server.url + CHAT, json=chat_body()), 500)["code"] == "internal_error"
