"""From what a run chooses about its drafter, and what the target dictates, to a DSparkConfig."""

from dataclasses import dataclass, replace

from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.targets.model import TargetSpec

TAPS = 5


@dataclass(frozen=True, kw_only=True)
class DSparkShape:
    """The free choices of a DSpark drafter; widths, heads, rope and vocabulary are the target's.

    mask_token_id: a token of the target that ordinary text does not contain; its embedding fills slots 1..K-1.
    tapped_layers: 0-based target layers whose outputs are the context features; None spreads five of them from
    layer 1 to the third last, as the released drafters do. ffw: None is the target's.
    """

    mask_token_id: int
    num_layers: int = DSparkConfig.num_layers
    block_size: int = DSparkConfig.block_size
    tapped_layers: tuple[int, ...] | None = None
    ffw: int | None = None
    markov_rank: int = DSparkConfig.markov_rank
    confidence: bool = DSparkConfig.confidence
    confidence_with_markov: bool = DSparkConfig.confidence_with_markov

    def __post_init__(self):
        for name in ("num_layers", "block_size", "markov_rank", "ffw"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"drafter.{name} must be at least 1, not {value}")


def draft_config(shape: DSparkShape, target: TargetSpec) -> DSparkConfig:
    """The drafter of this shape for this target: its layers are the target's last one, with query/key norms.

    ValueError for a mask token outside the vocabulary or a tap that is not a layer below the last.
    """
    taps = spread_taps(len(target.layers)) if shape.tapped_layers is None else shape.tapped_layers
    layer = replace(target.layers[-1], qk_norm=True)
    return DSparkConfig(
        vocab_size=target.vocab_size,
        layer=layer if shape.ffw is None else replace(layer, ffw=shape.ffw),
        num_layers=shape.num_layers,
        block_size=shape.block_size,
        tapped_layers=taps,
        num_target_layers=len(target.layers),
        markov_rank=shape.markov_rank,
        confidence=shape.confidence,
        confidence_with_markov=shape.confidence_with_markov,
        mask_token_id=shape.mask_token_id,
    )


def spread_taps(layers: int) -> tuple[int, ...]:
    """Five layers evenly from layer 1 to the third last: 1, 9, 17, 25, 33 of 36; fewer in a shallow target."""
    first, last = min(1, layers - 2), max(layers - 3, 0)
    return tuple(sorted({round(first + (last - first) * i / (TAPS - 1)) for i in range(TAPS)}))
