"""The DSpark drafter bundled with a DeepSeek-V4 checkpoint: `dspark_*` fields, tensors under `mtp.{stage}.`

Only a drafter of dense layers with Qwen3's attention can be built. DeepSeek's own layers (latent attention, experts,
hyper-connections) are refused by the field that announces them.
"""

import re
from collections.abc import Callable

import numpy as np
from jaxtyping import Shaped

from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.interop.deepspec_config import heads_of
from dspark_jax.interop.layer_fields import QWEN3, Fields, layer_of
from dspark_jax.interop.tensor_files import TensorFiles

_FOREIGN = ("hc_", "n_routed_experts", "num_experts", "kv_lora_rank", "q_lora_rank", "o_lora_rank", "compress_ratios")
_OWN = r"(markov_head|confidence_head|fc|hidden_norm|norm)\."
_BIAS, _CONFIDENCE = "confidence_head.proj.bias", "confidence_head.proj.weight"


def deepseek_v4_config(
    fields: Fields, target_layers: Callable[[], int], has_tensor: Callable[[str], bool]
) -> DSparkConfig:
    """The drafter that the fields describe; ValueError names one that is missing or not supported."""
    for field, value in fields.items():
        if field.startswith(_FOREIGN) and value:
            raise ValueError(f"{field} {value!r} is not supported; supported: drafters of dense layers without it")
    try:
        stages = fields["num_nextn_predict_layers"]
        heads = {
            "markov_rank": fields["dspark_markov_rank"],
            "markov_head_type": fields.get("dspark_markov_head_type"),
            "confidence_head_with_markov": fields["dspark_markov_rank"] > 0,
            "enable_confidence_head": has_tensor(f"mtp.{stages - 1}.{_CONFIDENCE}"),
        }
        return DSparkConfig(
            vocab_size=fields["vocab_size"],
            layer=layer_of(fields, QWEN3),
            num_target_layers=fields["num_hidden_layers"] if "num_hidden_layers" in fields else target_layers(),
            tapped_layers=tuple(fields["dspark_target_layer_ids"]),
            mask_token_id=fields["dspark_noise_token_id"],
            num_layers=stages,
            block_size=fields["dspark_block_size"],
            **heads_of(heads),
        )
    except KeyError as error:
        raise ValueError(f"the field {error.args[0]} is missing") from None


def deepseek_v4_tensors(files: TensorFiles, fields: Fields) -> "StagedTensors":
    return StagedTensors(files)


class StagedTensors:
    """A TensorSource over the `mtp.` tensors of `files` under DeepSpec's names; the target's own tensors are not seen.

    A confidence head may come without a bias, which is then zero.
    """

    def __init__(self, files: TensorFiles):
        self._files = files
        self._stored: dict[str, str] = {}
        for stored in sorted(files.names):
            if not (staged := re.fullmatch(r"mtp\.(\d+)\.(.+)", stored)):
                continue
            stage, rest = staged.groups()
            name = rest if re.match(_OWN, rest) else f"layers.{stage}.{rest}"
            if name in self._stored:
                raise ValueError(f"{files.where(stored)}: both {self._stored[name]} and {stored} are {name}")
            self._stored[name] = stored
        self._adds_bias = _CONFIDENCE in self._stored and _BIAS not in self._stored

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._stored) | ({_BIAS} if self._adds_bias else set())

    def where(self, name: str | None = None) -> str:
        return self._files.where(None if name is None else self._stored[_CONFIDENCE if name == _BIAS else name])

    def shape(self, name: str) -> tuple[int, ...]:
        return (1,) if self._adds_bias and name == _BIAS else self._files.shape(self._stored[name])

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        if self._adds_bias and name == _BIAS:
            return np.zeros(1, np.float32)
        return self._files.read(self._stored[name])
