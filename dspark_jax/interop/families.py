"""Target families by the architecture that config.json names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dspark_jax.interop.names import Table
from dspark_jax.interop.tables import huggingface_decoder
from dspark_jax.targets.gemma4 import gemma4_spec
from dspark_jax.targets.llama import llama_spec
from dspark_jax.targets.model import TargetSpec
from dspark_jax.targets.qwen3 import qwen3_spec

# What a checkpoint of Gemma 4 holds beside its language model.
_TOWERS = ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.")


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one architecture of config.json is read."""

    spec: Callable[[Mapping[str, Any]], TargetSpec]
    table: Callable[[TargetSpec], Table]


def _dense(spec: TargetSpec) -> Table:
    return huggingface_decoder(tied=spec.vocabulary.tied)


def _gemma4(spec: TargetSpec) -> Table:
    return huggingface_decoder(tied=spec.vocabulary.tied, branch_norms=True)


def _wrapped_gemma4(spec: TargetSpec) -> Table:
    return huggingface_decoder(
        tied=spec.vocabulary.tied, branch_norms=True, prefix="model.language_model.", skipped=_TOWERS
    )


FAMILIES = {
    "LlamaForCausalLM": Family(spec=llama_spec, table=_dense),
    "Qwen3ForCausalLM": Family(spec=qwen3_spec, table=_dense),
    "Gemma4ForCausalLM": Family(spec=gemma4_spec, table=_gemma4),
    "Gemma4UnifiedForCausalLM": Family(spec=gemma4_spec, table=_gemma4),
    "Gemma4ForConditionalGeneration": Family(spec=gemma4_spec, table=_wrapped_gemma4),
    "Gemma4UnifiedForConditionalGeneration": Family(spec=gemma4_spec, table=_wrapped_gemma4),
}
