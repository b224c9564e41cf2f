"""D-44: logits at long positions, every kind of rotary scaling read from a config.json, against plain numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.ops.attention import attention
from dspark_jax.targets.gemma4 import gemma4_spec
from dspark_jax.targets.model import Target
from dspark_jax.targets.qwen3 import qwen3_spec

C, THETA, POSITIONS = 32, 1e6, (0, 7, 4_096, 65_537, 131_071)
COMMON = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "head_dim": C,
    "vocab_size": 40,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8_192,
}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}


def plain():
    return [THETA ** (-2 * pair / C) for pair in range(C // 2)]


def yarn():
    """The mix of kept and divided frequencies of arXiv 2309.00071, pair by pair, and its amplitude."""
    low = math.floor(C * math.log(32_768 / (32 * 2 * math.pi)) / (2 * math.log(THETA)))
    high = math.ceil(C * math.log(32_768 / (1 * 2 * math.pi)) / (2 * math.log(THETA)))
    ramp = [min(max((pair - low) / (high - low), 0), 1) for pair in range(C // 2)]
    assert 0 in ramp
    assert 1 in ramp
    frequencies = [f * (1 - slow) + f / 4 * slow for f, slow in zip(plain(), ramp, strict=True)]
    return frequencies, 0.1 * math.log(4) + 1


def llama3():
    frequencies = []
    for frequency in plain():
        wavelength = 2 * math.pi / frequency
        smooth = min(max((8_192 / wavelength - 1) / 3, 0), 1)
        frequencies.append(frequency * smooth + frequency / 8 * (1 - smooth))
    return frequencies, 1.0


def proportional():
    """A quarter of the pairs turn, at the whole head's frequencies."""
    return [frequency if pair < C // 8 else 0.0 for pair, frequency in enumerate(plain())], 1.0


def qwen3(rope):
    return qwen3_spec(COMMON | {"rope_parameters": {"rope_theta": THETA, **rope}})


def gemma4(rope):
    config = COMMON | {"layer_types": ["full_attention"], "attention_k_eq_v": False, "final_logit_softcapping": 30.0}
    ropes = {"full_attention": {"rope_theta": THETA, **rope}}
    return gemma4_spec(config | {"global_head_dim": C, "sliding_window": 8, "rope_parameters": ropes})


def rms(x, scale=1.0):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def plain_logits(target, tokens, frequencies, amplitude):
    """One layer by loops over queries, pairs and heads."""
    spec, block = target.spec.layers[0], target.layers[0]

    def of(parameter):
        return np.asarray(parameter[...], np.float64)

    embedding = of(target.vocabulary.embedding)
    x = embedding[tokens] * (target.spec.vocabulary.embedding_scale or 1.0)
    normed = rms(x, of(block.input_norm.scale))
    q = rms(np.einsum("td,dhc->thc", normed, of(block.attention.q)), of(block.attention.q_norm.scale))
    k, v = (np.einsum("td,dc->tc", normed, of(block.attention.kv)[:, part, 0]) for part in (0, -1))
    k = rms(k, of(block.attention.k_norm.scale))
    if spec.v_norm:
        v = rms(v)

    def turned(vector, position):
        out = vector.copy()
        for pair, frequency in enumerate(frequencies):
            # The angle is a float32 product in every implementation of record.
            angle = float(np.float32(position) * np.float32(frequency))
            cos, sin = math.cos(angle) * amplitude, math.sin(angle) * amplitude
            first, second = vector[pair], vector[pair + C // 2]
            out[pair], out[pair + C // 2] = first * cos - second * sin, second * cos + first * sin
        return out

    scale = 1.0 if spec.scale == 1.0 else C**-0.5
    mixed = np.zeros(q.shape)
    keys = np.stack([turned(key, position) for key, position in zip(k, POSITIONS, strict=True)])
    for t, h in np.ndindex(*q.shape[:2]):
        scores = keys[: t + 1] @ turned(q[t, h], POSITIONS[t]) * scale
        weights = np.exp(scores - scores.max())
        mixed[t, h] = (weights / weights.sum()) @ v[: t + 1]
    out = np.einsum("thc,hcd->td", mixed, of(block.attention.o))
    branch = block.attention_out_norm
    x = x + (out if branch is None else rms(out, of(branch.scale)))
    gate, up = np.einsum("td,dpf->ptf", rms(x, of(block.mlp_norm.scale)), of(block.mlp.gate_up))
    if branch is None:
        x = x + (gate / (1 + np.exp(-gate)) * up) @ of(block.mlp.down)
    else:
        gelu = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        x = (x + rms((gelu * up) @ of(block.mlp.down), of(block.mlp_out_norm.scale))) * of(block.scalar)
    logits = rms(x, of(target.norm.scale)) @ embedding.T
    cap = target.spec.vocabulary.soft_cap
    return logits if cap is None else cap * np.tanh(logits / cap)


@pytest.mark.parametrize(
    ("spec_of", "rope", "published"),
    [(qwen3, YARN, yarn), (qwen3, LLAMA3, llama3), (gemma4, PROPORTIONAL, proportional)],
    ids=["yarn", "llama3", "proportional"],
)
def test_d_44_logits_at_long_positions(built, spec_of, rope, published):
    target = built(lambda: Target(spec_of(rope), rngs=nnx.Rngs(0)))
    tokens = np.array([3, 8, 21, 8, 35])
    length = len(tokens)

    def attend(q_BTHC, k_BJTC, v_BJTC):
        mask = jnp.tril(jnp.ones((1, length, length), bool))
        return attention(q_BTHC, k_BJTC, v_BJTC, mask, scale=target.spec.layers[0].attention_scale), None

    @jax.jit
    def logits(target):
        x_BTD = target.vocabulary.embed(jnp.asarray(tokens)[None])
        x_BTD, _ = target.layers[0](x_BTD, jnp.asarray(POSITIONS)[None], attend)
        return target.vocabulary.logits(target.norm(x_BTD))[0]

    found = np.asarray(logits(target))
    np.testing.assert_allclose(found, plain_logits(target, tokens, *published()), atol=2e-4)
    # The scaling has a part in it.
    assert np.abs(found - plain_logits(target, tokens, plain(), 1.0)).max() > 1e-2
