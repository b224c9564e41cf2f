"""One HTTP connection seen from a handler: its body, and whether the client is still there."""

import asyncio
import contextlib
from collections.abc import Coroutine

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dspark_jax.engine.errors import Refusal

MAX_BODY = 4 * 1024 * 1024
# How much of a refused body, and for how long, is read only to be thrown away.
_MAX_WASTE = 64 * MAX_BODY
_MAX_WASTE_SECONDS = 30


class BodyTooBig(Refusal):
    """413, said while the body is still arriving."""

    def __init__(self) -> None:
        size = MAX_BODY // 2**20
        message = f"The body is larger than {size} MiB, which is more than any prompt this server can take."
        super().__init__(message, status=413, code="body_too_large", headers={"Connection": "close"})


class EarlyResponse(Response):
    """A last word that is sent at once, while the rest of the request is read and dropped.

    A connection that is closed on unread bytes is reset, and a reset takes the answer from a client that has not read
    it yet: most clients send their whole body first.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_WASTE_SECONDS):
                await _drop_body(receive)
        await send({"type": "http.response.body", "body": b""})


async def read_body(request: Request) -> bytes:
    """The whole body; `BodyTooBig` as soon as it is known to be over `MAX_BODY` bytes.

    Raises starlette's ClientDisconnect where the client leaves before its end.
    """
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > MAX_BODY:
        raise BodyTooBig()
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise BodyTooBig()
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Runs `work` to its end, or cancels it when the client goes away. The body must have been read."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _drop_body(receive: Receive) -> None:
    wasted = 0
    while wasted <= _MAX_WASTE:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        wasted += len(message["body"])
