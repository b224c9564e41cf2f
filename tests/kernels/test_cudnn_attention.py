"""What XLA is told of cuDNN's attention. The kernel itself needs a GPU; its twin is tested in its place."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.kernels.cudnn_attention import TARGET, attention_part, fits


def called(**how):
    """(configuration, operands) of the call that a GPU is given for two rows of 3 tokens and 256 positions."""
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)  # noqa: E731
    inputs = shape(2, 4, 3, 64), shape(2, 2, 256, 64), shape(2, 2, 256, 64)
    traced = jax.jit(lambda *x: attention_part(*x, scale=0.25, **how)).trace(*inputs)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    operands, config = re.search(
        rf'custom_call @{re.escape(TARGET)}\((.*?)\).*?backend_config = "(.*?)"', text
    ).groups()
    attention = json.loads(config.replace("\\22", '"'))["cudnn_fmha_backend_config"]
    return attention, operands.count("%")


@pytest.mark.parametrize(
    ("how", "mask", "operands"),
    [({}, "NO_MASK", 3), ({"causal": True}, "CAUSAL", 3), ({"count_B": jnp.array([0, 7])}, "PADDING", 5)],
)
def test_the_call_says_shapes_scale_and_mask(how, mask, operands):
    attention, given = called(**how)
    assert (attention["mask_type"], attention["fmha_scale"], given) == (mask, 0.25, operands)
    assert attention["intermediate_tensor_shape"]["dimensions"] == ["2", "4", "3", "256"]
    assert attention["intermediate_tensor_shape"]["element_type"] == "BF16"


def test_a_causal_call_has_no_counts():
    with pytest.raises(ValueError, match="counted or causal"):
        called(causal=True, count_B=jnp.array([1, 2]))


def test_only_heads_and_types_of_the_kernel_fit():
    assert fits(64, jnp.bfloat16)
    assert fits(128, jnp.float16)
    assert not any(fits(*head) for head in [(64, jnp.float32), (60, jnp.bfloat16), (256, jnp.bfloat16)])
