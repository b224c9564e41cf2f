"""Throughput and per-user speed under load, by scheduling policy, side by side in one process.

    python benchmarks/load.py --prompts DIR [--concurrency 1 4 16] [--repeats 3] [--json load.json] [--plot load.png]

Every policy decodes the same real prompts with the same seeds at the same temperature, with a fixed number of
requests live at all times; policies take turns within a repeat, so that a gain is a ratio inside one repeat. Only
decoding is timed: prefill is the same for all. The step curve is measured at the start, for the shapes that run.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import jax
import jax.numpy as jnp
from prompts import read_sets

from dspark_jax.decoding.measure import measure
from dspark_jax.decoding.profile import StepCurve
from dspark_jax.decoding.programs import Programs
from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.scheduler import EarlyStop, FixedLength, Policy, Threshold, TwoStep
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.decoding.stats import DecodeStats
from dspark_jax.drafters.base import NoDrafter
from dspark_jax.engine.assembly import LoadedModel, add_model_arguments, load_model, remember_compilations

LENGTHS = (0, 1, 2, 3, 5, 7)
THRESHOLD = 0.5


@dataclass(frozen=True, kw_only=True)
class Run:
    """One policy over one repeat."""

    seconds: float
    stats: DecodeStats

    @property
    def rate(self) -> float:
        """Tokens per second of all requests together."""
        return self.stats.committed / self.seconds


def main() -> int:
    args = _parser().parse_args()
    remember_compilations(lambda line: print(line, file=sys.stderr))
    model = load_model(args, lambda line: print(line, file=sys.stderr))
    if not model.drafts:
        raise SystemExit("load: there is no drafter to schedule; give one with --draft")
    prompts = [
        tuple(model.tokenizer.encode_chat([{"role": "user", "content": prompt}]))
        for prompts in zip(*read_sets(args.prompts, args.limit).values(), strict=False)
        for prompt in prompts
    ]
    prompts = [prompt for prompt in prompts if len(prompt) <= args.max_prompt]
    max_len = args.max_prompt + args.max_new_tokens
    rows = []
    for concurrency in args.concurrency:
        slots = _policies(model, concurrency, max_len)
        rows += _measure(model, slots, prompts, concurrency, args)
        _print_table([row for row in rows if row["concurrency"] == concurrency])
    facts = {"device": jax.devices()[0].device_kind, "dtype": model.dtype, "jax": jax.__version__}
    facts |= {"temperature": args.temperature, "prompts": len(prompts), "tokens_per_request": args.tokens}
    if args.json:
        args.json.write_text(json.dumps(facts | {"rows": rows}, indent=2) + "\n")
    if args.plot:
        _plot(rows, facts, args.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Throughput and per-user speed by scheduling policy.")
    add_model_arguments(parser, scheduling=False)
    parser.set_defaults(max_batch=1)
    parser.add_argument("--prompts", type=Path, required=True, help="a directory with one JSONL file of prompts a set")
    parser.add_argument("--limit", type=int, default=20, help="prompts a set (%(default)s)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="tokens a request makes on average (%(default)s)")
    parser.add_argument("--max-prompt", type=int, default=256, help="longer prompts are left out (%(default)s tokens)")
    parser.add_argument("--max-new-tokens", type=int, default=192, help="after these a request makes place for another")
    parser.add_argument("--json", type=Path, help="write counts and rates there")
    parser.add_argument("--plot", type=Path, help="draw throughput over per-user speed there (PNG)")
    return parser


def _policies(model: LoadedModel, concurrency: int, max_len: int) -> dict[str, DecodeSlots]:
    """Slots for every policy, all of the same shape. Without drafts there is no drafter at all."""
    block, dtype = model.drafter.block_size, jnp.dtype(model.dtype)
    span = max_len + block + 1
    programs = Programs(model.target, model.drafter, dtype=dtype)
    curve = StepCurve(dict(measure(programs, concurrency, span, block=block, rule=Rule.TOKEN)))
    policies: dict[str, Policy] = {f"fixed {k}": FixedLength(length=k) for k in LENGTHS if k <= block}
    policies |= {f"threshold {THRESHOLD}": Threshold(confidence=THRESHOLD)}
    policies |= {"early stop": EarlyStop(), "two-step": TwoStep()}
    return {
        name: DecodeSlots(
            model.target,
            NoDrafter() if policy == FixedLength(length=0) else model.drafter,
            max_batch=concurrency,
            max_len=max_len,
            policy=policy,
            curve=curve,
            estimator=None if policy == FixedLength(length=0) else model.estimator,
            dtype=dtype,
            elastic=False,
        )
        for name, policy in policies.items()
    }


def _measure(
    model: LoadedModel,
    slots: dict[str, DecodeSlots],
    prompts: list[tuple[int, ...]],
    concurrency: int,
    args: argparse.Namespace,
) -> list[dict]:
    for one in slots.values():
        one.warm_up()
    runs: dict[str, list[Run]] = {name: [] for name in slots}
    for repeat in range(args.repeats):
        for name, one in slots.items():
            runs[name].append(_run(model, one, prompts, concurrency, args, seed=1000 * repeat))
            print(f"  {concurrency} requests, {name}: {runs[name][-1].rate:.1f} tokens/s", file=sys.stderr)
    best = max((name for name in slots if name.startswith("fixed")), key=lambda name: _median(runs[name]))
    rows = []
    for name, taken in runs.items():
        stats = sum((run.stats for run in taken), DecodeStats())
        gains = [run.rate / other.rate for run, other in zip(taken, runs[best], strict=True)]
        rows.append(
            {
                "concurrency": concurrency,
                "policy": name,
                "tokens_per_second": _median(taken),
                "tokens_per_second_per_user": _median(taken) / concurrency,
                "over_best_fixed": statistics.median(gains),
                "over_best_fixed_low": min(gains),
                "over_best_fixed_high": max(gains),
                "best_fixed": best,
                "verified_per_round": stats.verified / stats.rounds,
                "accepted_length": stats.accepted_length,
                **asdict(stats),
            }
        )
    return rows


def _run(
    model: LoadedModel,
    slots: DecodeSlots,
    prompts: list[tuple[int, ...]],
    concurrency: int,
    args: argparse.Namespace,
    seed: int,
) -> Run:
    """Decodes until the requests made `tokens` each on average; a request that ends makes place for the next prompt."""
    numbers = count()
    lengths: dict[int, int] = {}

    def admit(free: int) -> None:
        picked = [next(numbers) for _ in range(free)]
        laws = [Sampling(temperature=args.temperature, seed=seed + number) for number in picked]
        handles = slots.admit_many([prompts[(seed + number) % len(prompts)] for number in picked], laws)
        lengths.update(dict.fromkeys(handles, 0))

    seconds, stats = 0.0, DecodeStats()
    admit(concurrency)
    for rounds in _timed_rounds(slots):
        seconds += rounds[0]
        for out in rounds[1]:
            stats += DecodeStats(rounds=1, proposed=out.proposed, verified=out.verified, accepted=out.accepted)
            lengths[out.handle] += len(out.tokens)
            if lengths[out.handle] >= args.max_new_tokens or model.stop_ids & set(out.tokens):
                slots.release(out.handle)
        if stats.committed >= concurrency * args.tokens:
            break
        if slots.free:
            admit(slots.free)
    for handle in slots.live:
        slots.release(handle)
    return Run(seconds=seconds, stats=stats)


def _timed_rounds(slots: DecodeSlots) -> Iterator[tuple[float, list]]:
    while True:
        start = time.perf_counter()
        outs = slots.step()
        yield time.perf_counter() - start, outs


def _median(runs: list[Run]) -> float:
    return statistics.median(run.rate for run in runs)


def _print_table(rows: list[dict]) -> None:
    print("| requests | policy | tokens/s | tokens/s a user | over best fixed (range) | verified | accepted length |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        low, high = row["over_best_fixed_low"], row["over_best_fixed_high"]
        print(
            f"| {row['concurrency']} | {row['policy']} | {row['tokens_per_second']:.1f} "
            f"| {row['tokens_per_second_per_user']:.1f} | {row['over_best_fixed']:.3f} ({low:.3f}..{high:.3f}) "
            f"| {row['verified_per_round']:.2f} | {row['accepted_length']:.2f} |"
        )


def _plot(rows: list[dict], facts: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    for policy in dict.fromkeys(row["policy"] for row in rows):
        points = [row for row in rows if row["policy"] == policy]
        fixed = policy.startswith("fixed")
        axes.plot(
            [row["tokens_per_second_per_user"] for row in points],
            [row["tokens_per_second"] for row in points],
            marker="o" if fixed else "D",
            linewidth=1 if fixed else 2,
            alpha=0.6 if fixed else 1,
            label=policy,
        )
    axes.set_xlabel("tokens per second of one user")
    axes.set_ylabel("tokens per second in all")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(f"{facts['device']}, {facts['dtype']}, T={facts['temperature']:g}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
