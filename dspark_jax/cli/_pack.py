"""`dspark data pack`: conversations as packed token rows that training reads from disk."""

import argparse
import json
from itertools import chain
from pathlib import Path

from dspark_jax.cli._files import say
from dspark_jax.core.signals import NOTHING_KEPT, keeping
from dspark_jax.data.chat import read_conversations
from dspark_jax.data.shards import read_manifest, write_shards
from dspark_jax.data.store import TokenStore, fingerprint
from dspark_jax.data.supervision import supervise_all
from dspark_jax.data.tokenizer import load_tokenizer
from dspark_jax.engine.arguments import at_least, probability
from dspark_jax.engine.assembly import DEFAULT_TARGET
from dspark_jax.interop.huggingface import resolve, stop_ids
from dspark_jax.interop.publish import whole_directory
from dspark_jax.training.known_targets import shipped_target
from dspark_jax.training.sources import PackedShards, token_facts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--in", dest="input", nargs="+", required=True, metavar="FILE", help="chat JSONL with the target's answers"
    )
    parser.add_argument(
        "--out",
        default=PackedShards().path,
        metavar="DIR",
        help="the folder to write, a new or empty one (%(default)s)",
    )
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="NAME|DIR|HUB_ID",
        help="whose tokenizer, chat template and stop tokens to use (%(default)s)",
    )
    parser.add_argument(
        "--length", type=at_least(2), default=4096, metavar="N", help="tokens of a row; longer conversations are cut"
    )
    parser.add_argument(
        "--validation",
        type=probability,
        default=0.02,
        metavar="S",
        help="the share of prompts whose conversations are kept for validation (%(default)s)",
    )
    parser.add_argument(
        "--shard-rows", type=at_least(1), default=8192, metavar="N", help="rows of a file (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="order in which rows are filled (%(default)s)")
    parser.set_defaults(act=_run)


@keeping(lambda: NOTHING_KEPT)
def _run(args: argparse.Namespace) -> int:
    directory = shipped_target(args.target) or resolve(args.target, weights=False)
    out, stops = Path(args.out), stop_ids(directory)
    tokenizer = token_facts(directory, stops)
    settings = {"length": args.length, "validation": args.validation, "seed": args.seed, "shard_rows": args.shard_rows}
    mark = fingerprint(args.input, tokenizer, settings)
    if (read_manifest(out) or {}).get("fingerprint") == mark:
        say(f"{out} holds these files already, packed in this way.")
        return 0
    store, bad = TokenStore.collect(
        supervise_all(
            chain.from_iterable(map(read_conversations, args.input)),
            load_tokenizer(directory),
            stop_ids=stops,
            max_len=args.length,
        )
    )
    facts = {"fingerprint": mark, "inputs": args.input, "target": args.target, **tokenizer}
    with whole_directory(out) as partial:
        rejected = "".join(json.dumps({"error": row.error, "text": row.text}, ensure_ascii=False) + "\n" for row in bad)
        (partial / "rejected.jsonl").write_text(rejected, encoding="utf-8")
        manifest = write_shards(partial, store, facts=facts, **settings)
    rows, held_out = sum(manifest["rows"].values()), manifest["rows"]["validation"]
    say(
        f"{out}: {len(store):,} conversations in {rows:,} rows of {args.length:,} tokens, "
        f"{manifest['tokens'] / (rows * args.length):.1%} full, {held_out:,} of them for validation."
    )
    if bad:
        say(f"{len(bad):,} rows could not be used and are in {out / 'rejected.jsonl'}; the first: {bad[0].error}")
    return 0
