"""config.json with a nested `dflash_config`, read: z-lab's DFlash, SpecForge's DFlash and DSpark.

z-lab's `block_size` counts the anchor's slot, which predicts nothing: it drafts one token fewer. `projector_type`
"dspark" says that the slots are shifted as DSpark's are and that the heads are there. Layer ids are DeepSpec's.
"""

from collections.abc import Callable

from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.interop.deepspec_config import heads_of
from dspark_jax.interop.layer_fields import QWEN3, Fields, layer_of

_SUPPORTED = {"attention_mode": (None, "gqa"), "projector_type": (None, "dflash", "dspark"), "causal": (None, False)}
_READ = {"block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type"}
_READ |= {"enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha"}


def dflash_config(fields: Fields, target_layers: Callable[[], int], has_tensor: Callable[[str], bool]) -> DSparkConfig:
    """The drafter that the fields describe; ValueError names one that is missing or not supported."""
    nested = fields["dflash_config"] or {}
    for field, value in nested.items():
        if field in _READ or value in _SUPPORTED.get(field, ()):
            continue
        supported = _SUPPORTED.get(field)
        raise ValueError(
            f"dflash_config.{field} {value!r} is not supported; "
            f"supported: {', '.join(map(repr, supported)) if supported else 'files without it'}"
        )
    if fields.get("model_type") != "qwen3":
        raise ValueError(f"model_type {fields.get('model_type')!r} is not supported; supported: 'qwen3'")
    shifted = nested.get("projector_type") == "dspark"
    try:
        return DSparkConfig(
            vocab_size=fields["vocab_size"],
            layer=layer_of(fields, QWEN3),
            num_target_layers=target_layers(),
            tapped_layers=tuple(nested["target_layer_ids"]),
            mask_token_id=nested["mask_token_id"] if "mask_token_id" in nested else fields["mask_token_id"],
            num_layers=fields["num_hidden_layers"],
            block_size=(nested["block_size"] if "block_size" in nested else fields["block_size"]) - (not shifted),
            slot_predicts_itself=not shifted,
            **_heads(nested, has_tensor) if shifted else {"markov_head": None, "confidence": False},
        )
    except KeyError as error:
        raise ValueError(f"the field {error.args[0]} is missing") from None


def _heads(nested: Fields, has_tensor: Callable[[str], bool]) -> dict:
    """SpecForge may leave out whether there is a confidence head: the file has its tensors or not."""
    return heads_of({"enable_confidence_head": has_tensor("confidence_head.proj.weight"), **nested})
