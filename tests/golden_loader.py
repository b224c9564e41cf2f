"""Targets and drafters of the parity files, tensor by tensor: a second reading of the layouts, apart from interop's."""

import json

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from dspark_jax.drafters.dspark import DSpark, DSparkConfig
from dspark_jax.drafters.eagle3 import Eagle3, Eagle3Config
from dspark_jax.drafters.heads import GatedMarkov, RnnMarkov, VanillaMarkov
from dspark_jax.targets.gemma4 import gemma4_layer, gemma4_spec
from dspark_jax.targets.llama import llama_spec
from dspark_jax.targets.model import Target
from dspark_jax.targets.qwen3 import qwen3_spec

SPECS = {"llama": llama_spec, "qwen3": qwen3_spec, "gemma4_text": gemma4_spec}
HEADS = {"vanilla": VanillaMarkov, "gated": GatedMarkov, "rnn": RnnMarkov}


def load_target(folder):
    config, tensors = read(folder)
    target = blank(lambda: Target(SPECS[config["model_type"]](config), rngs=nnx.Rngs(0)))
    target.vocabulary.embedding[...] = tensors["model.embed_tokens.weight"]
    target.norm.scale[...] = tensors["model.norm.weight"]
    if target.vocabulary.head is not None:
        target.vocabulary.head[...] = tensors["lm_head.weight"].T
    for index, block in enumerate(target.layers):
        fill(block, tensors, f"model.layers.{index}.")
    return whole(target)


def load_drafter(folder):
    config, tensors = read(folder)
    layer = gemma4_layer(config, 0) if config["model_type"] == "gemma4_text" else qwen3_spec(config).layers[0]
    shared = {
        "vocab_size": config["vocab_size"],
        "layer": layer,
        "num_target_layers": config["num_target_layers"],
        "tapped_layers": tuple(config["target_layer_ids"]),
    }
    if config["architectures"] == ["Qwen3Eagle3Model"]:
        eagle = Eagle3Config(block_size=config["ttt_length"], step_decay=config["step_loss_decay"], **shared)
        drafter = blank(lambda: Eagle3(eagle, rngs=nnx.Rngs(0)))
        drafter.embedding_norm.scale[...] = tensors["layers.0.input_layernorm.weight"]
        drafter.hidden_norm.scale[...] = tensors["layers.0.hidden_norm.weight"]
        blocks = [drafter.layer]
    else:
        rank = config["markov_rank"]
        dspark = DSparkConfig(
            num_layers=config["num_hidden_layers"],
            block_size=config["block_size"],
            mask_token_id=config["mask_token_id"],
            markov_head=HEADS[config["markov_head_type"]](rank=rank) if rank else None,
            confidence=config["enable_confidence_head"],
            confidence_with_markov=config.get("confidence_head_with_markov", False),
            **shared,
        )
        drafter = blank(lambda: DSpark(dspark, rngs=nnx.Rngs(0)))
        drafter.hidden_norm.scale[...] = tensors["hidden_norm.weight"]
        fill_heads(drafter, tensors)
        blocks = drafter.layers
    drafter.fc[...] = tensors["fc.weight"].T
    drafter.norm.scale[...] = tensors["norm.weight"]
    for index, block in enumerate(blocks):
        fill(block, tensors, f"layers.{index}.")
    return whole(drafter)


def read(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, load_file(folder / "model.safetensors")


def blank(make):
    """The module with NaN everywhere, so that what is not filled shows."""
    return jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, leaf.dtype), nnx.eval_shape(make))


def whole(module):
    leaves, structure = jax.tree.flatten(module)
    assert not any(np.isnan(leaf).any() for leaf in leaves)
    return jax.tree.unflatten(structure, [jax.numpy.asarray(leaf) for leaf in leaves])


def fill_heads(drafter, tensors):
    head = drafter.markov_head
    if head is not None:
        head.w1[...], head.w2[...] = (tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        if head.mix is not None:
            name = "gate_proj" if isinstance(head.spec, GatedMarkov) else "joint_proj"
            head.mix.w[...] = tensors[f"markov_head.{name}.weight"].T
            head.mix.b[...] = tensors[f"markov_head.{name}.bias"]
    if drafter.confidence_head is not None:
        drafter.confidence_head.w[...] = tensors["confidence_head.proj.weight"][0]
        drafter.confidence_head.b[...] = tensors["confidence_head.proj.bias"][0]


def fill(block, tensors, prefix):
    spec, attention, mlp = block.spec, block.attention, block.mlp
    width = spec.in_width or spec.d_model
    norms = {"post_attention_layernorm": block.mlp_norm}
    if spec.branch_norms:
        norms = {
            "post_attention_layernorm": block.attention_out_norm,
            "pre_feedforward_layernorm": block.mlp_norm,
            "post_feedforward_layernorm": block.mlp_out_norm,
        }
    if block.input_norm is not None:
        norms["input_layernorm"] = block.input_norm
    if spec.qk_norm:
        norms |= {"self_attn.q_norm": attention.q_norm, "self_attn.k_norm": attention.k_norm}
    for name, norm in norms.items():
        norm.scale[...] = tensors[f"{prefix}{name}.weight"]

    def projection(name, *shape):
        return tensors[f"{prefix}{name}_proj.weight"].T.reshape(shape)

    pair = (width, spec.kv_heads, spec.head_dim)
    parts = ["self_attn.k"] if spec.k_is_v else ["self_attn.k", "self_attn.v"]
    attention.q[...] = projection("self_attn.q", width, spec.heads, spec.head_dim)
    attention.kv[...] = np.stack([projection(part, *pair) for part in parts], axis=1)
    attention.o[...] = projection("self_attn.o", spec.heads, spec.head_dim, spec.d_model)
    halves = [projection(f"mlp.{half}", spec.d_model, spec.ffw) for half in ("gate", "up")]
    mlp.gate_up[...] = np.stack(halves, axis=1)
    mlp.down[...] = projection("mlp.down", spec.ffw, spec.d_model)
    if spec.layer_scalar:
        block.scalar[...] = tensors[f"{prefix}layer_scalar"][0]
