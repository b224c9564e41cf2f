"""Attention over part of the keys by cuDNN's fused kernel (NVIDIA, from Ampere on): scores never go through memory.

`jax.nn.dot_product_attention(implementation="cudnn")` calls the same kernel, but asks which device this process has
while it traces, and rounds the masses to the type of the queries, too coarse to weigh parts by. The twin in plain code
is in ops/attention_parts.py.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.arrays import Array, DType, Float, Int

TARGET = "__cudnn$fmhaSoftmax"
_TYPES = {jnp.dtype(jnp.bfloat16): "BF16", jnp.dtype(jnp.float16): "F16"}


def fits(channels: int, dtype: DType) -> bool:
    """Whether the kernel takes such heads on every GPU it runs on."""
    return jnp.dtype(dtype) in _TYPES and channels <= 128 and channels % 8 == 0


def attention_part(
    q_BHTC: Float[Array, "B H T C"],
    k_BJSC: Float[Array, "B J S C"],
    v_BJSC: Float[Array, "B J S C"],
    count_B: Int[Array, "B"] | None = None,
    *,
    scale: float,
    causal: bool = False,
) -> tuple[Float[Array, "B H T C"], Float[Array, "B H T"]]:
    """(what is mixed, the logarithm of the mass): queries see the first count_B[b] keys of their row; all without
    `count_B`, and up to their own when `causal`. A row that sees none mixes finite numbers, of mass -inf.
    """
    if causal and count_B is not None:
        raise ValueError("cuDNN attention: keys are counted or causal, not both")
    (batch, heads, queries, _), keys = q_BHTC.shape, k_BJSC.shape[2]
    operands = [q_BHTC, k_BJSC, v_BJSC]
    if count_B is not None:
        # Of a row without keys one is taken, and given no mass below.
        operands += [jnp.full(batch, queries, jnp.int32), jnp.maximum(count_B, 1).astype(jnp.int32)]
    call = jax.ffi.ffi_call(
        TARGET,
        (
            jax.ShapeDtypeStruct(q_BHTC.shape, q_BHTC.dtype),
            jax.ShapeDtypeStruct(q_BHTC.shape[:3], jnp.float32),
            # What XLA gives the kernel to work in.
            jax.ShapeDtypeStruct((0,), np.uint8),
        ),
        custom_call_api_version=2,
        legacy_backend_config=_config(
            (batch, heads, queries, keys),
            _TYPES[q_BHTC.dtype],
            scale,
            "CAUSAL" if causal else "NO_MASK" if count_B is None else "PADDING",
        ),
    )
    mixed, mass_BHT, _ = call(*operands)
    return mixed, mass_BHT if count_B is None else jnp.where(count_B[:, None, None] > 0, mass_BHT, -jnp.inf)


def _config(scores: tuple[int, ...], element: str, scale: float, mask: str) -> str:
    """What XLA is told of the call, in its own terms (GpuBackendConfig.cudnn_fmha_backend_config)."""

    def product(of_right: int) -> dict[str, list[str]]:
        batch = ["0", "1"]
        return {
            "lhs_contracting_dimensions": ["3"],
            "rhs_contracting_dimensions": [str(of_right)],
            "lhs_batch_dimensions": batch,
            "rhs_batch_dimensions": batch,
        }

    attention = {
        "algorithm": {"algo_id": "0", "is_cudnn_frontend": True, "math_type": "TENSOR_OP_MATH", "workspace_size": "0"},
        "fmha_scale": scale,
        "dropout_rate": 0.0,
        "seed": 0,
        "is_flash_attention": True,
        "mask_type": mask,
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
        "intermediate_tensor_shape": {
            "element_type": element,
            "dimensions": [str(size) for size in scores],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "bmm1_dot_dimension_numbers": product(3),
        "bmm2_dot_dimension_numbers": product(2),
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": attention})
