"""Chat messages: roles, text parts, and what is refused."""

import pytest

from dspark_jax.engine.errors import Refusal
from dspark_jax.engine.messages import chat_messages

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("messages", "read"),
    [
        ([{"role": "developer", "content": "be"}, *MESSAGES], "system:be|user:hi"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "user:a\nb"),
        (
            [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": []}, *MESSAGES],
            "user:hi|assistant:|user:hi",
        ),
        ([{"role": "tool", "content": "42", "tool_call_id": "x"}], "tool:42"),
        ([{"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None}], "assistant:a"),
        ([{"role": "user", "content": "hi", "name": "Ann"}], "user:hi"),
    ],
)
def test_messages_become_what_templates_take(messages, read):
    assert "|".join(f"{message['role']}:{message['content']}" for message in chat_messages(messages)) == read


WRONG = [
    (None, "messages", "messages is missing"),
    ([], "messages", "at least one"),
    ("hi", "messages", "must be an array, not a string"),
    (["hi"], "messages[0]", "must be an object, not a string"),
    ([{"content": "hi"}], "messages[0].role", "role is missing"),
    ([{"role": "bot", "content": "hi"}], "messages[0].role", "must be one of system"),
    ([{"role": "user"}], "messages[0].content", "a string or an array of text parts, not null"),
    ([{"role": "user", "content": 5}], "messages[0].content", "not an integer"),
    ([{"role": "user", "content": "\ud83d"}], "messages[0].content", "surrogate"),
    ([{"role": "user", "content": ["a"]}], "messages[0].content[0]", "must be an object"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        "messages[0].content[0].type",
        "must be text",
    ),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "not null"),
    (
        [{"role": "assistant", "tool_calls": [{}], "content": None}],
        "messages[0].tool_calls",
        "neither calls tools",
    ),
    ([{"role": "user", "contents": "hi"}], "messages[0].contents", "did you mean content?"),
]


@pytest.mark.parametrize(("messages", "param", "words"), WRONG)
def test_messages_that_cannot_be_honoured_are_refused_by_place(messages, param, words):
    with pytest.raises(Refusal) as refused:
        chat_messages(messages)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert words in refused.value.message
