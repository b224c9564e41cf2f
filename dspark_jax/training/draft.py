"""The drafters a run can train: what it chooses about one, and what the target dictates."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from flax import nnx

from dspark_jax.core.arrays import DType
from dspark_jax.drafters.dspark import DSpark, DSparkConfig
from dspark_jax.drafters.eagle3 import Eagle3, Eagle3Config
from dspark_jax.drafters.heads import GatedMarkov, RnnMarkov, VanillaMarkov
from dspark_jax.drafters.mtp import Mtp, MtpConfig
from dspark_jax.drafters.objective import LossWeights
from dspark_jax.nn.block import LayerSpec
from dspark_jax.targets.model import TargetSpec

TAPS = 5

DrafterConfig = DSparkConfig | Eagle3Config | MtpConfig
Drafter = DSpark | Eagle3 | Mtp


@dataclass(frozen=True, kw_only=True)
class DSparkShape:
    """The free choices of a DSpark drafter; widths, heads, rope and vocabulary are the target's.

    mask_token_id: a token of the target that ordinary text does not contain; its embedding fills slots 1..K-1.
    tapped_layers: 0-based target layers whose outputs are the context features; None spreads five of them from
    layer 1 to the third last, as the released drafters do. ffw: None is the target's. loss: see LossWeights.
    """

    mask_token_id: int
    num_layers: int = DSparkConfig.num_layers
    block_size: int = DSparkConfig.block_size
    tapped_layers: tuple[int, ...] | None = None
    ffw: int | None = None
    markov_head: VanillaMarkov | GatedMarkov | RnnMarkov | None = field(default_factory=VanillaMarkov)
    confidence: bool = DSparkConfig.confidence
    confidence_with_markov: bool = DSparkConfig.confidence_with_markov
    loss: LossWeights = field(default_factory=LossWeights)

    SHORT_PATHS: ClassVar[Mapping[str, str]] = {"markov_rank": "markov_head.rank"}

    def __post_init__(self):
        _check(self)
        if self.markov_head is not None and self.markov_head.rank < 1:
            raise ValueError(f"drafter.markov_rank must be at least 1, not {self.markov_head.rank}")


@dataclass(frozen=True, kw_only=True)
class DFlashShape:
    """A DSpark backbone without sequential or confidence head, trained by cross-entropy alone; fields as there.

    decay: of later slots' weights, in slots.
    """

    mask_token_id: int
    num_layers: int = DSparkConfig.num_layers
    block_size: int = DSparkConfig.block_size
    tapped_layers: tuple[int, ...] | None = None
    ffw: int | None = None
    decay: float = LossWeights.decay

    def __post_init__(self):
        _check(self)
        if not self.decay > 0.0:
            raise ValueError(f"drafter.decay must be above 0, not {self.decay}")


@dataclass(frozen=True, kw_only=True)
class Eagle3Shape:
    """An Eagle3 drafter. block_size: steps of the training-time test, and drafts a round; step k's loss weighs
    step_decay ** k. tapped_layers and ffw as in DSparkShape."""

    block_size: int = Eagle3Config.block_size
    step_decay: float = Eagle3Config.step_decay
    tapped_layers: tuple[int, ...] | None = None
    ffw: int | None = None

    def __post_init__(self):
        _check(self)


@dataclass(frozen=True, kw_only=True)
class MtpShape:
    """An MTP drafter, by default MTP-1. block_size and step_decay as in Eagle3Shape, ffw as in DSparkShape."""

    block_size: int = MtpConfig.block_size
    step_decay: float = MtpConfig.step_decay
    ffw: int | None = None

    def __post_init__(self):
        _check(self)


def _check(shape) -> None:
    """What can be said before the target is known."""
    for name in ("num_layers", "block_size", "ffw"):
        value = getattr(shape, name, None)
        if value is not None and value < 1:
            raise ValueError(f"drafter.{name} must be at least 1, not {value}")
    taps = getattr(shape, "tapped_layers", None)
    if taps is not None and (not taps or len(set(taps)) < len(taps)):
        raise ValueError(f"drafter.tapped_layers must be one or more different layers, or none for five, not {taps}")
    if not getattr(shape, "step_decay", 1.0) > 0.0:
        raise ValueError(f"drafter.step_decay must be above 0, not {shape.step_decay}")


DrafterShape = DSparkShape | DFlashShape | Eagle3Shape | MtpShape


def draft_config(shape: DrafterShape, target: TargetSpec) -> DrafterConfig:
    """The drafter of this shape for this target.

    ValueError for a mask token outside the vocabulary or a tap that is not a layer below the last.
    """
    layer = draft_layer(target)
    facts: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "num_target_layers": len(target.layers),
        "layer": layer if shape.ffw is None else replace(layer, ffw=shape.ffw),
        "block_size": shape.block_size,
    }
    if isinstance(shape, MtpShape):
        return MtpConfig(**facts, step_decay=shape.step_decay)
    facts["tapped_layers"] = spread_taps(len(target.layers)) if shape.tapped_layers is None else shape.tapped_layers
    if isinstance(shape, Eagle3Shape):
        return Eagle3Config(**facts, step_decay=shape.step_decay)
    facts |= {"mask_token_id": shape.mask_token_id, "num_layers": shape.num_layers}
    if isinstance(shape, DFlashShape):
        return DSparkConfig(**facts, markov_head=None, confidence=False)
    return DSparkConfig(
        **facts,
        markov_head=shape.markov_head,
        confidence=shape.confidence,
        confidence_with_markov=shape.confidence_with_markov,
    )


def new_drafter(config: DrafterConfig, *, rngs: nnx.Rngs, dtype: DType) -> Drafter:
    """Random parameters of the drafter that a config describes."""
    match config:
        case DSparkConfig():
            return DSpark(config, rngs=rngs, dtype=dtype)
        case Eagle3Config():
            return Eagle3(config, rngs=rngs, dtype=dtype)
        case MtpConfig():
            return Mtp(config, rngs=rngs, dtype=dtype)


def draft_layer(target: TargetSpec) -> LayerSpec:
    """The target's last layer that sees everything (its last one, made to, where all slide), with q/k norms."""
    seeing = [layer for layer in target.layers if layer.window is None]
    return replace((seeing or target.layers)[-1], window=None, qk_norm=True)


def spread_taps(layers: int) -> tuple[int, ...]:
    """Five layers evenly from layer 1 to the third last: 1, 9, 17, 25, 33 of 36; fewer in a shallow target."""
    first, last = min(1, layers - 2), max(layers - 3, 0)
    return tuple(sorted({round(first + (last - first) * i / (TAPS - 1)) for i in range(TAPS)}))
