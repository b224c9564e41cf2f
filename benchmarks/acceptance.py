"""Accepted length of a drafter on prompt sets by temperature, with the counts it is made of.

    python benchmarks/acceptance.py --prompts DIR [--limit 20] [--max-new-tokens 128] [--json acceptance.json]

At temperature 0 the text is the autoregressive loop's own: `--check-greedy N` compares the first N prompts of every
set, alone and in a mixed batch, token by token (run it in float32).
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from prompts import read_sets

from dspark_jax.decoding.generate import Completion, Job, generate
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.decoding.stats import DecodeStats
from dspark_jax.drafters.base import Drafter, NoDrafter
from dspark_jax.engine.assembly import LoadedModel, add_model_arguments, load_model
from dspark_jax.engine.scheduling import NONE, Scheduling


def main() -> int:
    args = _parser().parse_args()
    model = load_model(args, lambda line: print(line, file=sys.stderr))
    if not model.drafts:
        raise SystemExit("acceptance: there is no drafter to measure; give one with --draft")
    sets = read_sets(args.prompts, args.limit)
    jobs = [job for name, prompts in sets.items() for job in _jobs(model, name, prompts, args)]
    results: dict[str, dict[str, DecodeStats]] = {}
    for temperature in args.temperatures:
        law = [replace(job, sampling=Sampling(temperature=temperature, seed=i)) for i, job in enumerate(jobs)]
        totals = dict.fromkeys(sets, DecodeStats())
        for completion in generate(_slots(model, model.drafter, model.max_batch), law):
            totals[completion.job.tag[0]] += completion.stats
        results[f"T={temperature:g}"] = totals
    if results:
        _print_table(results)
    if args.json:
        rows = {
            law: {name: asdict(stats) | {"accepted_length": stats.accepted_length} for name, stats in totals.items()}
            for law, totals in results.items()
        }
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return _check_greedy(model, jobs, args) if args.check_greedy else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Accepted length of a drafter on prompt sets.")
    add_model_arguments(parser)
    # What lies in a cache must not decide what is measured.
    parser.set_defaults(step_curve=NONE)
    parser.add_argument("--max-batch", type=int, default=8, help="prompts that decode together (%(default)s)")
    parser.add_argument("--prompts", type=Path, required=True, help="a directory with one JSONL file of prompts a set")
    parser.add_argument("--limit", type=int, default=20, help="prompts a set (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--check-greedy", type=int, default=0, metavar="N", help="prompts a set to compare")
    parser.add_argument("--json", type=Path, help="write the counts there")
    return parser


def _jobs(model: LoadedModel, name: str, prompts: list[str], args: argparse.Namespace) -> list[Job]:
    """One job a prompt that leaves room for the answer; the tag is (set, row)."""
    jobs = []
    for row, prompt in enumerate(prompts):
        ids = tuple(model.tokenizer.encode_chat([{"role": "user", "content": prompt}]))
        if len(ids) + args.max_new_tokens <= model.max_len:
            jobs.append(
                Job(
                    prompt=ids,
                    sampling=Sampling(),
                    max_new_tokens=args.max_new_tokens,
                    stop_ids=model.stop_ids,
                    tag=(name, row),
                )
            )
    return jobs


def _slots(model: LoadedModel, drafter: Drafter, batch: int) -> DecodeSlots:
    scheduling = model.scheduling if drafter is model.drafter else Scheduling()
    return DecodeSlots(
        model.target,
        drafter,
        max_batch=batch,
        max_len=model.max_len,
        policy=scheduling.policy,
        curve=scheduling.curve,
        rule=scheduling.rule,
        dtype=jnp.dtype(model.dtype),
        elastic=jax.default_backend() == "cpu",
    )


def _print_table(results: dict[str, dict[str, DecodeStats]]) -> None:
    print("| set | " + " | ".join(f"{law} | accepted / drafted" for law in results) + " |")
    print("| --- |" + " ---: | ---: |" * len(results))
    for name in next(iter(results.values()), {}):
        cells = [results[law][name] for law in results]
        print(f"| {name} | " + " | ".join(f"{s.accepted_length:.2f} | {s.accepted}/{s.proposed}" for s in cells) + " |")
    means = [sum(s.accepted_length for s in sets.values()) / len(sets) for sets in results.values()]
    print("| mean of the sets | " + " | ".join(f"{mean:.2f} | " for mean in means) + " |")


def _check_greedy(model: LoadedModel, jobs: list[Job], args: argparse.Namespace) -> int:
    """0 when the drafted text equals the autoregressive one for every prompt, alone and in a mixed batch."""
    jobs = [job for job in jobs if job.tag[1] < args.check_greedy]
    runs = {
        "autoregressive": list(generate(_slots(model, NoDrafter(), 1), jobs)),
        "drafted, alone": list(generate(_slots(model, model.drafter, 1), jobs)),
        "drafted, in a batch of 8": list(generate(_slots(model, model.drafter, 8), jobs)),
    }
    expected = _by_tag(runs.pop("autoregressive"))
    different = 0
    for name, completions in runs.items():
        stats = sum((c.stats for c in completions), DecodeStats())
        wrong = [tag for tag, c in _by_tag(completions).items() if c.tokens != expected[tag].tokens]
        different += len(wrong)
        print(
            f"greedy, {name}: {len(jobs) - len(wrong)} of {len(jobs)} texts equal the autoregressive loop's "
            f"({stats.proposed} drafted, {stats.accepted} accepted)" + (f"; different: {wrong}" if wrong else "")
        )
    return 1 if different else 0


def _by_tag(completions: list[Completion]) -> dict[tuple[str, int], Completion]:
    return {completion.job.tag: completion for completion in completions}


if __name__ == "__main__":
    sys.exit(main())
