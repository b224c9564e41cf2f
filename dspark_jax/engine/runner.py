"""Running the application on uvicorn until a signal, and stopping without dropping accepted work."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from dspark_jax.engine.engine import Engine, EngineState

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# After the grace period the engine gets a second for the round in progress. Then every open request has been told that
# the server stops, and the rest is for slow readers.
_LAST_ROUND, _LAST_WORDS = 1.0, 3
_A_MOMENT = 0.05


def serve_until_signal(
    app: Starlette, engine: Engine, listener: socket.socket, *, grace: int, say: Callable[[str], None], model: str
) -> int:
    """Starts the engine and serves it on a bound socket. 0 after a signal, 1 where the engine failed.

    The first SIGINT or SIGTERM stops accepting and gives accepted requests `grace` seconds; the second ends the
    process at once.
    """
    server = EngineServer(app, engine, grace=grace, say=say)
    watcher = threading.Thread(
        target=_watch, args=(server, engine, _url(listener), model, say), name="watcher", daemon=True
    )
    # Taken before the engine starts: an exception out of a signal handler could come between its thread and us.
    with server.capture_signals():
        engine.start()
        watcher.start()
        server.run(sockets=[listener])
    return 1 if engine.state is EngineState.FAILED else 0


class EngineServer(uvicorn.Server):
    """uvicorn, with an engine to drain and signals that end in an exit code instead of being raised again."""

    def __init__(self, app: Starlette, engine: Engine, *, grace: int, say: Callable[[str], None]) -> None:
        config = uvicorn.Config(
            app,
            # Its own would close the handlers of whoever runs this; without any, Python prints warnings on stderr.
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            loop="asyncio",
            http="h11",
            ws="none",
            timeout_graceful_shutdown=grace + _LAST_WORDS,
        )
        super().__init__(config)
        self._engine = engine
        self._grace = grace
        self._say = say
        self._open_after_grace: int | None = None
        self._gave_up = False

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # Tests run the server in a thread, where Python forbids signal handlers.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        original = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in original.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        del sig, frame
        if self.should_exit:
            # At once: not even an engine in the middle of a compilation can hold it up, nothing is lost.
            sys.stdout.flush()
            os._exit(0)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.drain()
        if self._engine.outstanding:
            self._say(f"Finishing what was accepted, for at most {self._grace} s (Ctrl-C again to quit at once) ...")
        ending = asyncio.create_task(self._abort_after_grace())
        await super().shutdown(sockets)
        ending.cancel()
        self._engine.abort()
        if self._open_after_grace is not None:
            ended = not self._gave_up and self._engine.join(1.0)
            cut = self._engine.cut_short if ended else self._open_after_grace
            if cut:
                requests = "1 request was" if cut == 1 else f"{cut} requests were"
                self._say(f"{requests} cut short after {self._grace} s; --grace allows more.")
        self._say("Stopped.")

    async def _abort_after_grace(self) -> None:
        await asyncio.sleep(self._grace)
        self._open_after_grace = self._engine.open_requests
        self._engine.abort()
        waited = 0.0
        while not self._engine.join(0.0) and waited < _LAST_ROUND:
            await asyncio.sleep(_A_MOMENT)
            waited += _A_MOMENT
        if not self._engine.join(0.0):
            self._gave_up = True
            self._engine.give_up()


def _watch(server: EngineServer, engine: Engine, url: str, model: str, say: Callable[[str], None]) -> None:
    """Says when the engine is ready, and ends the server when the engine has ended."""
    if engine.wait_started() and engine.state is EngineState.READY:
        say(f"Ready: {url}/v1 serves {model!r} (Ctrl-C to stop)")
    engine.join()
    if engine.error is not None:
        say(f"The engine failed and the server stops: {type(engine.error).__name__}: {engine.error}")
    server.should_exit = True


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
