"""Flags of `dspark data regenerate` for answers from servers."""

import argparse
import os

from dspark_jax.data.endpoints import Endpoints, Servers
from dspark_jax.data.generation import Tokenizer
from dspark_jax.data.tokenizer import load_tokenizer
from dspark_jax.engine.arguments import at_least
from dspark_jax.engine.assembly import USUAL_LEN
from dspark_jax.interop.huggingface import resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--endpoint",
        nargs="+",
        metavar="URL",
        help="ask these OpenAI-compatible servers, as http://127.0.0.1:8000/v1, instead of loading the target; of "
        "--target only the tokenizer is then read, for lengths and loops",
    )
    parser.add_argument("--model", metavar="NAME", help="the name of the target at the endpoints")
    parser.add_argument(
        "--concurrency", type=at_least(1), default=32, metavar="N", help="requests under way at once (%(default)s)"
    )
    parser.add_argument(
        "--attempts",
        type=at_least(1),
        default=6,
        metavar="N",
        help="times a row is tried at the endpoints before it is rejected (%(default)s)",
    )
    parser.add_argument("--api-key-env", metavar="VAR", help="the environment variable that holds the endpoints' key")


def connect(args: argparse.Namespace) -> tuple[Endpoints, Tokenizer, int]:
    """What answers, the tokenizer to measure with, and the tokens a request may hold."""
    if not args.model:
        raise ValueError("--endpoint needs --model, the name of the target there")
    key = os.environ.get(args.api_key_env) if args.api_key_env else None
    if args.api_key_env and not key:
        raise ValueError(f"--api-key-env: the environment variable {args.api_key_env} is not set")
    servers = Servers(
        urls=tuple(args.endpoint),
        model=args.model,
        concurrency=args.concurrency,
        attempts=args.attempts,
        api_key=key,
    )
    tokenizer = load_tokenizer(resolve(args.target, weights=False))
    return Endpoints(servers, tokenizer), tokenizer, args.max_len or USUAL_LEN
