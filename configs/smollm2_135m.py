"""The shipped drafter for SmolLM2-135M-Instruct: one GPU, seven minutes, on answers the target gave itself.

dspark_jax/pretrained/smollm2_135m/README.md has the commands that make data/smollm2_135m.jsonl.
"""

from dspark_jax.drafters.heads import VanillaMarkov
from dspark_jax.training.checkpoint import CheckpointConfig
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.draft import DSparkShape
from dspark_jax.training.evaluate import EvaluationConfig
from dspark_jax.training.optimizer import OptimizerConfig
from dspark_jax.training.sources import ChatFiles

config = TrainConfig(
    target="smollm2_135m",
    data=ChatFiles(paths=("data/smollm2_135m.jsonl",)),
    # Token 4 is <reponame>, which chats do not contain.
    drafter=DSparkShape(mask_token_id=4, num_layers=4, block_size=7, markov_head=VanillaMarkov(rank=64)),
    batch_size=64,
    sequence_length=320,
    anchors=64,
    packing=False,
    steps=3000,
    optimizer=OptimizerConfig(learning_rate=1e-3),
    evaluation=EvaluationConfig(every=1500, prompts=32, new_tokens=128),
    checkpoint=CheckpointConfig(every=1000),
    log_every=50,
)
