"""`train.py --dry-run`: a run described from its config and shapes; nothing is downloaded or allocated."""

from collections.abc import Callable, Iterable
from pathlib import Path

from dspark_jax.core.mesh import RULES
from dspark_jax.targets.model import TargetSpec
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.known_targets import TargetFacts, target_facts
from dspark_jax.training.overrides import flatten
from dspark_jax.training.plan import Kind, Plan, plan_run
from dspark_jax.training.sources import PackedShards, SelfSampled
from dspark_jax.training.topology import SLICES, parse_topology

Say = Callable[[str], None]


def dry_run(config: TrainConfig, topology: str | None, say: Say) -> None:
    """Says the resolved config, parameter counts, sharding, memory of a device, and what would be downloaded.

    Without a topology, the first of topology.SLICES that the estimate fits is taken. ValueError for a target whose
    shape is not known, and for sizes that do not divide over the machine.
    """
    facts = target_facts(config.target)
    plan = plan_run(config, facts.spec, parse_topology(topology)) if topology else _smallest(config, facts.spec)
    say("Config")
    _pairs(say, flatten(config).items())
    say("\nDrafter for this target")
    _pairs(say, flatten(plan.drafter_config).items())
    say("\nParameters")
    _pairs(say, _parameters(plan))
    _sharding(say, plan)
    _memory(say, plan)
    say("\nTo be fetched")
    for line in _sources(config, facts, plan):
        say(f"  {line}")


def _smallest(config: TrainConfig, spec: TargetSpec) -> Plan:
    plans, refusal = [], ""
    for name in SLICES:
        try:
            plans.append(plan_run(config, spec, parse_topology(name)))
        except ValueError as error:
            refusal = str(error)
            continue
        if plans[-1].fits:
            return plans[-1]
    if not plans:
        raise ValueError(f"{refusal} (tried {', '.join(SLICES)}; name another with --topology)")
    return plans[-1]


def _parameters(plan: Plan) -> Iterable[tuple[str, str]]:
    yield "target, frozen", f"{plan.target_parameters:,}"
    yield "drafter, trainable", f"{plan.drafter_parameters:,}"
    yield "drafter, frozen", f"{plan.borrowed_parameters:,} (the target's embedding and LM head, borrowed)"


def _sharding(say: Say, plan: Plan) -> None:
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    say(f"\nSharding on {plan.topology.name}: {plan.topology.devices} devices as {mesh}")
    _pairs(say, ((axis, _mesh_axis(over)) for axis, over in RULES.items()))
    for title, kinds in (("Target", plan.target_kinds), ("Drafter", plan.drafter_kinds)):
        say(f"\n{title} parameters")
        for kind in kinds:
            say(f"  {kind.count:>4} x {kind.name:<34} {_shape(kind):<44} {_split(kind)}")


def _memory(say: Say, plan: Plan) -> None:
    activations = plan.activations
    say(f"\nMemory of a device ({plan.topology.name}, {plan.topology.hbm / 1e9:g} GB), {plan.rows} rows at a time")
    _pairs(say, ((name, _gigabytes(size)) for name, size in plan.parts.items()))
    say("  activations, an estimate of the large arrays only:")
    estimates = {
        "target features and hidden states": activations.features,
        "one target layer at work": activations.target_layer,
        "drafter layers, kept for the backward pass": activations.drafter,
        "logits of one chunk": activations.logits,
    }
    _pairs(say, ((f"  {name}", _gigabytes(size)) for name, size in estimates.items()))
    verdict = "fits" if plan.fits else "does not fit: take more devices, a smaller batch_size, or a larger tensor"
    _pairs(say, [("together", f"{_gigabytes(plan.total)} of {plan.topology.hbm / 1e9:g} GB: {verdict}")])


def _sources(config: TrainConfig, facts: TargetFacts, plan: Plan) -> Iterable[str]:
    size = plan.target_parameters * 2
    yield (
        f"target: nothing, {config.target} is on this machine"
        if facts.source is None
        else f"target: {facts.source}, unless it is cached; {_gigabytes(size).strip()} of weights in bfloat16"
    )
    if isinstance(config.data, SelfSampled):
        yield "data: nothing, the target samples it"
        return
    for path in (config.data.path,) if isinstance(config.data, PackedShards) else config.data.paths:
        here = (
            "is on this machine" if Path(path).exists() else "is not here and has no download; `dspark data` makes it"
        )
        yield f"data: nothing, {path} {here}"


def _pairs(say: Say, pairs: Iterable[tuple[str, object]]) -> None:
    for name, value in pairs:
        say(f"  {name:<46} {value}")


def _mesh_axis(over: str | tuple[str, ...] | None) -> str:
    return "replicated" if over is None else over if isinstance(over, str) else " x ".join(over)


def _shape(kind: Kind) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in zip(kind.axes, kind.shape, strict=True)) or "scalar"


def _split(kind: Kind) -> str:
    return f"P({', '.join(str(over) for over in kind.spec)})"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:8.3f} GB"
