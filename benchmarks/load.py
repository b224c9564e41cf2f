"""Throughput and per-user speed under load, by scheduling policy, side by side in one process.

    python benchmarks/load.py --prompts DIR [--concurrency 1 4 16] [--repeats 16] [--json load.json] [--plot load.png]

Every policy decodes the same real prompts with the same seeds at the same temperature. In a run a number of requests
start together and go on for so many rounds, or until they end. Policies take turns within a repeat, so that a gain is a
ratio inside one repeat: many short runs tell more than a few long ones where the machine's pace changes. Prefill, which
is the same for all, is not timed, nor are the first rounds after it. A policy goes on with what it learned in its runs
before. The step curve is measured at the start, for the shapes that run.

"held" is two-step that may never leave the full block: what it takes longer than the longest fixed length is the cost
of scheduling.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from prompts import read_sets

from dspark_jax.decoding.buckets import whole_span
from dspark_jax.decoding.flight import SlotRound
from dspark_jax.decoding.measure import measure
from dspark_jax.decoding.planner import Planner
from dspark_jax.decoding.profile import Shape, StepCurve
from dspark_jax.decoding.programs import RoundShape
from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.scheduler import EarlyStop, FixedLength, Guide, Policy, Threshold, TwoStep
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.decoding.stats import DecodeStats
from dspark_jax.drafters.base import Drafter, NoDrafter
from dspark_jax.engine.assembly import LoadedModel, add_model_arguments, load_model, remember_compilations
from dspark_jax.ops.sampling import Draws

LENGTHS = (0, 1, 2, 3, 5, 7)
THRESHOLD = 0.5
NOTHING, HELD = "fixed 0", "held"
UNTIMED = 6


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
    if not prompts:
        raise SystemExit(f"load: no prompt in {args.prompts} has at most {args.max_prompt} tokens; raise --max-prompt")
    loads = [Load(model, concurrency, args) for concurrency in args.concurrency]
    rows = []
    for load in loads:
        began = time.perf_counter()
        load.compile()
        load.measure()
        took = time.perf_counter() - began
        print(f"{load.concurrency} requests: compiled and measured in {took:.0f} s", file=sys.stderr)
        rows += _measure(load, prompts, args)
        _print_table([row for row in rows if row["concurrency"] == load.concurrency])
        if args.json:
            args.json.write_text(json.dumps(_facts(model, prompts, args) | {"rows": rows}, indent=2) + "\n")
    if args.plot:
        _plot(rows, _facts(model, prompts, args), args.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Throughput and per-user speed by scheduling policy.")
    add_model_arguments(parser, scheduling=False)
    parser.set_defaults(max_batch=1)
    parser.add_argument("--prompts", type=Path, required=True, help="a directory with one JSONL file of prompts a set")
    parser.add_argument("--limit", type=int, default=20, help="prompts a set (%(default)s)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--policies", nargs="+", metavar="NAME", help="those of the table to run (all)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=16, help="runs of every policy (%(default)s)")
    parser.add_argument("--max-prompt", type=int, default=256, help="longer prompts are left out (%(default)s tokens)")
    parser.add_argument("--max-new-tokens", type=int, default=192, help="after these a request ends (%(default)s)")
    parser.add_argument("--rounds", type=int, default=32, help="rounds that are timed after a prefill (%(default)s)")
    parser.add_argument("--json", type=Path, help="write counts and rates there")
    parser.add_argument("--plot", type=Path, help="draw throughput over per-user speed there (PNG)")
    return parser


class Load:
    """Slots for a number of requests that are live at all times, and the policies that take turns in them."""

    def __init__(self, model: LoadedModel, concurrency: int, args: argparse.Namespace):
        self.model, self.concurrency = model, concurrency
        self._max_len = args.max_prompt + args.max_new_tokens
        self._block = block = model.drafter.block_size
        self._drafting, self._plain = self._slots(model.drafter), self._slots(NoDrafter())
        span = whole_span(self._max_len, block)
        self._state = concurrency, span
        self.policies: dict[str, Policy] = {f"fixed {k}": FixedLength(length=k) for k in LENGTHS if k <= block}
        threshold, early = Threshold(confidence=THRESHOLD), EarlyStop(interpolate=True)
        self.policies |= {f"threshold {THRESHOLD}": threshold, "early stop": early}
        self.policies |= {HELD: TwoStep(min_gain=1e9, rest=0), "two-step": TwoStep()}
        if args.policies:
            kept = {NOTHING, *args.policies}
            if unknown := kept - self.policies.keys():
                raise SystemExit(f"load: no policy {sorted(unknown)[0]!r}; there are {', '.join(self.policies)}")
            self.policies = {name: policy for name, policy in self.policies.items() if name in kept}
        # One policy's guide differs from another's in shape alone, so a curve that is still to be measured will do.
        self._planners = self._plan(StepCurve({Shape(concurrency, span, concurrency, d): 1.0 for d in (0, block)}))

    def compile(self) -> None:
        """Compile the rounds of every policy."""
        drafting = chain.from_iterable(self._rounds(self.slots(name)) for name in self.policies if self.drafts(name))
        self._drafting.programs.compile_rounds(list(drafting))
        self._plain.programs.compile_rounds(self._rounds(self._plain))

    def measure(self) -> None:
        """Measure the step curve."""
        measured = measure(
            self._drafting.programs, *self._state, block=self._block, rule=Rule.TOKEN, estimator=self.model.estimator
        )
        self._planners = self._plan(StepCurve(dict(measured)))

    def _plan(self, curve: StepCurve) -> dict[str, Planner]:
        return {name: self._drafting.planner(policy, curve=curve) for name, policy in self.policies.items()}

    def _rounds(self, slots: DecodeSlots) -> list[tuple[RoundShape, Guide]]:
        """Those of sampled requests, as all are here."""
        return [(shape, guide) for shape, guide in slots.rounds_of([self._state]) if shape.draws is not Draws.GREEDY]

    def drafts(self, name: str) -> bool:
        """Whether this policy ever drafts."""
        return self.policies[name] != FixedLength(length=0)

    def slots(self, name: str) -> DecodeSlots:
        """The slots, told to follow this policy. Without drafts there is no drafter at all."""
        policy = self.policies[name]
        if not self.drafts(name):
            return self._plain
        estimator = None if isinstance(policy, FixedLength) else self.model.estimator
        self._drafting.follow(self._planners[name], estimator)
        return self._drafting

    def _slots(self, drafter: Drafter) -> DecodeSlots:
        return DecodeSlots(
            self.model.target,
            drafter,
            max_batch=self.concurrency,
            max_len=self._max_len,
            dtype=jnp.dtype(self.model.dtype),
            elastic=False,
        )


def _facts(model: LoadedModel, prompts: list, args: argparse.Namespace) -> dict:
    facts = {"device": jax.devices()[0].device_kind, "dtype": model.dtype, "jax": jax.__version__}
    return facts | {"temperature": args.temperature, "prompts": len(prompts), "repeats": args.repeats}


def _measure(load: Load, prompts: list[tuple[int, ...]], args: argparse.Namespace) -> list[dict]:
    runs: dict[str, list[Run]] = {name: [] for name in load.policies}
    for repeat in range(args.repeats):
        # Every other repeat backwards: what drifts favours nobody.
        for name in list(load.policies)[:: -1 if repeat % 2 else 1]:
            runs[name].append(_run(load, name, prompts, args, seed=1000 * repeat))
    fixed = [name for name in load.policies if name.startswith("fixed")]
    median_rate = {name: statistics.median(run.rate for run in taken) for name, taken in runs.items()}
    best = max(fixed, key=lambda name: median_rate[name])
    rows = []
    for name, taken in runs.items():
        stats = sum((run.stats for run in taken), DecodeStats())
        if name in fixed[1:] and not (stats.proposed and stats.accepted):
            raise SystemExit(f"load: {name} drafted {stats.proposed} tokens and kept {stats.accepted}: it did not run")
        gains = [run.rate / other.rate for run, other in zip(taken, runs[best], strict=True)]
        low, high = _median_range(gains)
        rows.append(
            {
                "concurrency": load.concurrency,
                "policy": name,
                "tokens_per_second": median_rate[name],
                "tokens_per_second_per_user": median_rate[name] / load.concurrency,
                "over_best_fixed": statistics.median(gains),
                "over_best_fixed_low": low,
                "over_best_fixed_high": high,
                "best_fixed": best,
                "verified_per_round": stats.verified / stats.rounds,
                "accepted_length": stats.accepted_length,
                **asdict(stats),
            }
        )
    return rows


def _run(load: Load, name: str, prompts: list[tuple[int, ...]], args: argparse.Namespace, seed: int) -> Run:
    """Requests that start together; others where all of them end before a round is timed."""
    slots, seconds, outs = load.slots(name), 0.0, []
    while not outs:
        picked = [(prompts[n % len(prompts)], n) for n in range(seed, seed + load.concurrency)]
        seconds, outs = _together(slots, load.model.stop_ids, picked, args)
        seed += load.concurrency
    return Run(seconds=seconds, stats=sum(map(_counts, outs), DecodeStats()))


def _together(
    slots: DecodeSlots, stop_ids: frozenset[int], seeded: list, args: argparse.Namespace
) -> tuple[float, list[SlotRound]]:
    """(seconds, what they gave) of the timed rounds of these (prompt, seed)."""
    laws = [Sampling(temperature=args.temperature, seed=seed) for _, seed in seeded]
    lengths = dict.fromkeys(slots.admit_many([prompt for prompt, _ in seeded], laws), 0)
    slots.wait()
    began, outs = time.perf_counter(), []
    for round_ in range(UNTIMED + args.rounds):
        if round_ == UNTIMED:
            began, outs = time.perf_counter(), []
        found = slots.step()
        outs += found
        for out in found:
            lengths[out.handle] += len(out.tokens)
            if lengths[out.handle] >= args.max_new_tokens or stop_ids.intersection(out.tokens):
                slots.release(out.handle)
        if not slots.live:
            break
    outs += slots.drain()
    seconds = time.perf_counter() - began
    for handle in slots.live:
        slots.release(handle)
    return seconds, outs


def _counts(out: SlotRound) -> DecodeStats:
    return DecodeStats(rounds=1, proposed=out.proposed, verified=out.verified, accepted=out.accepted)


def _median_range(gains: list[float]) -> tuple[float, float]:
    """Where the median over repeats lies with 95 % confidence (bootstrap)."""
    picked = np.random.default_rng(0).choice(gains, (10_000, len(gains)))
    low, high = np.percentile(np.median(picked, axis=1), (2.5, 97.5))
    return float(low), float(high)


def _print_table(rows: list[dict]) -> None:
    print("| requests | policy | tokens/s | tokens/s a user | over best fixed (95 %) | verified | accepted length |")
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
