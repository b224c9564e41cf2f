"""An estimate of what a training step holds beside its parameters.

It adds up the large arrays that the step names and that must live at once. What XLA fuses away, keeps twice or pads is
not in it, nor are gathered copies of split weights: take it for the order of magnitude.
"""

from dataclasses import dataclass

from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.nn.block import LayerSpec
from dspark_jax.ops.long_attention import SCORES
from dspark_jax.targets.model import TargetSpec
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.draft import DrafterConfig

_FLOAT32 = 4
# Draft and target logits, and a softmax of each; `chunk` of the vocabulary loss.
_LOGIT_COPIES, _POSITIONS = 4, 64


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of one device. The target's layers are done before the drafter starts."""

    features: int
    target_layer: int
    drafter: int
    logits: int

    @property
    def peak(self) -> int:
        return self.features + max(self.target_layer, self.drafter + self.logits)


def estimate_activations(
    config: TrainConfig, target: TargetSpec, drafter: DrafterConfig, *, rows: int, tensor: int
) -> Activations:
    """`rows` of the batch on each device, heads, feed-forward and vocabulary split `tensor` ways."""
    length, size = config.sequence_length, config.dtype.itemsize
    taps = len(drafter.tapped_layers)

    def layer(spec: LayerSpec, queries: int, keys: int) -> int:
        """What one layer computes: scores and their softmax of one chunk, heads, feed-forward, and the residual
        stream."""
        scores = spec.heads * min(queries * keys, SCORES) * (_FLOAT32 + size)
        heads = (2 * spec.heads * queries + 2 * spec.kv_heads * keys) * spec.head_dim * size
        feed_forward = 3 * spec.ffw * queries * size
        return (scores + heads + feed_forward) // tensor + 6 * spec.d_model * queries * size

    if isinstance(drafter, DSparkConfig):
        anchors = min(config.anchors, length)
        queries = anchors * drafter.input_slots
        whole = layer(drafter.layer, queries, length + drafter.input_slots)
        input_only = drafter.layer.d_model * queries * size
        saved = whole + (drafter.num_layers - 1) * (input_only if config.remat == "layer" else whole)
        positions = min(_POSITIONS, anchors * drafter.block_size)
    else:
        # The last step at work; of the others their hidden states, keys and values.
        kept = 2 * (drafter.layer.d_model + drafter.layer.kv_heads * drafter.layer.head_dim) * length * size
        saved = layer(drafter.layer, length, length + drafter.block_size) + (drafter.block_size - 1) * kept
        positions = min(_POSITIONS, length)
    return Activations(
        features=rows * length * (taps + 1) * target.d_model * size,
        target_layer=rows * max(layer(spec, length, length) for spec in target.layers),
        drafter=rows * saved,
        logits=rows * positions * target.vocab_size * _FLOAT32 * _LOGIT_COPIES // tensor,
    )
