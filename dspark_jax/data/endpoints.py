"""Answers from servers that speak OpenAI's protocol, instead of an engine of our own."""

import asyncio
import random
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import httpx

from dspark_jax.data.generation import Answer, Failure, Request, Tokenizer

# Whatever is asked, these will be said again: the key or the model's name is wrong, or the path is.
_FATAL = (401, 403, 404)
_BUSY = 429
_UNREACHED = (httpx.ConnectError, httpx.ConnectTimeout)


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Where to ask, and how patiently.

    urls: base addresses, as http://127.0.0.1:8000/v1. concurrency: requests under way at once, over all of them.
    attempts: times a row is tried; between them it waits `pause` seconds, twice as long each time.
    tolerance: failures in a row after which an endpoint is left out for `rest` seconds.
    timeout: seconds an answer may take.
    """

    urls: tuple[str, ...]
    model: str
    concurrency: int = 32
    api_key: str | None = None
    attempts: int = 6
    pause: float = 1.0
    longest_pause: float = 60.0
    tolerance: int = 3
    rest: float = 30.0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if wrong := [url for url in self.urls if not _is_address(url)]:
            raise ValueError(f"an endpoint is an address like http://127.0.0.1:8000/v1, not {wrong[0]}")


class Endpoints:
    """Generation behind the interface that data knows; requests go to the endpoint with the fewest under way.

    A request that fails on every attempt comes out as a Failure. ConnectionError when no endpoint can be reached any
    more and ValueError when one refuses the key, the model or the path: then the requests are not at fault.
    """

    def __init__(self, servers: Servers, tokenizer: Tokenizer):
        self._servers, self._tokenizer = servers, tokenizer
        self._endpoints = [_Endpoint(url=url.rstrip("/") + "/chat/completions") for url in servers.urls]
        self._last_answer = -1.0

    def __call__(self, requests: Iterable[Request]) -> Iterator[Answer | Failure]:
        requests = iter(requests)
        running: set[asyncio.Task[Answer | Failure]] = set()
        with asyncio.Runner() as runner:
            client, loop = self._client(), runner.get_loop()
            try:
                while True:
                    # Follow-ups appear while answers are taken, so there is nothing to draw ahead.
                    for request in islice(requests, self._servers.concurrency - len(running)):
                        running.add(loop.create_task(self._answer(client, request)))
                    if not running:
                        return
                    done, running = runner.run(asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))
                    errors = [error for task in done if (error := task.exception()) is not None]
                    yield from (task.result() for task in done if task.exception() is None)
                    if errors:
                        raise errors[0]
            finally:
                runner.run(_stop(running, client))

    def _client(self) -> httpx.AsyncClient:
        key, at_once = self._servers.api_key, self._servers.concurrency
        return httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self._servers.timeout, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once),
        )

    async def _answer(self, client: httpx.AsyncClient, request: Request) -> Answer | Failure:
        reason, unreached, first_failure, wait = "", False, float("inf"), 0.0
        for attempt in range(self._servers.attempts):
            if attempt:
                await asyncio.sleep(max(wait, self._backoff(attempt)))
            endpoint = await self._free()
            wait, unreached = 0.0, False
            try:
                with endpoint.asked():
                    response = await client.post(endpoint.url, json=self._body(request))
            except httpx.RequestError as error:
                unreached = isinstance(error, _UNREACHED)
                reason = f"{endpoint.url}: {error or type(error).__name__}"
            else:
                outcome = self._read(request, endpoint, response)
                if not isinstance(outcome, str):
                    endpoint.failures, self._last_answer = 0, time.monotonic()
                    return outcome
                reason = outcome
                wait = _asked_to_wait(response, self._servers.longest_pause)
                if response.status_code == _BUSY:
                    continue
            first_failure = min(first_failure, time.monotonic())
            endpoint.fail(self._servers)
        if unreached and self._last_answer < first_failure:
            raise ConnectionError(
                f"no endpoint can be reached any more ({reason}): what is done is kept, so run it again"
            )
        return Failure(request=request, reason=f"{self._servers.attempts} attempts failed, the last so: {reason}")

    def _backoff(self, attempt: int) -> float:
        # Scattered, so that those that failed together do not come back together.
        longest = min(self._servers.pause * 2 ** (attempt - 1), self._servers.longest_pause)
        return longest * random.uniform(0.5, 1.0)

    async def _free(self) -> "_Endpoint":
        """The endpoint with the fewest requests under way, of those that are not left out at the moment."""
        while True:
            now = time.monotonic()
            if awake := [endpoint for endpoint in self._endpoints if endpoint.rests_until <= now]:
                return min(awake, key=lambda endpoint: endpoint.under_way)
            await asyncio.sleep(min(endpoint.rests_until for endpoint in self._endpoints) - now)

    def _body(self, request: Request) -> dict[str, Any]:
        return {
            "model": self._servers.model,
            "messages": list(request.messages),
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "max_tokens": request.max_new_tokens,
        }

    def _read(self, request: Request, endpoint: "_Endpoint", response: httpx.Response) -> Answer | Failure | str:
        """What came: an answer, a refusal that stands, or as text why to try again."""
        status, said = response.status_code, f"{endpoint.url}: {response.status_code} {_complaint(response)}".rstrip()
        if status in _FATAL or 300 <= status < 400:
            raise ValueError(f"{said}: check the address (as in http://127.0.0.1:8000/v1), --model and the key")
        if status == _BUSY or status >= 500:
            return said
        if status != 200:
            return Failure(request=request, reason=said)
        try:
            choice = response.json()["choices"][0]
            text, finish = choice["message"]["content"] or "", choice.get("finish_reason")
            text.encode()
        except (ValueError, LookupError, TypeError, AttributeError):
            return f"{endpoint.url}: what came is no chat completion"
        if finish not in ("stop", "length", None):
            return Failure(request=request, reason=f"{endpoint.url}: the answer ended with {finish!r}")
        cut = "length" if finish == "length" else "stop"
        return Answer(request=request, tokens=tuple(self._tokenizer.encode(text)), finish=cut, text=text)


@dataclass
class _Endpoint:
    """What is known of an endpoint while requests run."""

    url: str
    under_way: int = 0
    failures: int = 0
    rests_until: float = 0.0

    @contextmanager
    def asked(self) -> Generator[None, None, None]:
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1

    def fail(self, servers: Servers) -> None:
        self.failures += 1
        if self.failures >= servers.tolerance:
            self.rests_until = time.monotonic() + servers.rest


def _is_address(url: str) -> bool:
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parts.scheme in ("http", "https") and bool(parts.host)


def _asked_to_wait(response: httpx.Response, longest: float) -> float:
    """Seconds of a Retry-After header; dates are not read."""
    text = response.headers.get("retry-after", "")
    return min(float(text), longest) if text.isascii() and text.isdigit() else 0.0


def _complaint(response: httpx.Response) -> str:
    """The message of an error body, or the start of whatever it is, on one line."""
    try:
        said = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        said = response.text
    return " ".join(str(said)[:300].split()).rstrip(".")


async def _stop(running: set[asyncio.Task[Answer | Failure]], client: httpx.AsyncClient) -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await client.aclose()
