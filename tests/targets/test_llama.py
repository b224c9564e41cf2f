"""config.json of the Llama family, as our spec says it."""

import pytest

from dspark_jax.ops.rope import LinearScaling, Llama3Scaling, RopeSpec
from dspark_jax.targets.fields import rope_spec
from dspark_jax.targets.llama import llama_spec

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
    assert (spec.family, spec.vocab_size, spec.max_len, spec.vocabulary.tied) == ("llama", 320, 512, False)
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
    assert llama_spec(CONFIG | {"tie_word_embeddings": True}).vocabulary.tied


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("hidden_act", "gelu", "hidden_act"),
        ("attention_bias", True, "attention_bias"),
        ("mlp_bias", True, "mlp_bias"),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "rope_type 'dynamic'"),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_cannot_be_honoured_is_named(field, value, named):
    with pytest.raises(ValueError, match=rf"{named} .*is not supported; supported"):
        llama_spec(CONFIG | {field: value})


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
