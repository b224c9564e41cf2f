"""What a client is told when a request cannot be served: the OpenAI error shape."""

from collections.abc import Mapping


class Refusal(ValueError):
    """A request that ends in an error reply.

    `status` is the HTTP status; `kind`, `param` and `code` are the other members of the OpenAI error object.
    The message is one sentence (or two) written for the person who sent the request.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """The JSON object of the reply."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def queue_full(waiting: int) -> Refusal:
    """429: every slot is busy and no place in the queue is left."""
    return Refusal(
        f"The server is busy: all slots are taken and {waiting} requests are waiting; try again in a moment.",
        status=429,
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": "1"},
    )


def unavailable(message: str) -> Refusal:
    """503: the engine takes no work (any more)."""
    return Refusal(message, status=503, kind="server_error", code="unavailable")


def internal() -> Refusal:
    """500: something broke while the request was being worked on; details stay in the server's log."""
    return Refusal(
        "The server failed while it worked on this request; its log says why. It is safe to send it again.",
        status=500,
        kind="server_error",
        code="internal_error",
    )
