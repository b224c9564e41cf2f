"""The API key."""

import hmac

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dspark_jax.engine.errors import Refusal
from dspark_jax.engine.replies import to_json

_OPEN = ("/health",)


class RequireKey:
    """Lets through what carries `Authorization: Bearer KEY`; /health is open."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode("utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN or self._allows(scope):
            await self._app(scope, receive, send)
            return
        refusal = Refusal(
            "A valid API key is needed: send the header `Authorization: Bearer KEY`.",
            status=401,
            code="invalid_api_key",
        )
        headers = {"WWW-Authenticate": "Bearer"}
        response = Response(to_json(refusal.body()), refusal.status, headers, media_type="application/json")
        await response(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Header bytes arrive decoded as Latin-1; the comparison takes as long wherever they differ.
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key)
