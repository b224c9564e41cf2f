"""`dspark data prepare`: prompts out of chat files and public data sets."""

import argparse
import json
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path

import numpy as np

from dspark_jax.cli._files import beside, refuse_same, say
from dspark_jax.core.signals import NOTHING_KEPT, keeping
from dspark_jax.data.chat import BadRow
from dspark_jax.data.dedup import Deduplicator
from dspark_jax.data.inputs import read_input
from dspark_jax.data.journal import whole_file
from dspark_jax.data.prepare import Duplicate, Prompt, prepare
from dspark_jax.data.store import held_out, prompt_hash, require_two_sides
from dspark_jax.engine.arguments import at_least, probability

_NEWS = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--in",
        dest="input",
        nargs="+",
        required=True,
        metavar="FILE|DATASET",
        help="chat JSONL, a JSON array, parquet, a folder of them, or the name of a data set on the Hub",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="the JSONL file of prompts to write")
    parser.add_argument("--split", default="train", metavar="NAME", help="split of a data set (%(default)s)")
    parser.add_argument("--config-name", metavar="NAME", help="configuration of a data set that has several")
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="read at most so many rows of each input")
    parser.add_argument(
        "--near-duplicates",
        type=float,
        default=0.8,
        metavar="J",
        help="drop a prompt whose 3-word shingles have this Jaccard similarity with an earlier one's (%(default)s); "
        "that takes some 13 kB of memory a prompt; above 1 only exact duplicates are dropped, for less",
    )
    parser.add_argument(
        "--validation",
        type=probability,
        default=0.0,
        metavar="S",
        help="write this share of the prompts to FILE.validation.jsonl instead (%(default)s)",
    )
    # Training holds out by seed 0: with the same one here, its share would be the one that is already gone.
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="which share that is (%(default)s)")
    parser.set_defaults(act=_run)


@keeping(lambda: NOTHING_KEPT)
def _run(args: argparse.Namespace) -> int:
    for name in args.input:
        refuse_same(name, args.out)
    if args.near_duplicates <= 0:
        raise ValueError(f"--near-duplicates is a similarity above 0, not {args.near_duplicates:g}")
    deduplicator = Deduplicator(args.near_duplicates)
    found = chain.from_iterable(
        prepare(
            islice(read_input(name, split=args.split, config_name=args.config_name), args.limit),
            deduplicator,
            source=Path(name).stem if Path(name).is_file() else name,
        )
        for name in args.input
    )
    duplicates, bad, sides, first = 0, 0, [0, 0], ""
    paths = [args.out, beside(args.out, "validation"), beside(args.out, "rejected")]
    with ExitStack() as stack:
        # Without --validation an older file of it is nobody's business here.
        out, validation, rejected = (
            stack.enter_context(whole_file(path)) if path != paths[1] or args.validation else None for path in paths
        )
        for number, item in enumerate(found, start=1):
            match item:
                case Prompt():
                    side = int(held_out(np.asarray([prompt_hash(item.first)]), args.validation, args.seed)[0])
                    sides[side] += 1
                    print(json.dumps(item.row, ensure_ascii=False), file=validation if side else out)
                case Duplicate():
                    duplicates += 1
                case BadRow():
                    bad, first = bad + 1, first or item.error
                    print(json.dumps({"error": item.error, "text": item.text}, ensure_ascii=False), file=rejected)
            if number % _NEWS == 0:
                say(f"{number:,} rows read, {sum(sides):,} kept.")
        if not sum(sides):
            why = f"; the first is not, because {first}" if first else ""
            raise ValueError(f"there is no usable prompt among the {bad:,} rows of {', '.join(args.input)}{why}")
        require_two_sides(*sides, validation=args.validation, what="prompts")
    say(f"{args.out}: {sides[0]:,} prompts; {duplicates:,} duplicates and {bad:,} bad rows were dropped.")
    if args.validation:
        say(f"{paths[1]}: {sides[1]:,} prompts, none of which opens like one of the others.")
    if bad:
        say(f"The bad rows are in {paths[2]}; the first: {first}")
    return 0
