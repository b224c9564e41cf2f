"""What data borrows from a model, as seen from here: its tokenizer and its generation, both handed in by the caller."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a chat tokenizer that data needs; dspark_jax.data.tokenizer.ChatTokenizer has it."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@runtime_checkable
class BatchTokenizer(Tokenizer, Protocol):
    """A tokenizer that encodes many conversations at once, on all cores."""

    def encode_chats(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], add_generation_prompt: bool = True
    ) -> list[list[int]]: ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue. top_p 1.0 keeps the whole distribution; `tag` comes back untouched.

    `messages` are what the prompt was rendered from, for servers that render it themselves.
    """

    prompt: tuple[int, ...]
    temperature: float
    top_p: float
    seed: int
    max_new_tokens: int
    tag: Any = None
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The continuation without the stop token; `finish` is "length" when max_new_tokens cut it.

    `text` is the answer as it was given where tokens were not; they are then what the tokenizer makes of it.
    """

    request: Request
    tokens: tuple[int, ...]
    finish: Literal["stop", "length"]
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A request that got no answer, and why."""

    request: Request
    reason: str


Generate = Callable[[Iterable[Request]], Iterator[Answer]]
"""Answers come in the order they finish. Requests are drawn one by one as room for them appears, never all at once."""

GenerateOrFail = Callable[[Iterable[Request]], Iterator[Answer | Failure]]
"""The same of something that may fail on a request and go on."""
