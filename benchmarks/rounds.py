"""Time of a decoding round and its parts against what the machine could do.

    python benchmarks/rounds.py [--targets Qwen/Qwen3-4B] [--batch 1 8 32] [--context 512 4096] [--json F] [--plot F]

Targets have the named model's shape and random weights, drafters the released shape: five layers, blocks of seven.
The floor of a part is the larger of two times: that of reading its weights and the context's keys and values once, at
the bandwidth that a copy reaches here, and that of its matrix products at the rate a large product reaches here.
The sequential head is what drafting takes beyond the backbone and its logits.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ceilings import copy_bandwidth, matmul_rate
from flax import nnx

from dspark_jax.decoding.programs import compiler_options, suited
from dspark_jax.decoding.round import DecodeState, RoundPlan, decode_round, init_state
from dspark_jax.drafters.dspark import DSpark, DSparkConfig
from dspark_jax.nn.block import LayerSpec
from dspark_jax.ops.sampling import Draws
from dspark_jax.targets.model import Target
from dspark_jax.training.draft import DSparkShape, draft_config
from dspark_jax.training.known_targets import target_facts

Program = Callable[..., tuple[DecodeState, Any]]
COLUMNS = (
    *("target", "batch", "context", "verify ms (floor, share)", "draft ms (floor, share of round)"),
    *("head ms (share)", "round ms"),
)


def main() -> int:
    args = _parser().parse_args()
    dtype = jnp.dtype(args.dtype)
    ceiling = {"bytes_per_second": copy_bandwidth(dtype), "flops_per_second": matmul_rate(dtype)}
    facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "dtype": args.dtype, **ceiling}
    bandwidth, rate = ceiling["bytes_per_second"] / 1e9, ceiling["flops_per_second"] / 1e12
    print(f"{facts['device']}, {args.dtype}: a copy moves {bandwidth:.0f} GB/s, a product does {rate:.1f} TFLOP/s\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    rows = []
    for name in args.targets:
        models = _models(name, dtype)
        loads = [(batch, context) for batch in args.batch for context in args.context]
        for load, programs in _compiled(*models, loads, dtype).items():
            rows.append({"target": name} | _measure(*models, *load, programs, dtype, ceiling, args.repeats))
            _print_row(rows[-1])
            if args.json:
                args.json.write_text(json.dumps(facts | {"rows": rows}, indent=2) + "\n")
        del models, programs
    if args.plot:
        _plot(rows, facts, args.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Rounds against the machine's limits.")
    parser.add_argument("--targets", nargs="+", default=["Qwen/Qwen3-4B"], help="models whose shapes are taken")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[512])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write what was measured there")
    parser.add_argument("--plot", type=Path, help="draw the parts over the batch size there (PNG)")
    return parser


def _models(name: str, dtype: jnp.dtype) -> tuple[Target, DSpark]:
    spec = target_facts(name).spec
    shape = draft_config(DSparkShape(mask_token_id=spec.vocab_size - 1), spec)
    assert isinstance(shape, DSparkConfig)

    @jax.jit
    def make() -> tuple[Target, DSpark]:
        rngs = nnx.Rngs(params=jax.random.key(0, impl="rbg"))
        return Target(spec, rngs=rngs, dtype=dtype), DSpark(shape, rngs=rngs, dtype=dtype)

    target, drafter = suited(*make())
    assert isinstance(drafter, DSpark)
    return target, drafter


def _state(target: Target, drafter: DSpark, batch: int, context: int, dtype: jnp.dtype) -> DecodeState:
    """`batch` sampled requests that hold `context` tokens."""
    state = init_state(target, drafter, batch, context + drafter.block_size + 1, dtype)
    law = replace(state.law, draws=Draws.PLAIN, temperature_B=jnp.ones(batch))
    return replace(state, position_B=jnp.full(batch, context, jnp.int32), law=law)


def _verify(target: Target, drafter: DSpark, state: DecodeState):
    tokens_BT = jnp.broadcast_to(state.anchor_B[:, None], (len(state.anchor_B), drafter.block_size + 1))
    out = target.extend(state.cache, tokens_BT, state.position_B, drafter.tapped_layers)
    assert out.cache is not None
    best = jnp.argmax(target.vocabulary.logits(out.hidden_BTD), axis=-1)
    return replace(state, cache=out.cache), (best, out.features_BTE)


def _backbone(target: Target, drafter: DSpark, state: DecodeState):
    hidden, draft = drafter.cached_block(target.vocabulary, state.draft, state.anchor_B, state.position_B)
    return replace(state, draft=draft), jnp.argmax(drafter.base_logits(target.vocabulary, hidden), axis=-1)


def _draft(target: Target, drafter: DSpark, state: DecodeState):
    proposal, draft = drafter.propose(target.vocabulary, state.draft, state.anchor_B, state.position_B, state.law)
    return replace(state, draft=draft), proposal.tokens_BK


def _round(target: Target, drafter: DSpark, state: DecodeState):
    after, out = decode_round(target, drafter, RoundPlan(), state)
    # Where it was: every round of the measurement is the same.
    return replace(after, position_B=state.position_B), out.tokens_BN


PARTS = {"verify": _verify, "backbone": _backbone, "draft": _draft, "round": _round}


def _compiled(
    target: Target, drafter: DSpark, loads: list[tuple[int, int]], dtype: jnp.dtype
) -> dict[tuple[int, int], dict[str, Program]]:
    """The parts for all (batch, context), compiled side by side."""
    weights, treedef = jax.tree.flatten((target, drafter))

    def lowered(part: Callable, load: tuple[int, int]) -> jax.stages.Lowered:
        def flat(weights: list, state: DecodeState) -> tuple[DecodeState, Any]:
            return part(*jax.tree.unflatten(treedef, weights), state)

        run = jax.jit(flat, donate_argnums=1, compiler_options=compiler_options(jax.default_backend()))
        return run.lower(weights, jax.eval_shape(lambda: _state(target, drafter, *load, dtype)))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pending = {
            load: {name: pool.submit(lowered(part, load).compile) for name, part in PARTS.items()} for load in loads
        }
        return {load: {name: each.result() for name, each in parts.items()} for load, parts in pending.items()}


def _measure(
    target: Target,
    drafter: DSpark,
    batch: int,
    context: int,
    programs: dict[str, Program],
    dtype: jnp.dtype,
    ceiling: dict[str, float],
    repeats: int,
) -> dict[str, Any]:
    state, weights = _state(target, drafter, batch, context, dtype), jax.tree.leaves((target, drafter))
    seconds: dict[str, float] = {}
    for name, program in programs.items():
        seconds[name], state = _time(program, weights, state, repeats)
    block, head = drafter.block_size, target.vocabulary.spec.size * target.vocabulary.spec.d_model
    sequential = 0 if drafter.markov_head is None else drafter.markov_head.w2.size

    def floor(layers: Any, specs: Sequence[LayerSpec], slots: int, further: int) -> dict[str, float]:
        dense = sum(leaf.size for leaf in jax.tree.leaves(layers)) + head
        cached = sum(2 * spec.kv_heads * spec.head_dim for spec in specs) * context * batch
        moved, flops = (dense + further + cached) * dtype.itemsize, 2 * (dense * slots + further) * batch
        least = max(moved / ceiling["bytes_per_second"], flops / ceiling["flops_per_second"])
        return {"bytes": moved, "flops": flops, "seconds": least}

    return {
        "batch": batch,
        "context": context,
        "seconds": seconds,
        "verify_floor": floor(target.layers, target.spec.layers, block + 1, 0),
        # The head's weights are read anew for every slot: what it adds depends on the token before.
        "draft_floor": floor(drafter.layers, drafter.config.layers, block, block * sequential),
        "head_seconds": seconds["draft"] - seconds["backbone"],
    }


def _time(compiled: Program, weights: list, state: DecodeState, repeats: int) -> tuple[float, DecodeState]:
    """Median over three runs of the mean of `repeats` rounds that follow each other."""
    means = []
    for _ in range(4):
        jax.block_until_ready(state)
        began = time.perf_counter()
        for _ in range(repeats):
            state, _ = compiled(weights, state)
        jax.block_until_ready(state)
        means.append((time.perf_counter() - began) / repeats)
    return statistics.median(means[1:]), state


def _print_row(row: dict[str, Any]) -> None:
    seconds, verify, draft = row["seconds"], row["verify_floor"]["seconds"], row["draft_floor"]["seconds"]
    print(
        f"| {row['target']} | {row['batch']} | {row['context']} "
        f"| {1e3 * seconds['verify']:.2f} ({1e3 * verify:.2f}, {verify / seconds['verify']:.0%}) "
        f"| {1e3 * seconds['draft']:.2f} ({1e3 * draft:.2f}, {seconds['draft'] / seconds['round']:.0%}) "
        f"| {1e3 * row['head_seconds']:.2f} ({row['head_seconds'] / seconds['round']:.1%}) "
        f"| {1e3 * seconds['round']:.2f} |",
        flush=True,
    )


def _plot(rows: list[dict], facts: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys((row["target"], row["context"]) for row in rows))
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(4 * len(shapes), 3.5), squeeze=False)
    for axis, (target, context) in zip(axes[0], shapes, strict=True):
        picked = [row for row in rows if (row["target"], row["context"]) == (target, context)]
        batches = [row["batch"] for row in picked]
        for part in ("round", "verify", "draft"):
            axis.plot(batches, [1e3 * row["seconds"][part] for row in picked], marker="o", label=part)
        axis.plot(batches, [1e3 * row["verify_floor"]["seconds"] for row in picked], "k--", label="floor of verify")
        axis.set(title=f"{target}, {context} tokens", xlabel="requests", ylabel="ms", xscale="log", ylim=(0, None))
        axis.legend()
    figure.suptitle(f"{facts['device']}, {facts['dtype']}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
