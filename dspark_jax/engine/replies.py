"""The JSON objects a client gets back: whole answers and the chunks of a stream."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

from dspark_jax.engine.choice import ChoiceStats, Finish, Progress

Reply = dict[str, object]


def usage_of(prompt_tokens: int, stats: Sequence[ChoiceStats]) -> Reply:
    """The usage object: a prompt counts once, an answer counts the tokens that were delivered.

    The end-of-turn token is not delivered and not counted, nor are a stop string's tokens or what the last round
    brought beyond the end. `rejected_prediction_tokens` are drafts that were verified and not delivered.
    """
    completion = sum(choice.tokens for choice in stats)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": sum(choice.accepted for choice in stats),
            "rejected_prediction_tokens": sum(choice.rejected for choice in stats),
        },
    }


class ReplyShape(ABC):
    """How one endpoint writes the answers of one request."""

    def __init__(self, model: str) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.model = model
        self.created = int(time.time())

    @property
    @abstractmethod
    def prefix(self) -> str:
        """What the reply's id begins with."""

    @abstractmethod
    def whole(self, texts: Sequence[str], finishes: Sequence[Finish], usage: Reply) -> Reply:
        """The reply of a request that is not streamed."""

    @abstractmethod
    def opening(self, index: int) -> Sequence[Reply]:
        """Chunks that come before the first text of a choice."""

    @abstractmethod
    def chunks(self, progress: Progress) -> Sequence[Reply]:
        """The chunks that carry one round's text and, at the end, the finish reason."""

    @abstractmethod
    def closing(self, usage: Reply) -> Reply:
        """The chunk that carries the usage after all choices."""


@final
class ChatReply(ReplyShape):
    @property
    def prefix(self) -> str:
        return "chatcmpl"

    def whole(self, texts: Sequence[str], finishes: Sequence[Finish], usage: Reply) -> Reply:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": finish,
            }
            for index, (text, finish) in enumerate(zip(texts, finishes, strict=True))
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage}

    def opening(self, index: int) -> Sequence[Reply]:
        return [self._chunk(index, {"role": "assistant", "content": ""}, None)]

    def chunks(self, progress: Progress) -> Sequence[Reply]:
        chunks = []
        if progress.text:
            chunks.append(self._chunk(progress.index, {"content": progress.text}, None))
        if progress.finish is not None:
            chunks.append(self._chunk(progress.index, {}, progress.finish))
        return chunks

    def closing(self, usage: Reply) -> Reply:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def _chunk(self, index: int, delta: Mapping[str, str], finish: Finish | None) -> Reply:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> Reply:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@final
class CompletionReply(ReplyShape):
    @property
    def prefix(self) -> str:
        return "cmpl"

    def whole(self, texts: Sequence[str], finishes: Sequence[Finish], usage: Reply) -> Reply:
        pairs = zip(texts, finishes, strict=True)
        choices = [_text_choice(index, text, finish) for index, (text, finish) in enumerate(pairs)]
        return {**self._head(), "choices": choices, "usage": usage}

    def opening(self, index: int) -> Sequence[Reply]:
        return []

    def chunks(self, progress: Progress) -> Sequence[Reply]:
        return [{**self._head(), "choices": [_text_choice(progress.index, progress.text, progress.finish)]}]

    def closing(self, usage: Reply) -> Reply:
        return {**self._head(), "choices": [], "usage": usage}

    def _head(self) -> Reply:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}


def _text_choice(index: int, text: str, finish: Finish | None) -> Reply:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def to_json(value: object) -> bytes:
    """Compact UTF-8 JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def to_event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


END_OF_STREAM = b"data: [DONE]\n\n"
