"""The official `openai` client against the server."""

import re
import textwrap
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from dspark_jax.decoding.slots import Sampling
from dspark_jax.engine.assembly import DEFAULT_TARGET
from dspark_jax.engine.errors import queue_full

MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT = b"user: hi\nassistant: "


@pytest.fixture
def connect():
    clients = []

    def make(server, **options):
        options = {"api_key": "none", "max_retries": 0, "timeout": 20, **options}
        clients.append(OpenAI(base_url=server.url + "/v1", **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def test_chat_streamed_and_not(serve, connect, scripted_text):
    client = connect(serve())
    options = {"model": "tiny/model", "messages": MESSAGES, "max_tokens": 20, "seed": 3, "temperature": 1.0}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == scripted_text(PROMPT, Sampling(temperature=1.0, seed=3))[:20].decode()
    assert whole.choices[0].finish_reason == "length"
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 20
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_the_example_in_the_readme_streams_an_answer(serve, capsys, scripted_text):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"( {4}from openai import OpenAI\n(?:(?: {4}.*)?\n)+)", readme)
    assert f'"{DEFAULT_TARGET}"' in example
    for ours, theirs in (("http://127.0.0.1:8000", serve().url), (DEFAULT_TARGET, "tiny/model")):
        example = example.replace(ours, theirs)
    names = {}
    exec(textwrap.dedent(example), names)
    names["client"].close()
    assert len(capsys.readouterr().out) > 100


def test_a_reply_can_be_sent_back_as_part_of_the_conversation(serve, connect):
    client = connect(serve())
    reply = client.chat.completions.create(model="tiny/model", messages=MESSAGES, max_tokens=3)
    history = [*MESSAGES, reply.choices[0].message, *MESSAGES]
    assert client.chat.completions.create(model="tiny/model", messages=history, max_tokens=3).choices


def test_fields_that_openai_does_not_know_travel_in_the_extra_body(serve, connect):
    client = connect(serve())
    reply = client.chat.completions.create(model="tiny/model", messages=MESSAGES, max_tokens=3, extra_body={"top_k": 5})
    assert reply.usage.completion_tokens == 3


def test_completions_streamed_and_not(serve, connect):
    client = connect(serve())
    options = {"model": "tiny/model", "prompt": [1, 2, 3], "max_tokens": 20, "seed": 3, "n": 2}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True))
    for index in range(2):
        text = "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index)
        assert text == whole.choices[index].text


def test_models(serve, connect):
    client = connect(serve())
    assert [model.id for model in client.models.list()] == ["tiny/model"]
    assert client.models.retrieve("tiny/model").id == "tiny/model"


def test_refusals_become_the_clients_own_errors(serve, connect):
    server = serve(api_key="secret")
    with pytest.raises(openai.AuthenticationError):
        connect(server).models.list()
    client = connect(server, api_key="secret")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny/model", messages=MESSAGES, logprobs=True)
    assert bad.value.param == "logprobs"


def test_a_full_queue_is_a_rate_limit_error_and_is_retried(serve, connect, monkeypatch):
    server = serve()
    submit, calls = server.engine.submit, []

    def full_the_first_time(*args):
        calls.append(args)
        if len(calls) == 1:
            refusal = queue_full(0)
            refusal.headers["Retry-After"] = "0"
            raise refusal
        return submit(*args)

    monkeypatch.setattr(server.engine, "submit", full_the_first_time)
    options = {"model": "tiny/model", "messages": MESSAGES, "max_tokens": 3}
    with pytest.raises(openai.RateLimitError):
        connect(server).chat.completions.create(**options)
    calls.clear()
    assert connect(server, max_retries=1).chat.completions.create(**options).choices
    assert len(calls) == 2


def test_a_failure_in_a_stream_reaches_the_reader(serve, connect, make_slots, caplog):
    slots = make_slots(failures=[None, RuntimeError("out of memory")])
    client = connect(serve(slots))
    stream = client.chat.completions.create(model="tiny/model", messages=MESSAGES, stream=True, max_tokens=150)
    next(iter(stream))
    with pytest.raises(openai.APIError) as failed:
        list(stream)
    assert "out of memory" not in failed.value.message
