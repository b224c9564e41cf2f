"""Request bodies: what is read, what is refused and with which words, and that nothing else can happen."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.engine.errors import Refusal
from dspark_jax.engine.openai import Served, read_chat, read_completion

SERVED = Served(name="tiny", max_len=100, vocab_size=256, max_choices=6)
MESSAGES = [{"role": "user", "content": "hi"}]


class Encoder:
    def encode(self, text):
        return list(text.encode())

    def encode_chat(self, messages):
        if any("refuse me" in message["content"] for message in messages):
            raise ValueError("roles must alternate")
        return self.encode("|".join(f"{message['role']}:{message['content']}" for message in messages))


def chat(**fields):
    return read_chat({"model": "tiny", "messages": MESSAGES, **fields}, SERVED, Encoder())


def completion(**fields):
    return read_completion({"model": "tiny", "prompt": "hi", **fields}, SERVED, Encoder())


def refusal(read, **fields):
    with pytest.raises(Refusal) as raised:
        read(**fields)
    return raised.value


def test_the_defaults_are_those_of_openai_and_the_answer_gets_the_rest_of_the_context():
    asked = chat(seed=5)
    (choice,) = asked.choices
    assert choice.prompt == tuple(b"user:hi")
    assert (choice.sampling.temperature, choice.sampling.top_p, choice.sampling.top_k) == (1.0, 1.0, 0)
    assert choice.sampling.seed == 5
    assert choice.max_tokens == 100 - 7
    assert choice.stop == ()
    assert (asked.stream, asked.include_usage, asked.prompt_tokens) == (False, False, 7)


def test_every_field_of_a_chat_reaches_the_choices():
    asked = chat(
        temperature=0,
        top_p=0.5,
        top_k=7,
        seed=3,
        max_completion_tokens=9,
        stop=["a", "bc"],
        n=2,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )
    assert [choice.index for choice in asked.choices] == [0, 1]
    first, second = asked.choices
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.0, 0.5, 7)
    assert first.sampling.seed == 3
    assert second.sampling.seed not in (3, None)
    assert (first.max_tokens, first.stop) == (9, ("a", "bc"))
    assert (asked.stream, asked.include_usage) == (True, True)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([1, 2, 3], [b"\x01\x02\x03"]),
        ([[1, 2], [255]], [b"\x01\x02", b"\xff"]),
    ],
)
def test_completions_take_every_kind_of_prompt(prompt, prompts):
    asked = completion(prompt=prompt)
    assert [choice.prompt for choice in asked.choices] == [tuple(ids) for ids in prompts]
    assert asked.prompt_tokens == sum(map(len, prompts))


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prediction": {}},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": False, "top_logprobs": 0},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "modalities": ["text"]},
        {"temperature": None, "top_p": None, "n": None, "stop": None, "seed": None, "stream": None, "tools": None},
        {"max_tokens": 4, "max_completion_tokens": 4},
        {"top_k": -1},
        {"stop": []},
        {"stop": "x"},
        {"seed": -(2**63)},
    ],
)
def test_fields_that_change_nothing_are_taken(fields):
    assert chat(**fields).choices


def test_completions_take_their_own_neutral_fields():
    assert completion(echo=False, suffix=None, best_of=1, logprobs=None).choices


INFINITE, HUGE = float("inf"), 10**40

WRONG = [
    ({"temperature": "1"}, "temperature", "must be a number, not a string"),
    ({"temperature": True}, "temperature", "must be a number, not true"),
    ({"temperature": 2.1}, "temperature", "from 0 to 2"),
    ({"temperature": -0.1}, "temperature", "from 0 to 2"),
    ({"temperature": INFINITE}, "temperature", "beyond the range"),
    ({"temperature": HUGE}, "temperature", "integer of 133 bits"),
    ({"top_p": 0}, "top_p", "greater than 0 and at most 1"),
    ({"top_p": 1.01}, "top_p", "greater than 0 and at most 1"),
    ({"top_k": 1.5}, "top_k", "must be an integer, not a number"),
    ({"top_k": -2}, "top_k", "from -1 to"),
    ({"top_k": HUGE}, "top_k", "integer of 133 bits"),
    ({"seed": 2**63}, "seed", "from -9223372036854775808"),
    ({"seed": False}, "seed", "must be an integer, not false"),
    ({"max_tokens": 0}, "max_tokens", "from 1 to"),
    ({"max_tokens": 10.0}, "max_tokens", "must be an integer"),
    ({"max_tokens": HUGE}, "max_tokens", "from 1 to"),
    ({"n": 0}, "n", "from 1 to"),
    ({"n": 7}, "n", "at most 6 at once"),
    ({"n": True}, "n", "must be an integer, not true"),
    ({"stop": 3}, "stop", "a string or an array of strings, not an integer"),
    ({"stop": ["a", 3]}, "stop[1]", "must be a string, not an integer"),
    ({"stop": ""}, "stop", "from 1 to 1000 characters"),
    ({"stop": list("abcde")}, "stop", "at most 4"),
    ({"stop": ["\ud800"]}, "stop[0]", "surrogate"),
    ({"stream": 1}, "stream", "must be true or false, not an integer"),
    ({"stream": True, "stream_options": []}, "stream_options", "must be an object"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "the known fields are"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"model": None}, "model", "model is missing: send 'tiny'"),
    ({"model": 5}, "model", "must be a string"),
    ({"presence_penalty": 0.5}, "presence_penalty", "leave it out or send 0"),
    ({"presence_penalty": False}, "presence_penalty", "does not support"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "does not support"),
    ({"user": 5}, "user", "must be a string"),
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ({"guided_json": {}}, "guided_json", "the known fields are"),
    ({"x" * 5000: 1}, "x" * 57 + "...", "Unknown field"),
    ({"\ud800": 1}, r"\ud800", r"Unknown field \ud800"),
]

WRONG_CHAT = [
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages", "roles must alternate"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "different things"),
    ({"logprobs": True}, "logprobs", "leave it out or send false"),
    ({"logprobs": 0}, "logprobs", "does not support"),
    ({"response_format": {"type": "json_object"}}, "response_format", '{"type": "text"}'),
    ({"tools": [{"type": "function"}]}, "tools", "does not support"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "leave it out"),
    ({"prompt": "hi"}, "prompt", "Unknown field"),
]

WRONG_COMPLETION = [
    ({"prompt": None}, "prompt", "prompt is missing"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": []}, "prompt", "empty array"),
    ({"prompt": [[]]}, "prompt", "prompt is empty"),
    ({"prompt": {}}, "prompt", "a string, an array of strings, or token ids, not an object"),
    ({"prompt": [1.5]}, "prompt", "holds a number: send strings or token ids"),
    ({"prompt": [[1.5]]}, "prompt", "holds a number among its token ids"),
    ({"prompt": ["a", [1]]}, "prompt", "mixes a string with an array"),
    ({"prompt": [1, "a"]}, "prompt", "holds a string among its token ids"),
    ({"prompt": [True]}, "prompt", "holds true among its token ids"),
    ({"prompt": [256]}, "prompt", "from 0 to 255"),
    ({"prompt": [-1]}, "prompt", "from 0 to 255"),
    ({"prompt": [HUGE]}, "prompt", "from 0 to 255"),
    ({"prompt": ["a"] * 7}, "prompt", "7 choices"),
    ({"prompt": ["a"] * 4, "n": 2}, "n", "4 prompts times n = 2"),
    ({"echo": True}, "echo", "does not support"),
    ({"best_of": 3}, "best_of", "does not support"),
    ({"suffix": "x"}, "suffix", "does not support"),
    ({"logprobs": 0}, "logprobs", "does not support"),
    ({"messages": []}, "messages", "Unknown field"),
    ({"max_completion_tokens": 4}, "max_completion_tokens", "did you mean max_tokens?"),
]


@pytest.mark.parametrize(("fields", "param", "words"), WRONG + WRONG_CHAT)
def test_a_chat_body_that_cannot_be_honoured_is_refused_by_name(fields, param, words):
    refused = refusal(chat, **fields)
    assert (refused.status, refused.param) == (400, param)
    assert words in refused.message
    assert len(refused.message) < 1000


@pytest.mark.parametrize(("fields", "param", "words"), WRONG + WRONG_COMPLETION)
def test_a_completion_body_that_cannot_be_honoured_is_refused_by_name(fields, param, words):
    refused = refusal(completion, **fields)
    assert (refused.status, refused.param) == (400, param)
    assert words in refused.message


def test_another_model_is_not_found():
    refused = refusal(chat, model="gpt-4")
    assert (refused.status, refused.code, refused.param) == (404, "model_not_found", "model")
    assert "'tiny'" in refused.message


@pytest.mark.parametrize("read", [chat, completion])
def test_a_prompt_that_leaves_no_room_is_refused_with_numbers(read):
    long = {"messages": [{"role": "user", "content": "x" * 95}]} if read is chat else {"prompt": "x" * 100}
    refused = refusal(read, **long)
    assert refused.code == "context_length_exceeded"
    assert "100 tokens" in refused.message


def test_an_answer_that_does_not_fit_is_refused_with_numbers():
    refused = refusal(chat, max_tokens=94)
    assert refused.code == "context_length_exceeded"
    assert "101 were requested (7 in the prompt, 94 for the answer)" in refused.message
    assert "at most 93" in refused.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KNOWN = [
    *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop", "n"),
    *("temperature", "top_p", "top_k", "seed", "user", "metadata", "logprobs", "logit_bias", "response_format"),
    *("tools", "echo", "best_of", "suffix", "x"),
]


@given(
    st.sampled_from([read_chat, read_completion]),
    st.dictionaries(st.sampled_from(KNOWN), json_values, max_size=5),
)
def test_any_json_is_either_a_request_or_a_refusal_that_can_be_sent(read, fields):
    base = {"messages": MESSAGES} if read is read_chat else {"prompt": "hi"}
    asked = refused = None
    try:
        asked = read({"model": "tiny", **base, **fields}, SERVED, Encoder())
    except Refusal as error:
        refused = error
    if refused is not None:
        assert refused.status in (400, 404)
        assert json.dumps(refused.body(), allow_nan=False)
    else:
        assert 1 <= len(asked.choices) <= SERVED.max_choices
        assert all(1 <= c.max_tokens <= SERVED.max_len - len(c.prompt) for c in asked.choices)
