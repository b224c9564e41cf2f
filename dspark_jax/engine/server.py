"""The OpenAI-compatible HTTP application over one engine."""

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dspark_jax.engine.access import RequireKey
from dspark_jax.engine.answer import Answer
from dspark_jax.engine.connection import BodyTooBig, EarlyResponse, read_body, while_connected
from dspark_jax.engine.engine import Engine, EngineState
from dspark_jax.engine.errors import Refusal, internal
from dspark_jax.engine.fields import Json, parse_object
from dspark_jax.engine.openai import Asked, PromptEncoder, Served, check_name, read_chat, read_completion
from dspark_jax.engine.replies import ChatReply, CompletionReply, ReplyShape, to_json, usage_of
from dspark_jax.engine.sse import send_stream

Reader = Callable[[Json, Served, PromptEncoder], Asked]


def build_app(engine: Engine, served: Served, encoder: PromptEncoder, *, api_key: str | None = None) -> Starlette:
    """The routes. `encoder` is used from one thread of its own, so that no prompt holds up the event loop."""
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", _Generation(read_chat, ChatReply), methods=["POST"]),
            Route("/v1/completions", _Generation(read_completion, CompletionReply), methods=["POST"]),
            Route("/v1/models", _models),
            Route("/v1/models/{name:path}", _model),
            Route("/health", _health),
        ],
        middleware=[Middleware(RequireKey, api_key=api_key)] if api_key else [],
        exception_handlers={Refusal: _refused, HTTPException: _http_error, Exception: _broken},
    )
    app.router.redirect_slashes = False
    app.state.engine, app.state.served, app.state.encoder = engine, served, encoder
    app.state.since = int(time.time())
    app.state.reading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")
    return app


class _Generation:
    """One generating endpoint as an ASGI application: reads, submits, replies, and cancels when the client goes."""

    def __init__(self, read: Reader, shape: type[ReplyShape]) -> None:
        self._read = read
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        state = request.app.state
        try:
            body = await read_body(request)
        except ClientDisconnect:
            return
        read = functools.partial(self._parse, body, state.served, state.encoder)
        asked = await asyncio.get_running_loop().run_in_executor(state.reading, read)
        answer = Answer(state.engine, asked.choices)
        try:
            await while_connected(receive, self._reply(answer, asked, state.served.name, send))
        finally:
            answer.cancel()

    def _parse(self, body: bytes, served: Served, encoder: PromptEncoder) -> Asked:
        return self._read(parse_object(body), served, encoder)

    async def _reply(self, answer: Answer, asked: Asked, model: str, send: Send) -> None:
        shape = self._shape(model)
        if asked.stream:
            await send_stream(send, shape, answer, asked)
            return
        whole = await answer.whole()
        usage = usage_of(asked.prompt_tokens, whole.stats)
        await _send_json(send, shape.whole(whole.texts, whole.finishes, usage))


async def _models(request: Request) -> Response:
    return _json({"object": "list", "data": [_model_card(request)]})


async def _model(request: Request) -> Response:
    check_name(request.path_params["name"], request.app.state.served)
    return _json(_model_card(request))


def _model_card(request: Request) -> dict[str, object]:
    served: Served = request.app.state.served
    return {
        "id": served.name,
        "object": "model",
        "created": request.app.state.since,
        "owned_by": "dspark_jax",
        "max_model_len": served.max_len,
    }


async def _health(request: Request) -> Response:
    state: EngineState = request.app.state.engine.state
    return _json({"status": state.value}, status=200 if state is EngineState.READY else 503)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _refusal(error, EarlyResponse if isinstance(error, BodyTooBig) else Response)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if error.status_code == 404:
        places = "/v1/chat/completions, /v1/completions, /v1/models and /health"
        message = f"There is nothing at {path[:200]}; this server has {places}."
    elif error.status_code == 405:
        message = f"{path} does not take {method}: use {(error.headers or {}).get('Allow', 'another method')}."
    else:
        message = error.detail
    return _refusal(Refusal(message, status=error.status_code, headers=error.headers))


async def _broken(_request: Request, _error: Exception) -> Response:
    return _refusal(internal())


def _refusal(refusal: Refusal, kind: type[Response] = Response) -> Response:
    return kind(to_json(refusal.body()), refusal.status, refusal.headers, media_type="application/json")


def _json(value: object, *, status: int = 200) -> Response:
    return Response(to_json(value), status_code=status, media_type="application/json")


async def _send_json(send: Send, value: object) -> None:
    response = _json(value)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})
