"""A chat tokenizer and a model of one line each, for tests that need no real ones."""

import json

import pytest

from dspark_jax.data.generation import Answer

START, END = 1, 2


class CharTokenizer:
    """One token a character behind a ChatML-like template: <start>role newline content <end> newline."""

    def encode(self, text):
        return [{"\x01": START, "\x02": END}.get(character, ord(character) + 10) for character in text]

    def decode(self, ids):
        return "".join(chr(token - 10) for token in ids if token > END)

    def encode_chat(self, messages, add_generation_prompt=True, tools=()):
        offered = f"\x01tools\n{json.dumps(tools)}\x02\n" if tools else ""
        rendered = offered + "".join(f"\x01{row['role']}\n{row['content']}{_calls(row)}\x02\n" for row in messages)
        return self.encode(rendered + ("\x01assistant\n" if add_generation_prompt else ""))


def _calls(row):
    return json.dumps(row["tool_calls"]) if "tool_calls" in row else ""


class Model:
    """Answers each request with what `reply(request)` says, `width` at a time, the last of each group first."""

    def __init__(self, tokenizer, reply, width=3):
        self._tokenizer, self._reply, self._width = tokenizer, reply, width
        self.asked = []

    def __call__(self, requests):
        group = []
        for request in requests:
            self.asked.append(request)
            group.append(request)
            if len(group) == self._width:
                yield from map(self._answer, reversed(group))
                group = []
        yield from map(self._answer, reversed(group))

    def _answer(self, request):
        tokens = self._tokenizer.encode(self._reply(request))
        finish = "length" if len(tokens) > request.max_new_tokens else "stop"
        return Answer(request=request, tokens=tuple(tokens[: request.max_new_tokens]), finish=finish)


@pytest.fixture
def tokenizer():
    return CharTokenizer()


@pytest.fixture
def model(tokenizer):
    return lambda reply, **settings: Model(tokenizer, reply, **settings)
