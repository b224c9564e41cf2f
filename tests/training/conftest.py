"""A target small enough that a whole run takes seconds: two llama layers, 48 tokens, random weights."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax.data.pipeline import Batch
from dspark_jax.drafters.heads import VanillaMarkov
from dspark_jax.targets.model import TargetOutput
from dspark_jax.training.checkpoint import CheckpointConfig
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.draft import DSparkShape
from dspark_jax.training.evaluate import EvaluationConfig
from dspark_jax.training.features import FeatureConfig, Features, open_files
from dspark_jax.training.optimizer import OptimizerConfig
from dspark_jax.training.sources import SelfSampled
from dspark_jax.training.stored import store

WIDTH, FFW, VOCAB, LAYERS = 16, 24, 48, 2


@pytest.fixture(scope="session", autouse=True)
def compilation_cache():
    """Small programs too are shared by the runs of this session and their subprocesses (each would compile its own)."""
    settings = {
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield {name.upper(): str(value) for name, value in settings.items()}
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def small_target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": FFW,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": LAYERS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    rng = np.random.default_rng(0)

    def matrix(out: int, into: int) -> np.ndarray:
        return (rng.normal(size=(out, into)) * 1.5 * into**-0.5).astype(np.float32)

    kv = WIDTH // 2
    tensors = {"model.embed_tokens.weight": matrix(VOCAB, WIDTH) * 2, "model.norm.weight": np.ones(WIDTH, np.float32)}
    for n in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (WIDTH, WIDTH),
            "self_attn.k_proj": (kv, WIDTH),
            "self_attn.v_proj": (kv, WIDTH),
            "self_attn.o_proj": (WIDTH, WIDTH),
            "mlp.gate_proj": (FFW, WIDTH),
            "mlp.up_proj": (FFW, WIDTH),
            "mlp.down_proj": (WIDTH, FFW),
        }
        tensors |= {f"model.layers.{n}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{n}.{norm}.weight"] = np.ones(WIDTH, np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


class Looking:
    """A target's outputs that say whose rows they are. `looked`: the rows of every batch that they were asked for."""

    def __init__(self):
        self.looked: list[list[int]] = []
        self.interrupted_at = 0

    def __call__(self, target, batch):
        rows = np.asarray(batch.rows_B)
        self.looked.append(rows.tolist())
        if len(self.looked) == self.interrupted_at:
            raise KeyboardInterrupt
        hidden = jnp.broadcast_to(jnp.asarray(rows, jnp.float32)[:, None, None], (len(rows), 2, 4))
        return store(TargetOutput(hidden_BTD=hidden, features_BTE=hidden, cache=None), "float32")


@pytest.fixture(scope="session")
def caching():
    """caching(folder): features of rows of two tokens, the `Looking` that they come from, and their files."""

    def make(folder, *, writers=1, **config):
        look, place = Looking(), jax.sharding.SingleDeviceSharding(jax.devices()[0])
        config = FeatureConfig(dtype="float32", **config)
        files = open_files(config, folder, key={}, length=2, taps=1, width=4, writers=writers)
        return Features(files, look, place), look, files

    return make


@pytest.fixture(scope="session")
def numbered():
    """numbered(3, 1): a batch of nothing but these row numbers."""

    def make(*rows):
        nothing, mask = np.zeros((len(rows), 2), np.int32), np.zeros((len(rows), 2), bool)
        return Batch(tokens_BT=nothing, loss_mask_BT=mask, segments_BT=nothing, rows_B=np.asarray(rows, np.int32))

    return make


@pytest.fixture(scope="session")
def owners():
    """owners(features): whose rows they are."""
    return lambda seen: np.asarray(seen.values_BTMD[:, 0, -1, 0]).tolist()


@pytest.fixture(scope="session")
def small_config(small_target) -> TrainConfig:
    return TrainConfig(
        target=str(small_target),
        data=SelfSampled(sequences=48, prompt_tokens=3, validation=0.2),
        drafter=DSparkShape(
            mask_token_id=47, num_layers=1, block_size=3, tapped_layers=(-1, 0), markov_head=VanillaMarkov(rank=4)
        ),
        batch_size=4,
        sequence_length=16,
        anchors=4,
        steps=6,
        optimizer=OptimizerConfig(learning_rate=5e-3, weight_decay=0.01),
        evaluation=EvaluationConfig(every=3, batches=1, prompts=4, new_tokens=8),
        checkpoint=CheckpointConfig(every=2),
        precision="float32",
        log_every=1,
    )
