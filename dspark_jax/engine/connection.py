"""One HTTP connection seen from a handler: its body, and whether the client is still there."""

import asyncio
from collections.abc import Coroutine

from starlette.requests import Request
from starlette.types import Receive

from dspark_jax.engine.errors import Refusal

MAX_BODY = 4 * 1024 * 1024


async def read_body(request: Request) -> bytes:
    """The whole body; `Refusal` 413 as soon as it is known to be over `MAX_BODY` bytes.

    Raises starlette's ClientDisconnect where the client leaves before its end.
    """
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > MAX_BODY:
        raise _too_big()
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise _too_big()
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


def _too_big() -> Refusal:
    message = f"The body is larger than {MAX_BODY // 2**20} MiB, which is more than any prompt this server can take."
    # The rest of the body is not read, so the connection cannot be used again.
    return Refusal(message, status=413, code="body_too_large", headers={"Connection": "close"})
