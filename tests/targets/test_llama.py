"""config.json of the Llama family, as our spec says it."""

import pytest

from dspark_jax.ops.rope import LinearScaling, Llama3Scaling, RopeSpec
from dspark_jax.targets.llama import llama_spec, rope_spec

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
    "max_position_embeddings": 512,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_every_field_finds_its_place():
    spec = llama_spec(CONFIG)
    assert (spec.family, spec.vocab_size, spec.max_len, spec.tied) == ("llama", 320, 512, False)
    assert spec.norm_eps == 1e-6
    assert len(spec.layers) == 3
    layer = spec.layers[0]
    assert (layer.d_model, layer.ffw, layer.heads, layer.kv_heads, layer.head_dim) == (64, 160, 4, 2, 16)
    assert layer.norm_eps == 1e-6
    assert layer.rope == RopeSpec(theta=5e5)
    assert not layer.qk_norm


def test_absent_and_null_fields_have_the_familys_defaults():
    plain = {name: value for name, value in CONFIG.items() if name not in ("num_key_value_heads", "rope_theta")}
    layer = llama_spec(plain | {"head_dim": None}).layers[0]
    assert (layer.kv_heads, layer.head_dim, layer.rope.theta) == (4, 16, 10_000.0)
    assert llama_spec(CONFIG | {"head_dim": 32, "tie_word_embeddings": True}).layers[0].head_dim == 32
    assert llama_spec(CONFIG | {"tie_word_embeddings": True}).tied


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True), ("rope_scaling", "yarn")]
)
def test_what_cannot_be_honoured_is_named(field, value):
    config = CONFIG | {field: {"rope_type": "yarn", "factor": 2.0} if value == "yarn" else value}
    name = "rope_type" if value == "yarn" else field
    with pytest.raises(ValueError, match=rf"{name} .*{value}.* is not supported; supported"):
        llama_spec(config)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, RopeSpec(theta=7.0)),
        ({"rope_theta": 7.0, "rope_scaling": None}, RopeSpec(theta=7.0)),
        (
            {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
            RopeSpec(theta=7.0, scaling=LinearScaling(factor=4.0)),
        ),
        (
            {"rope_parameters": {"rope_theta": 7.0, "rope_type": "llama3", **LLAMA3}},
            RopeSpec(
                theta=7.0,
                scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192),
            ),
        ),
    ],
)
def test_both_spellings_of_rope_are_read(fields, expected):
    assert rope_spec(fields) == expected
