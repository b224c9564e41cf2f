"""Throughput of a training step, against the same step written plainly and against the machine's matrix products.

    python benchmarks/training.py [--config smollm2_135m] [--random] [--batch 64] [--steps 20] [--json F] [--plot F]

Both steps start from the same state and see the same rows of random tokens, one document each. The plain one attends by
a dense mask of anchors x block by tokens + anchors x block, and makes the logits of all blocks at once; its losses must
be those of the other, or the exit status is 1. Then the parts of our step are timed, each as a program of its own;
the rest is what is left of the step, less than nothing where XLA saves work across parts.
Operations are those that the mathematics needs; the share is of --peak-tflops, or of what a large product reaches here.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ceilings import matmul_rate
from flax import nnx
from plain_step import PlainObjective

from dspark_jax.core.arrays import Array
from dspark_jax.data.pipeline import Batch
from dspark_jax.drafters.dspark import DSpark, DSparkConfig
from dspark_jax.interop.huggingface import load_target
from dspark_jax.targets.model import Target, TargetOutput
from dspark_jax.training.config import TrainConfig, find_config
from dspark_jax.training.draft import draft_config
from dspark_jax.training.flops import step_flops
from dspark_jax.training.known_targets import target_facts
from dspark_jax.training.objective import BlockObjective, Blocks, Rows, objective_of
from dspark_jax.training.optimizer import build_optimizer
from dspark_jax.training.setup import find_target
from dspark_jax.training.step import StepConfig, cast, init_state, look, train_step

CONFIGS = Path(__file__).parents[1] / "configs"
PROMPT = 8
REPEATS = 3
PARTS = ("target, forward", "drafter, forward", "loss and vocabulary, forward", "backward", "optimizer", "the rest")


def main() -> int:
    args = _parser().parse_args()
    try:
        config, run = _prepared(args)
    except (ValueError, OSError) as error:
        print(f"training.py: {error}", file=sys.stderr)
        return 2
    peak = args.peak_tflops * 1e12 if args.peak_tflops else matmul_rate(config.dtype)
    flops = step_flops(config, run.target.spec, run.drafter.config)
    facts = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "config": args.config,
        "dtype": config.precision,
        "batch": config.batch_size,
        "length": config.sequence_length,
        "anchors": config.anchors,
        "peak_flops": peak,
        "needed_flops": flops.needed,
        "done_flops": flops.done,
    }
    source = "given" if args.peak_tflops else "that a large product reaches here"
    print(f"{facts['device']}, {config.precision}; peak {peak / 1e12:.4g} TFLOP/s, {source}")
    sizes = f"{config.batch_size} x {config.sequence_length} tokens, {config.anchors} anchors a row"
    print(f"{args.config}, {sizes}:")
    print(f"a step needs {flops.needed / 1e12:.4g} TFLOP and, as written, does {flops.done / 1e12:.4g}\n")
    steps = _race(run, {"ours": run.objective, "plain": PlainObjective(ours=run.objective)}, args.steps)
    _print_steps(steps, config, flops.needed / peak)
    parts = _parts(run, steps["ours"]["seconds"], args.steps)
    _print_parts(parts, steps["ours"]["seconds"])
    if args.json:
        args.json.write_text(json.dumps(facts | {"steps": steps, "parts": parts}, indent=1) + "\n")
    if args.plot:
        _plot(steps, parts, facts, args.plot)
    return 0 if _agree(steps, config) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A training step against a plain one and the machine's limits.")
    parser.add_argument("--config", default="smollm2_135m", help="a name in configs/, or a path to a Python file")
    parser.add_argument("--random", action="store_true", help="random weights of the target's shape; fetches nothing")
    parser.add_argument("--batch", type=int, help="rows (default: the config's)")
    parser.add_argument("--length", type=int, help="tokens a row (default: the config's)")
    parser.add_argument("--anchors", type=int, help="blocks a row (default: the config's)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each measurement, of which there are three")
    parser.add_argument("--peak-tflops", type=float, help="what the device is sold with (default: measured)")
    parser.add_argument("--json", type=Path, help="write what was measured there")
    parser.add_argument("--plot", type=Path, help="draw throughput and parts there (PNG)")
    return parser


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is measured."""

    target: Target
    drafter: DSpark
    objective: BlockObjective
    optimizer: optax.GradientTransformation
    config: TrainConfig
    batch: Batch

    def fixed(self, objective: Any) -> StepConfig:
        return StepConfig(objective=objective, dtype=self.config.dtype, accumulate=self.config.accumulate)


def _prepared(args: argparse.Namespace) -> tuple[TrainConfig, Run]:
    config = find_config(args.config, CONFIGS)
    sizes = {"batch_size": args.batch, "sequence_length": args.length, "anchors": args.anchors}
    config = replace(config, **{name: size for name, size in sizes.items() if size is not None})
    objective = objective_of(config.drafter, anchors=config.anchors, remat=config.remat == "layer")
    if not isinstance(objective, BlockObjective):
        raise ValueError(f"--config {args.config}: only drafters of blocks, DSpark and DFlash, are measured")
    if config.sequence_length <= PROMPT + 1:
        raise ValueError(f"--length must be at least {PROMPT + 2}, not {config.sequence_length}")
    if args.steps < 1:
        raise ValueError(f"--steps must be at least 1, not {args.steps}")
    spec = target_facts(config.target).spec if args.random else None
    target = _random(spec, config.dtype) if spec else load_target(find_target(config.target), config.dtype)
    shape = draft_config(config.drafter, target.spec)
    assert isinstance(shape, DSparkConfig)
    drafter = jax.jit(lambda: DSpark(shape, rngs=nnx.Rngs(params=jax.random.key(0, impl="rbg")), dtype=jnp.float32))()
    rng, size = np.random.default_rng(0), (config.batch_size, config.sequence_length)
    batch = Batch(
        tokens_BT=rng.integers(0, target.spec.vocab_size, size).astype(np.int32),
        loss_mask_BT=np.broadcast_to(np.arange(size[1]) >= PROMPT, size),
        segments_BT=np.ones(size, np.int32),
    )
    return config, Run(
        target=target,
        drafter=drafter,
        objective=objective,
        optimizer=build_optimizer(config.optimizer, 1000),
        config=config,
        batch=jax.device_put(batch),
    )


def _random(spec: Any, dtype: jnp.dtype) -> Target:
    return jax.jit(lambda: Target(spec, rngs=nnx.Rngs(params=jax.random.key(1, impl="rbg")), dtype=dtype))()


def _race(run: Run, objectives: dict[str, Any], steps: int) -> dict[str, dict[str, Any]]:
    """The steps in turns, so that what the machine does beside them hits both."""
    programs, states, results = {}, {}, {}
    for name, objective in objectives.items():
        # A copy for each: a step may write over its state.
        state = init_state(jax.tree.map(jnp.copy, run.drafter), run.optimizer, jax.random.key(0))
        step = partial(train_step, optimizer=run.optimizer, config=run.fixed(objective))
        began = time.perf_counter()
        try:
            program = jax.jit(step, donate_argnums=0).lower(state, run.target, run.batch).compile()
            results[name] = {"compile_seconds": time.perf_counter() - began, "means": [], "losses": []}
            state, metrics = jax.block_until_ready(program(state, run.target, run.batch))
        except jax.errors.JaxRuntimeError as error:
            results[name] = {"refused": str(error).splitlines()[0]}
            continue
        memory = program.memory_analysis()
        results[name] |= {"temporary_bytes": memory.temp_size_in_bytes if memory else None}
        results[name]["losses"].append(float(metrics["loss"].value))
        programs[name], states[name] = program, state
    for _ in range(REPEATS):
        for name, program in programs.items():
            state, metrics, losses = states[name], {}, []
            began = time.perf_counter()
            for _ in range(steps):
                state, metrics = program(state, run.target, run.batch)
                losses.append(metrics["loss"])
            jax.block_until_ready(state)
            results[name]["means"].append((time.perf_counter() - began) / steps)
            results[name]["losses"] += [float(loss.value) for loss in losses]
            states[name] = state
    for name in programs:
        results[name]["seconds"] = statistics.median(results[name]["means"])
        results[name]["tokens_per_second"] = run.batch.tokens_BT.size / results[name]["seconds"]
    if "refused" in results["ours"]:
        raise SystemExit(f"training.py: our step does not run: {results['ours']['refused']}")
    return results


def _parts(run: Run, whole: float, steps: int) -> dict[str, float]:
    """Seconds of each part of our step."""
    config, fixed = run.config, run.fixed(run.objective)
    rows = Rows(*map(jnp.asarray, run.batch[:3]))
    drawn = run.objective.draw(rows, jax.random.key(0))
    taps, dtype = run.drafter.tapped_layers, config.precision
    seen = jax.jit(partial(look, taps=taps, dtype=dtype, config=fixed))(run.target, run.batch).output(config.dtype)

    def target(masters: DSpark, model: Target, drawn: Blocks, seen: TargetOutput) -> Any:
        return model.encode(drawn.rows.tokens_BT, taps, drawn.rows.starts_BT)

    def blocks(masters: DSpark, model: Target, drawn: Blocks, seen: TargetOutput) -> Any:
        tokens_BT, starts_BT = drawn.rows.tokens_BT, drawn.rows.starts_BT
        drafter = cast(masters, config.dtype)
        return drafter.training_blocks(model.vocabulary, tokens_BT, seen.features_BTE, drawn.anchors_BA, starts_BT)

    def forward(masters: DSpark, model: Target, drawn: Blocks, seen: TargetOutput) -> Array:
        drafter = cast(masters, config.dtype)
        return run.objective.loss(run.objective.terms(drafter, model.vocabulary, drawn, seen))

    def update(masters: Any, opt_state: optax.OptState) -> Any:
        # Masters stand in for their gradient.
        updates, opt_state = run.optimizer.update(masters, opt_state, masters)
        return jax.tree.map(jnp.add, masters, updates), opt_state

    programs: tuple[Callable[..., Any], ...] = (target, blocks, forward, jax.value_and_grad(forward))
    masters: Any = run.drafter
    inputs = masters, run.target, drawn, seen
    seconds = [_seconds(jax.jit(program), inputs, steps) for program in programs]
    optimizer = _seconds(jax.jit(update), (masters, run.optimizer.init(masters)), steps)
    parts = [seconds[0], seconds[1], seconds[2] - seconds[1], seconds[3] - seconds[2], optimizer]
    return dict(zip(PARTS, [*parts, whole - sum(parts)], strict=True))


def _seconds(program: Callable[..., Any], inputs: tuple[Any, ...], steps: int) -> float:
    out = jax.block_until_ready(program(*inputs))
    means = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(steps):
            out = program(*inputs)
        jax.block_until_ready(out)
        means.append((time.perf_counter() - began) / steps)
    return statistics.median(means)


def _agree(steps: dict[str, dict[str, Any]], config: TrainConfig) -> bool:
    if "refused" in steps["plain"]:
        return True
    tolerance = 1e-3 if config.precision == "float32" else 2e-2
    pairs = list(zip(steps["ours"]["losses"], steps["plain"]["losses"], strict=True))
    apart = max(abs(ours - plain) / abs(plain) for ours, plain in pairs)
    verdict = "agree" if apart <= tolerance else "DIFFER"
    print(f"\nThe losses of {len(pairs)} steps {verdict}: they are within {apart:.1e} of each other.")
    return apart <= tolerance


def _print_steps(steps: dict[str, dict[str, Any]], config: TrainConfig, at_peak: float) -> None:
    print("| step | tokens/s | ms | of peak | temporary GB | compile s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, found in steps.items():
        if "refused" in found:
            print(f"| {name} | does not run: {found['refused']} | | | | |")
            continue
        print(
            f"| {name} | {found['tokens_per_second']:,.0f} | {1e3 * found['seconds']:.2f} "
            f"| {at_peak / found['seconds']:.1%} | {(found['temporary_bytes'] or 0) / 1e9:.2f} "
            f"| {found['compile_seconds']:.0f} |",
            flush=True,
        )


def _print_parts(parts: dict[str, float], whole: float) -> None:
    print("\n| part of our step | ms | share |\n| --- | ---: | ---: |")
    for name, seconds in parts.items():
        print(f"| {name} | {1e3 * seconds:.2f} | {seconds / whole:.0%} |")


def _plot(steps: dict[str, dict[str, Any]], parts: dict[str, float], facts: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    pace, where = figure.subplots(1, 2)
    ran = {name: found["tokens_per_second"] for name, found in steps.items() if "refused" not in found}
    pace.bar(list(ran), list(ran.values()))
    pace.set(title=f"{facts['config']}, {facts['device']}, {facts['dtype']}", ylabel="tokens/s")
    where.barh(list(parts), [1e3 * seconds for seconds in parts.values()])
    where.invert_yaxis()
    where.set(title="our step", xlabel="ms")
    canvas.print_png(path)


if __name__ == "__main__":
    sys.exit(main())
