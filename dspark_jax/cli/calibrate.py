"""Calibrate a drafter's confidences on held-out prompts, so that a scheduler can trust them.

Decodes the prompts with every draft verified, fits the estimators on half of them and measures them on the other half.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console

from dspark_jax.cli._meter import Meter
from dspark_jax.cli._reliability import draw, tables
from dspark_jax.core.signals import NOTHING_KEPT, keeping
from dspark_jax.data.chat import BadRow, Conversation, read_conversations
from dspark_jax.data.journal import require_writable
from dspark_jax.decoding.calibration import MIN_OUTCOMES, calibrate
from dspark_jax.decoding.calibration_file import NAME, Calibration, Measured, write_calibration
from dspark_jax.decoding.confidence import HEAD_AND_DRAFT, Estimator
from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.json_file import read_object
from dspark_jax.decoding.outcomes import Outcomes
from dspark_jax.decoding.reliability import report
from dspark_jax.decoding.scheduler import FixedLength
from dspark_jax.decoding.slots import DecodeSlots, Sampling, SlotRound
from dspark_jax.engine.arguments import at_least
from dspark_jax.engine.assembly import LoadedModel, add_model_arguments, load_model, remember_compilations
from dspark_jax.interop.fingerprint import drafter_fingerprint

FIGURE = "reliability.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    add_model_arguments(parser, scheduling=False)
    parser.add_argument(
        "--data",
        required=True,
        metavar="FILE",
        help="prompts that the drafter was not trained on: JSONL rows of messages, conversations or turns",
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="what it will be served at (%(default)s)"
    )
    parser.add_argument("--prompts", type=at_least(2), metavar="N", help="the first N of them (by default all)")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=128, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of sampling and halves (%(default)s)")
    parser.add_argument(
        "--batch",
        dest="max_batch",
        type=at_least(1),
        default=32,
        metavar="N",
        help="prompts that decode together (%(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write (by default beside the drafter, where serving looks)"
    )


@keeping(lambda: NOTHING_KEPT)
def run(args: argparse.Namespace) -> int:
    if not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature is a number from 0 up, not {args.temperature}")
    conversations = _read(args.data, args.prompts)
    remember_compilations(_say)
    # What an earlier calibration says, perhaps of another drafter, has no part in a new one.
    model = load_model(argparse.Namespace(**vars(args) | {"estimator": "raw"}), _say)
    if model.draft is None:
        raise ValueError("there is no drafter to calibrate: give one with --draft")
    out = model.draft if args.out is None else args.out
    copied = "copy the drafter to a directory of yours and name that with --draft, or give --out DIR"
    require_writable(out, copied if args.out is None else "name another directory with --out")
    replaced = _rounds_of(out / NAME)
    fingerprint = drafter_fingerprint(model.draft)
    outcomes = _decode(model, conversations, args)
    fitting, held_out = outcomes.halves(args.seed)
    fits = calibrate(fitting)
    if 0 in fits.borrowed:
        # What is there may have been fitted to thousands of rounds.
        raise ValueError(
            f"{fitting.rounds:,} rounds in the half that fits are too few to fit anything, which takes {MIN_OUTCOMES}: "
            "give more prompts or a larger --max-new-tokens; nothing is written"
        )
    estimators = fits.by_name()
    chosen = args.estimator or ("sts" if "sts" in estimators else "combined")
    if chosen not in estimators:
        raise ValueError("the drafter has no confidence head, so --estimator sts cannot be: choose combined or raw")
    reports = {name: report(estimator, held_out) for name, estimator in estimators.items()}
    calibration = Calibration(
        fingerprint=fingerprint,
        use=chosen,
        measured=Measured(
            temperature=args.temperature,
            prompts=len(np.unique(outcomes.prompt_B)),
            rounds=outcomes.rounds,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
        ),
        temperature_K=fits.temperature_K,
        combined=fits.combined,
    )
    path = write_calibration(out, calibration, reports)
    draw(reports, out / FIGURE, f"{model.draft.name}, temperature {args.temperature:g}, held-out prompts")
    console = Console()
    for table in tables(reports):
        console.print(table)
    for k in fits.borrowed:
        _say(
            f"Draft {k}: fewer than {MIN_OUTCOMES} were reached in the half that fits, so it takes over what draft "
            f"{k - 1} has."
        )
    count = f"{outcomes.rounds:,} rounds of {calibration.measured.prompts:,} prompts"
    _say(f"{path} and {FIGURE} are written: {count}; {chosen} is what serving takes.")
    if replaced is not None:
        _say(f"They replace a calibration of {replaced:,} rounds.")
    return 0


def _rounds_of(path: Path) -> int | None:
    """What the calibration that is there was fitted on; None where there is none that says so."""
    try:
        return int(read_object(path, "it is replaced")["measured"]["rounds"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None


def _read(path: str, limit: int | None) -> list[Conversation]:
    conversations, bad = [], []
    for row in read_conversations(path):
        if isinstance(row, BadRow):
            bad.append(row.error)
        elif limit is None or len(conversations) < limit:
            conversations.append(row)
    if bad:
        _say(f"{len(bad):,} rows are left out; the first: {bad[0]}")
    return conversations


def _decode(model: LoadedModel, conversations: list[Conversation], args: argparse.Namespace) -> Outcomes:
    """Every round of the prompts' answers, all drafts verified."""
    # Equal prompts are one: they must not be on both sides of the split.
    encoded = dict.fromkeys(tuple(model.tokenizer.encode_chat(_asked(row), tools=row.tools)) for row in conversations)
    prompts = [prompt for prompt in encoded if len(prompt) + args.max_new_tokens <= model.max_len]
    if left_out := len(encoded) - len(prompts):
        _say(f"{left_out:,} prompts are left out: with {args.max_new_tokens} new tokens they exceed {model.max_len}.")
    if len(prompts) < 2:
        raise ValueError(
            f"{args.data} has {len(prompts)} different prompts that leave room for --max-new-tokens "
            f"{args.max_new_tokens} within {model.max_len} tokens: two halves need at least 2, and hundreds are better"
        )
    slots = DecodeSlots(
        model.target,
        model.drafter,
        max_batch=min(model.max_batch, len(prompts)),
        max_len=max(map(len, prompts)) + args.max_new_tokens,
        policy=FixedLength(),
        estimator=Estimator.raw(model.drafter.block_size, HEAD_AND_DRAFT),
        dtype=jnp.dtype(model.dtype),
        # Few programs to compile, and the batch is full nearly to the end.
        elastic=False,
    )
    jobs = (
        Job(
            prompt=prompt,
            sampling=Sampling(temperature=args.temperature, seed=args.seed + number),
            max_new_tokens=args.max_new_tokens,
            stop_ids=model.stop_ids,
            tag=number,
        )
        for number, prompt in enumerate(prompts)
    )
    rounds: list[SlotRound] = []
    numbers: list[int] = []
    done = 0
    with Meter("prompts", total=len(prompts)) as meter:

        def observe(job: Job, out: SlotRound) -> None:
            rounds.append(out)
            numbers.append(job.tag)
            meter.show(done, len(rounds), "rounds")

        for _ in generate(slots, jobs, observe):
            done += 1
    return Outcomes.of(rounds, numbers)


def _asked(conversation: Conversation) -> list[dict[str, Any]]:
    """The messages up to the last user turn; of bare turns the first, since a later one would need its answers."""
    messages = conversation.as_rows()
    asked = [at for at, message in enumerate(messages) if message["role"] == "user"]
    answered = any(message["role"] == "assistant" for message in messages)
    return messages[: asked[-1 if answered else 0] + 1]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
