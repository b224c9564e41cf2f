"""Operations of a training step, counted from shapes: XLA's own count takes the body of a loop once.

Matrix products only, two operations for each product of two numbers.
"""

from dataclasses import dataclass

from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.nn.block import LayerSpec
from dspark_jax.targets.model import TargetSpec
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.draft import DrafterConfig


@dataclass(frozen=True, kw_only=True)
class Flops:
    """needed: by the mathematics, what is masked and what is computed twice left out. done: as the program has it."""

    needed: float
    done: float

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(needed=self.needed + other.needed, done=self.done + other.done)


def step_flops(config: TrainConfig, target: TargetSpec, drafter: DrafterConfig, *, kernel: bool = False) -> Flops:
    """Of one step over the whole batch, every row full. `kernel`: blocks attend by the TPU kernel."""
    length = config.sequence_length
    row = Flops(needed=0.0, done=0.0)
    for layer in target.layers:
        product = 2.0 * length * _weights(layer)
        row += Flops(
            needed=product + _attention(layer, _causal(length, layer.window)),
            done=product + _attention(layer, length * length),
        )
    if isinstance(drafter, DSparkConfig):
        row += _blocks(config, target, drafter, kernel)
    else:
        row += _chains(config, target, drafter)
    return Flops(needed=config.batch_size * row.needed, done=config.batch_size * row.done)


def _blocks(config: TrainConfig, target: TargetSpec, drafter: DSparkConfig, kernel: bool) -> Flops:
    layer, length, count = drafter.layer, config.sequence_length, drafter.num_layers
    anchors = min(config.anchors, length)
    slots, labels = anchors * drafter.input_slots, anchors * drafter.block_size
    product = count * 2.0 * (slots * _weights(layer) + length * layer.d_model * _kv_width(layer))
    seen = count * _attention(layer, slots * (length / 2 + drafter.input_slots))
    again = config.remat == "layer"
    # Forward and two products backward; scores are made anew backward, and so is a layer that is not kept. The kernel
    # makes them anew twice, and only where tiles are seen: half a tile of 128 more than is visible, and own blocks.
    scored = count * _attention(layer, slots * (length + drafter.input_slots))
    attended = (4.5 + again) * seen * (1 + 128 / length) if kernel else (4 + again) * scored
    layers = Flops(needed=3 * (product + seen), done=(3 + again) * product + attended)
    return layers + _features(config, drafter) + _vocabulary(labels, target, drafter.markov_rank)


def _chains(config: TrainConfig, target: TargetSpec, drafter: DrafterConfig) -> Flops:
    layer, length, steps = drafter.layer, config.sequence_length, drafter.block_size
    product = steps * 2.0 * length * _weights(layer)
    needed = product + steps * _attention(layer, _causal(length, layer.window))
    done = 4 * product + 5 * steps * _attention(layer, length * length)
    return Flops(needed=3 * needed, done=done) + _features(config, drafter) + _vocabulary(steps * length, target, 0)


def _features(config: TrainConfig, drafter: DrafterConfig) -> Flops:
    # They are the target's: nothing flows back into them.
    width = drafter.layer.d_model
    both = 2 * 2.0 * config.sequence_length * len(drafter.tapped_layers) * width * width
    return Flops(needed=both, done=both)


def _vocabulary(labels: int, target: TargetSpec, rank: int) -> Flops:
    head, own = 2.0 * labels * target.vocab_size * target.d_model, 2.0 * labels * target.vocab_size * rank
    # Draft and target logits and the gradient to the hidden states; all logits once more backward.
    return Flops(needed=3 * head + 3 * own, done=5 * head + 4 * own)


def _weights(layer: LayerSpec) -> int:
    """Numbers that multiply each position."""
    into = layer.in_width or layer.d_model
    queries = layer.heads * layer.head_dim
    return into * (queries + _kv_width(layer)) + queries * layer.d_model + 3 * layer.d_model * layer.ffw


def _kv_width(layer: LayerSpec) -> int:
    return (1 if layer.k_is_v else 2) * layer.kv_heads * layer.head_dim


def _attention(layer: LayerSpec, pairs: int | float) -> float:
    """Scores and mixing of so many pairs of a query and a key."""
    return 4.0 * layer.heads * layer.head_dim * pairs


def _causal(length: int, window: int | None) -> float:
    seen = min(window or length, length)
    return seen * (length - seen / 2)
