"""Streaming a reply as server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import Send

from dspark_jax.engine.answer import Answer
from dspark_jax.engine.choice import ChoiceStats
from dspark_jax.engine.errors import Refusal
from dspark_jax.engine.openai import Asked
from dspark_jax.engine.replies import END_OF_STREAM, Reply, ReplyShape, to_event, usage_of

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the nginx kind would otherwise collect events before passing them on.
    (b"x-accel-buffering", b"no"),
]


async def send_stream(send: Send, shape: ReplyShape, answer: Answer, asked: Asked) -> None:
    """Sends the events of a request until it ends.

    The response starts with the first round: a request that fails before it raises its `Refusal`, which can still
    become an ordinary error reply. Later failures are sent as an event with the error object.
    """
    async with aclosing(_events(shape, answer, asked)) as events:
        first = await anext(events)
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Refusal as refusal:
            await send({"type": "http.response.body", "body": to_event(refusal.body()), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(shape: ReplyShape, answer: Answer, asked: Asked) -> AsyncGenerator[bytes]:
    opened: set[int] = set()
    stats: list[ChoiceStats] = []
    async for progress in answer.progress():
        chunks: list[Reply] = []
        if progress.index not in opened:
            opened.add(progress.index)
            chunks.extend(shape.opening(progress.index))
        chunks.extend(shape.chunks(progress))
        if progress.stats is not None:
            stats.append(progress.stats)
        for chunk in chunks:
            if asked.include_usage:
                chunk["usage"] = None
            yield to_event(chunk)
    if asked.include_usage:
        yield to_event(shape.closing(usage_of(asked.prompt_tokens, stats)))
    yield END_OF_STREAM
