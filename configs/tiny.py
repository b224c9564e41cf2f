"""A drafter for the toy target that ships with the package: under two minutes on a CPU, and needs no data."""

from dspark_jax.drafters.heads import VanillaMarkov
from dspark_jax.training.checkpoint import CheckpointConfig
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.draft import DSparkShape
from dspark_jax.training.evaluate import EvaluationConfig
from dspark_jax.training.optimizer import OptimizerConfig
from dspark_jax.training.sources import SelfSampled

config = TrainConfig(
    target="llama_tiny",
    data=SelfSampled(sequences=2048),
    drafter=DSparkShape(
        mask_token_id=319,
        num_layers=2,
        block_size=5,
        tapped_layers=(0, 1, 2, 3, 4),
        markov_head=VanillaMarkov(rank=16),
    ),
    batch_size=32,
    sequence_length=64,
    anchors=16,
    steps=250,
    optimizer=OptimizerConfig(learning_rate=1.5e-2, warmup=0.1, beta2=0.98),
    evaluation=EvaluationConfig(every=50, batches=2, prompts=16, new_tokens=48),
    checkpoint=CheckpointConfig(every=100),
    precision="float32",
)
