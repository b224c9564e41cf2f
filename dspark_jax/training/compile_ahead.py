"""`train.py --topology`: the real step compiled for a TPU slice that is not here, and what it would take there."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh

from dspark_jax.core.arrays import DType
from dspark_jax.core.mesh import make_mesh, sharding
from dspark_jax.data.pipeline import Batch
from dspark_jax.targets.model import Target, TargetSpec
from dspark_jax.training.compiler import compilers, require_libtpu
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.draft import draft_config
from dspark_jax.training.flops import Flops, step_flops
from dspark_jax.training.known_targets import target_facts
from dspark_jax.training.optimizer import build_optimizer
from dspark_jax.training.plan import abstract_state, plan_run
from dspark_jax.training.program import jitted_step, shardings_of, step_config
from dspark_jax.training.roofline import tpu_kind
from dspark_jax.training.topology import ACCELERATORS, Topology, parse_topology
from dspark_jax.training.traffic import Traffic, traffic

Say = Callable[[str], None]
LEVELS = ("O0", "O1", "O2", "O3")
_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Bytes are of one device. Arguments that the step may write over are in `arguments` only."""

    arguments: int
    temporaries: int
    peak: int
    traffic: Traffic


def compile_ahead(config: TrainConfig, topology: str, level: str | None, say: Say) -> None:
    """Says memory, collectives and the predicted time of a step. Nothing is downloaded.

    ValueError, one sentence, for a machine that cannot be compiled for and for a step that does not fit it.
    """
    kind, machine = tpu_kind(topology), parse_topology(topology)
    require_libtpu()
    spec = target_facts(config.target).spec
    plan = plan_run(config, spec, machine)
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    say(f"Compiling a step for {topology}, {machine.devices} devices as {mesh}, {plan.rows} rows at a time; this takes")
    say("minutes and runs nothing ...")
    with compilers(1) as pool:
        compiled = pool.submit(compile_step, config, spec, topology, level).result()
    for line in report(compiled, step_flops(config, spec, plan.drafter_config, kernel=True), kind, machine, config):
        say(line)


def compile_step(config: TrainConfig, spec: TargetSpec, topology: str, level: str | None) -> Compiled:
    """In a process that `compilers` started."""
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:
        # Whatever libtpu raises for a slice that it does not know.
        raise ValueError(f"--topology {topology}: libtpu cannot compile for it ({_first_line(error)})") from None
    mesh = make_mesh(fsdp=config.fsdp, tensor=config.tensor, devices=devices)
    if level is not None:
        jax.config.update("jax_optimization_level", level)
    optimizer = build_optimizer(config.optimizer, _STEPS)
    state = _placed(mesh, abstract_state(draft_config(config.drafter, spec), config.optimizer))
    target = _placed(mesh, nnx.eval_shape(lambda: Target(spec, rngs=nnx.Rngs(0), dtype=config.dtype)))

    def rows(dtype: DType) -> Any:
        shape = (config.batch_size, config.sequence_length)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, "batch"))

    batch = Batch(tokens_BT=rows(jnp.int32), loss_mask_BT=rows(jnp.bool_), segments_BT=rows(jnp.int32))
    step = jitted_step(optimizer, step_config(config, mesh), state)
    try:
        compiled = step.lower(state, target, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        # Its own class does not travel between processes.
        raise ValueError(f"the step does not compile for {topology}: {refusal(str(error))}") from None
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        peak=memory.peak_memory_in_bytes,
        traffic=traffic(text),
    )


def refusal(message: str) -> str:
    """The compiler's error in a sentence: of memory that ran out, how much was wanted."""
    # Of the whole program, and of its temporaries where they alone are too many.
    wanted = re.search(r"Used (\S+) of (\S+) hbm|temporaries \((\S+)\) exceeds available HBM \((\S+)\)", message)
    if wanted is None:
        return message.splitlines()[0]
    needed, there = (wanted[1], wanted[2]) if wanted[1] else (wanted[3], wanted[4])
    return (
        f"it takes {needed} of the {there} that a device has; set a larger accumulate, remat=layer, a larger "
        "fsdp or tensor, or take more devices"
    )


def report(compiled: Compiled, flops: Flops, kind: str, machine: Topology, config: TrainConfig) -> Iterable[str]:
    """The lines that are said about a compiled step."""
    chip, seen = ACCELERATORS[kind], compiled.traffic
    verdict = "fits" if compiled.peak <= chip.hbm else "does not fit"
    yield f"\nMemory of a device ({chip.hbm / 1e9:g} GB)"
    yield f"  {'target, drafter, optimizer, batch':<46} {compiled.arguments / 1e9:8.3f} GB"
    yield f"  {'temporaries':<46} {compiled.temporaries / 1e9:8.3f} GB"
    yield f"  {'peak':<46} {compiled.peak / 1e9:8.3f} GB: {verdict}"
    yield "  largest arrays that the step writes"
    for shape, size, name in seen.largest:
        yield f"    {shape:<44} {size / 1e9:8.3f} GB  {name}"
    yield "\nCollectives of a step, of one device"
    for name, (count, size) in seen.collectives.items():
        yield f"  {name:<46} {count:>8,}  {size / 1e9:10.3f} GB"
    limits = {
        f"operations, at {chip.flops / 1e12:g} TFLOP/s": flops.done / machine.devices / chip.flops,
        # What is written is read about once.
        f"memory, at {chip.bandwidth / 1e9:g} GB/s": 2 * seen.written / chip.bandwidth,
        f"links, at {chip.links / 1e9:g} GB/s": sum(size for _, size in seen.collectives.values()) / chip.links,
    }
    seconds = max(limits.values())
    yield "\nPredicted, not measured: the longest of these, at the vendor's peaks and perfectly overlapped; arrays that"
    yield "stay on the chip count as memory too"
    for name, limit in limits.items():
        yield f"  {name:<46} {limit:8.2f} s"
    tokens = config.batch_size * config.sequence_length
    share = flops.needed / machine.devices / chip.flops / seconds
    yield f"  {'step':<46} {seconds:8.2f} s, {tokens / seconds:,.0f} tokens/s"
    yield f"  {'model flops utilisation':<46} {share:8.1%} ({flops.needed / 1e15:,.1f} PFLOP a step)"


def _placed(mesh: Mesh, tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree, shardings_of(mesh, tree)
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
