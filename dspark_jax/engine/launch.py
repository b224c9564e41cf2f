"""`serve.py`: flags to a running server, and back to an exit code."""

import argparse
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Sequence

from dspark_jax.core.logs import print_once
from dspark_jax.core.signals import Terminated, end, last_words, terminable
from dspark_jax.decoding.scheduler import FixedLength, Policy, TwoStep
from dspark_jax.engine.arguments import at_least
from dspark_jax.engine.assembly import add_model_arguments, load_model, remember_compilations
from dspark_jax.engine.leaving import leave
from dspark_jax.engine.runner import serve_until_signal
from dspark_jax.engine.server import build_app

USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until a signal: 0 after a clean stop, 1 after a failed engine, 2 for what cannot be served."""
    args = parse_arguments(argv)
    print_once()
    try:
        # Until the server handles signals itself, a polite kill is the same as Ctrl-C.
        with terminable(), _bound_socket(args.host, args.port) as listener:
            return _serve(args, listener)
    except (KeyboardInterrupt, Terminated) as ended:
        _say(last_words("Stopped.", ended))
        return end(0)
    except (ValueError, OSError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return USAGE_ERROR


def _serve(args: argparse.Namespace, listener: socket.socket) -> int:
    remember_compilations(_say)
    model = load_model(args, _say)
    engine = model.engine(max_queue=args.max_queue, refit_every=args.refit_every, say=_say)
    app = build_app(engine, model.served(engine), model.tokenizer, api_key=args.api_key)
    if args.api_key is None and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        _say(f"Anyone who can reach {args.host} can use this server: --api-key would ask them for a key.")
    _say(compiling(model.scheduling.policy, block=model.drafter.block_size, max_batch=model.max_batch))
    code = serve_until_signal(app, engine, listener, grace=args.grace, say=_say, model=model.name)
    # The process is ending: one more Ctrl-C has nothing left to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return leave(engine, code)


def compiling(policy: Policy, *, block: int, max_batch: int) -> str:
    """What is said before rounds are compiled: for how many requests, and how much is drafted for each."""
    fixed = policy.length if isinstance(policy, FixedLength) else None
    drafts = block if fixed is None else min(fixed, block)
    drafting = f"{drafts} draft{'' if drafts == 1 else 's'} a round" if drafts else "no drafts"
    if isinstance(policy, TwoStep):
        drafting = f"up to {drafting}"
    requests = "1 request at a time" if max_batch == 1 else f"up to {max_batch} requests at once"
    return f"Compiling for {requests} ({drafting}); the first time takes longest ..."


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of the server."""
    parser = argparse.ArgumentParser(
        prog="serve.py", description="Serve a model with speculative decoding behind an OpenAI-compatible API."
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--max-batch",
        type=at_least(1),
        metavar="N",
        help="requests that decode together (by default 4 on a CPU and 16 on an accelerator)",
    )
    parser.add_argument(
        "--refit-every",
        type=at_least(1),
        metavar="ROUNDS",
        help="fit confidences anew after so many rounds, to what was served (by default never)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s: this machine only)")
    parser.add_argument("--port", type=_port, default=8000, help="port to listen on, 0 for any free one (%(default)s)")
    parser.add_argument(
        "--api-key",
        type=_key,
        default=os.environ.get("DSPARK_API_KEY") or None,
        metavar="KEY",
        help="refuse requests without this key ($DSPARK_API_KEY keeps it out of the process list)",
    )
    parser.add_argument(
        "--max-queue", type=at_least(0), default=64, metavar="N", help="requests that may wait for a slot (%(default)s)"
    )
    parser.add_argument(
        "--grace",
        type=at_least(0),
        default=30,
        metavar="SECONDS",
        help="how long accepted requests may take to finish after Ctrl-C (%(default)s)",
    )
    return parser.parse_args(argv)


def _key(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("the key is empty: leave the flag out to serve without one")
    return text.strip()


def _port(text: str) -> int:
    port = at_least(0)(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: at most 65535")
    return port


def _bound_socket(host: str, port: int) -> socket.socket:
    """Bound before anything is loaded, so that a busy port is said at once. It does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(f"--host {host} is no address of this machine ({error.strerror})") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = os.strerror(error.errno or 0)
        raise OSError(f"cannot listen on {host} port {port} ({reason}): choose another with --port or --host") from None
    return listener


def _say(message: str) -> None:
    print(message, flush=True)
