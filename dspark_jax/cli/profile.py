"""Measure how long a round takes by how much it verifies, so that verification can follow the load.

Serving finds the result by itself. An interrupted run goes on where it was; with --topology nothing is measured, and
times are predicted for a TPU that is not there.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

from dspark_jax.cli._meter import Meter
from dspark_jax.cli._step_curve import draw, tables
from dspark_jax.decoding.buckets import whole_span
from dspark_jax.decoding.fingerprint import Fingerprint
from dspark_jax.decoding.measure import REPEATS, default_spans, plans, profile, states
from dspark_jax.decoding.profile_file import Profile
from dspark_jax.decoding.programs import Programs
from dspark_jax.decoding.rejection import Rule
from dspark_jax.engine.arguments import at_least
from dspark_jax.engine.assembly import add_model_arguments, load_model, remember_compilations
from dspark_jax.engine.scheduling import add_rule_argument, profile_path, require_kept

_SMALLEST = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    add_model_arguments(parser, scheduling=False)
    add_rule_argument(parser)
    parser.add_argument(
        "--max-batch",
        type=at_least(1),
        metavar="N",
        help="requests that decode together, as for serving (by default 4 on a CPU and 16 on an accelerator)",
    )
    parser.add_argument(
        "--spans",
        type=_spans,
        metavar="S,S",
        help="context lengths to measure (by default 256, 2048 and, on an accelerator, 8192)",
    )
    parser.add_argument(
        "--repeats",
        type=at_least(1),
        default=REPEATS,
        metavar="N",
        help="how often every kind of round is timed, there and back (%(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write (by default in the cache, where serving looks)"
    )
    parser.add_argument(
        "--topology",
        metavar="KIND:CHIPS",
        help="predict for one chip of a TPU that is not there, such as v5e:2x2; needs libtpu, downloads nothing",
    )


def run(args: argparse.Namespace) -> int:
    require_kept(args.out)
    if args.topology is not None:
        from dspark_jax.cli._predict import predict

        _report(*predict(args, _say))
        return 0
    remember_compilations(_say)
    model = load_model(args, _say)
    if not model.drafts:
        raise ValueError("there is no drafter, so every round is the same: give one with --draft")
    block, rule = model.drafter.block_size, Rule(args.rule)
    fingerprint = Fingerprint.of(model.target, model.drafter, dtype=model.dtype, rule=rule)
    path = args.out or profile_path(fingerprint)
    spans = spans_within(args.spans, model.max_len, block, on_cpu=jax.default_backend() == "cpu")
    programs = Programs(model.target, model.drafter, dtype=jnp.dtype(model.dtype))
    total = sum(len(plans(rows, block)) for rows, _ in states(model.max_batch, spans))
    _say(f"Measuring {total} kinds of round; most of the time goes into compiling them, the first time ...")
    with Meter("kinds of round", total=total) as meter:
        found = profile(
            path,
            fingerprint,
            programs,
            max_batch=model.max_batch,
            spans=spans,
            repeats=args.repeats,
            watch=lambda done, already: meter.show(done, already=already),
            tell=meter.note,
            say=_say,
        )
    _report(path, found)
    return 0


def spans_within(wanted: tuple[int, ...] | None, max_len: int, block: int, *, on_cpu: bool) -> tuple[int, ...]:
    """The spans asked for, none longer than serving would use."""
    if wanted is None:
        return default_spans(max_len, block, on_cpu=on_cpu)
    longest = whole_span(max_len, block)
    if max(wanted) > longest:
        raise ValueError(f"--spans: {max(wanted)} is more than the {longest} positions that --max-len allows")
    return wanted


def _report(path: Path, found: Profile) -> None:
    console = Console()
    for table in tables(found):
        console.print(table)
    figure = path.with_suffix(".png")
    draw(found, figure)
    kind = "predicted" if found.predicted else "measured"
    _say(f"{path} and {figure.name} are written: {len(found.curve.measured)} kinds of round, {kind} ({found.method}).")


def _spans(text: str) -> tuple[int, ...]:
    return tuple(sorted({at_least(_SMALLEST)(part) for part in text.split(",")}))


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
