"""Servers fail in many ways; a request ends as an answer or, once all attempts are spent, as a failure."""

import asyncio
import json
import socket
import subprocess
import sys
from contextlib import closing
from itertools import islice

import pytest
from starlette.responses import JSONResponse, Response

from dspark_jax.data import endpoints
from dspark_jax.data.endpoints import Endpoints, Servers
from dspark_jax.data.generation import Answer, Failure, Request


def completion(text, finish="stop"):
    return JSONResponse({"choices": [{"message": {"content": text}, "finish_reason": finish}]})


@pytest.fixture
def dead():
    """The address of a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


@pytest.fixture
def ask(tokenizer):
    """ask(urls, requests, **settings) -> outcomes by the request's number; nothing waits for long."""

    def run(urls, requests, **settings):
        servers = Servers(urls=tuple(urls), model="m", **({"pause": 0.001, "rest": 0.05} | settings))
        return {outcome.request.tag: outcome for outcome in Endpoints(servers, tokenizer)(requests)}

    return run


def requests(count):
    for i in range(count):
        messages = ({"role": "user", "content": f"Question {i}"},)
        yield Request(prompt=(1,), temperature=0.5, top_p=0.9, seed=i, max_new_tokens=7, tag=i, messages=messages)


def echo(body, headers):
    return completion(f"About {body['messages'][-1]['content']}")


def test_a_request_says_all_it_has_to_and_its_answer_is_the_text_that_came(chat_server, ask, tokenizer):
    asked = []

    def reply(body, headers):
        asked.append((body, headers.get("authorization")))
        return completion(" Héllo ", "length")

    (answer,) = ask([chat_server(reply)], requests(1), api_key="secret").values()
    body = {"model": "m", "messages": [{"role": "user", "content": "Question 0"}], "max_tokens": 7}
    assert asked == [(body | {"temperature": 0.5, "top_p": 0.9, "seed": 0}, "Bearer secret")]
    assert (answer.text, answer.finish) == (" Héllo ", "length")
    assert answer.tokens == tuple(tokenizer.encode(" Héllo "))


FAULTS = {
    "500": lambda: JSONResponse({"error": {"message": "out of\nmemory"}}, 500),
    "429": lambda: Response("later", 429, {"retry-after": "0"}),
    "chat completion": lambda: Response("{"),
    "is no chat": lambda: JSONResponse({"choices": []}),
    "no chat": lambda: JSONResponse([1]),
    "what came": lambda: Response(b'{"choices": [{"message": {"content": "\\ud800"}}]}'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails_is_asked_again_and_given_up_after_all_attempts(chat_server, ask, fault):
    asked = []

    def reply(body, headers):
        asked.append(body["seed"])
        broken = body["seed"] == 1 or asked.count(body["seed"]) < 3
        return FAULTS[fault]() if broken else echo(body, headers)

    answers = ask([chat_server(reply)], requests(3), attempts=4)
    assert [answers[i].text for i in (0, 2)] == ["About Question 0", "About Question 2"]
    assert [asked.count(i) for i in range(3)] == [3, 4, 3]
    assert isinstance(answers[1], Failure)
    assert answers[1].reason.startswith("4 attempts failed, the last so: http://127")
    assert fault in answers[1].reason
    assert "\n" not in answers[1].reason


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (lambda: JSONResponse({"error": {"message": "too long"}}, 400), "400 too long"),
        (lambda: completion("x", "content_filter"), "ended with 'content_filter'"),
    ],
)
def test_a_refusal_of_the_request_itself_stands(chat_server, ask, response, reason):
    asked = []

    def reply(body, headers):
        asked.append(body)
        return response()

    (failure,) = ask([chat_server(reply)], requests(1)).values()
    assert reason in failure.reason
    assert len(asked) == 1


@pytest.mark.parametrize("status", [301, 401, 404])
def test_a_refusal_of_everybody_stops_at_once(chat_server, ask, status):
    with pytest.raises(ValueError, match=f"{status}.*check the address"):
        ask([chat_server(lambda body, headers: Response(status_code=status))], requests(9), concurrency=2)


def test_no_more_run_at_once_than_asked_for_and_the_freest_endpoint_is_next(chat_server, ask):
    running, most, shares = [0, 0], [0, 0], [0, 0]

    def replying(place, seconds):
        async def reply(body, headers):
            running[place] += 1
            shares[place] += 1
            most[place] = max(most[place], running[place])
            await asyncio.sleep(seconds)
            running[place] -= 1
            return echo(body, headers)

        return reply

    answers = ask([chat_server(replying(0, 0.2)), chat_server(replying(1, 0.001))], requests(40), concurrency=4)
    assert all(answer.text == f"About Question {i}" for i, answer in answers.items())
    assert len(answers) == 40
    assert most[0] <= 2
    assert max(most) <= 4
    assert shares[1] > shares[0]


def test_a_dead_endpoint_is_left_out_and_costs_no_row(chat_server, ask, dead):
    answers = ask([dead, chat_server(echo)], requests(30), concurrency=3)
    assert [answers[i].text for i in range(30)] == [f"About Question {i}" for i in range(30)]


def test_an_endpoint_that_keeps_failing_is_asked_less(chat_server, ask):
    asked = []

    def broken(body, headers):
        asked.append(body)
        return Response(status_code=503)

    answers = ask([chat_server(broken), chat_server(echo)], requests(30), concurrency=2, tolerance=2, rest=60.0)
    assert all(isinstance(answer, Answer) for answer in answers.values())
    assert 2 <= len(asked) <= 4


def test_when_nobody_can_be_reached_the_run_stops_and_rejects_nothing(ask, dead):
    with pytest.raises(ConnectionError, match="no endpoint can be reached any more"):
        ask([dead], requests(5), attempts=3)


def test_while_others_answer_a_row_that_fails_is_at_fault_alone(chat_server, ask, dead):
    # The dead one is the freest: the first row meets it on both attempts.
    answers = ask([dead, chat_server(echo)], requests(2), attempts=2, pause=0.3, tolerance=99)
    assert "2 attempts failed" in answers[0].reason
    assert answers[1].text == "About Question 1"


def test_pauses_grow_up_to_a_limit_and_a_server_may_ask_for_longer_ones(chat_server, ask, monkeypatch):
    waits, replies = [], iter([(429, "7"), (429, "soon"), (500, "99"), (500, ""), (500, "")])

    class Recording:
        def __getattr__(self, name):
            return getattr(asyncio, name)

        async def sleep(self, seconds):
            waits.append(seconds)

    def reply(body, headers):
        status, later = next(replies, (200, ""))
        return echo(body, headers) if status == 200 else Response("", status, {"retry-after": later})

    monkeypatch.setattr(endpoints, "asyncio", Recording())
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    (answer,) = ask([chat_server(reply)], requests(1), pause=1.0, longest_pause=8.0, tolerance=99).values()
    assert isinstance(answer, Answer)
    assert waits == [7, 2, 8, 8, 8]


def test_requests_are_drawn_as_room_appears_and_stopping_leaves_nothing_behind(chat_server, tokenizer):
    drawn = []

    def counted():
        for request in requests(100):
            drawn.append(request.tag)
            yield request

    servers = Servers(urls=(chat_server(echo),), model="m", concurrency=3)
    with closing(Endpoints(servers, tokenizer)(counted())) as answers:
        assert len(list(islice(answers, 10))) == 10
    assert 10 <= len(drawn) <= 13


REGENERATE = """
import sys
from dspark_jax.data.chat import parse_conversation
from dspark_jax.data import endpoints
from dspark_jax.data.endpoints import Endpoints, Servers
from dspark_jax.data.journal import Journal
from dspark_jax.data.regenerate import Answering, Regeneration

class Letters:
    def encode(self, text): return list(text.encode())
    def encode_chat(self, messages, add_generation_prompt=True, tools=()): return self.encode(str(messages))

url, out, rejected = sys.argv[1:]
rows = (parse_conversation({"turns": [f"Q{i}?", f"Why {i}?"]}) for i in range(30))
endpoints = Endpoints(Servers(urls=(url,), model="m", concurrency=4), Letters())
with Journal(out) as out, Journal(rejected) as rejected:
    regeneration = Regeneration(rows, generate=endpoints, tokenizer=Letters(), answered=out, rejected=rejected,
                                answering=Answering(), max_len=9999)
    for _ in regeneration.outcomes(): pass
"""


def test_a_killed_run_goes_on_and_asks_nothing_twice_that_is_done(chat_server, tmp_path):
    asked, pause = [], [0.02]

    async def reply(body, headers):
        asked.append(body["messages"][0]["content"])
        await asyncio.sleep(pause[0])
        return echo(body, headers)

    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", REGENERATE, chat_server(reply), str(out), str(tmp_path / "rejected.jsonl")]
    with subprocess.Popen(command) as process:
        while not out.exists() or out.read_text().count("\n") < 6:
            assert process.poll() is None
        process.kill()
    done = {json.loads(line)["messages"][0]["content"] for line in out.read_text().splitlines()}
    assert 6 <= len(done) < 30
    asked.clear()
    pause[0] = 0
    subprocess.run(command, check=True)
    assert not done & set(asked)
    rows = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    assert sorted(row[0]["content"] for row in rows) == sorted(f"Q{i}?" for i in range(30))
    assert all(row[3]["content"] == f"About {row[2]['content']}" for row in rows)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http://", "http://host:port/v1"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ValueError, match="an endpoint is an address like"):
        Servers(urls=(url,), model="m")
