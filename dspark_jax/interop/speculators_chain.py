"""Eagle3 and MTP of the speculators package: their fields in config.json, and MTP's names of the tensors.

An Eagle3 file has DeepSpec's names. A field that asks the package's model for what ours does not compute is refused.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped

from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.mtp import MtpConfig
from dspark_jax.interop.layer_fields import Fields
from dspark_jax.interop.tensor_files import TensorFiles
from dspark_jax.nn.block import LayerSpec

_EAGLE3_FLAGS = ("embed_requires_grad", "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
_MTP_NAMES = {
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "eh_proj.weight": "input_proj.weight",
    "norm.weight": "final_layernorm.weight",
}
_LAYER, _MTP_LAYER = "layers.0.", "mtp_layers.0."


def eagle3_config(fields: Fields, layer: LayerSpec, target_layers: Callable[[], int]) -> Eagle3Config:
    """The drafter that the fields describe; KeyError or ValueError names one that is missing or not supported."""
    for field in _EAGLE3_FLAGS:
        if fields.get(field):
            raise ValueError(f"{field} {fields[field]!r} is not supported; supported: False")
    vocab_size, layers = (fields["transformer_layer_config"][name] for name in ("vocab_size", "num_hidden_layers"))
    if fields["draft_vocab_size"] != vocab_size:
        raise ValueError(f"draft_vocab_size {fields['draft_vocab_size']} is not supported; supported: {vocab_size}")
    if layers != 1:
        raise ValueError(f"transformer_layer_config.num_hidden_layers {layers} is not supported; supported: 1")
    return Eagle3Config(
        vocab_size=vocab_size,
        layer=layer,
        num_target_layers=target_layers(),
        tapped_layers=tuple(index - 1 for index in fields["eagle_aux_hidden_state_layer_ids"]),
        block_size=_tokens(fields),
    )


def mtp_config(fields: Fields, layer: LayerSpec) -> MtpConfig:
    """The same for MTP, whose layer config counts the target's layers."""
    tokens = _tokens(fields)
    if tokens != 1:
        # The package's recursion goes through the last norm, ours as DeepSeek's does not.
        raise ValueError(f"speculative_tokens {tokens} of an MTP drafter is not supported; supported: 1")
    return MtpConfig(
        vocab_size=fields["transformer_layer_config"]["vocab_size"],
        layer=layer,
        num_target_layers=fields["transformer_layer_config"]["num_hidden_layers"],
        block_size=1,
    )


def eagle3_fields(config: Eagle3Config) -> dict[str, Any]:
    """What only an Eagle3 file has."""
    return {
        **dict.fromkeys(_EAGLE3_FLAGS, False),
        "draft_vocab_size": config.vocab_size,
        "eagle_aux_hidden_state_layer_ids": [index + 1 for index in config.tapped_layers],
        "target_hidden_size": None,
    }


def mtp_fields(config: MtpConfig) -> dict[str, Any]:
    """What only an MTP file has; ValueError for a drafter that the package would use in another way."""
    if config.block_size != 1:
        raise ValueError(f"speculators: an MTP drafter of {config.block_size} tokens cannot be written, only of 1")
    return {"num_nextn_predict_layers": 1}


def mtp_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """DeepSpec's names -> the package's."""
    return {_mtp_name(name): tensor for name, tensor in tensors.items()}


def _mtp_name(name: str) -> str:
    return _MTP_LAYER + (_MTP_NAMES.get(name) or name.removeprefix(_LAYER))


class MtpTensors:
    """A TensorSource over an MTP file under DeepSpec's names."""

    def __init__(self, files: TensorFiles):
        ours = {theirs: name for name, theirs in _MTP_NAMES.items()}
        self._files = files
        self._stored = {}
        for stored in files.names:
            rest = stored.removeprefix(_MTP_LAYER)
            self._stored[stored if rest == stored else ours.get(rest) or _LAYER + rest] = stored

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def where(self, name: str | None = None) -> str:
        return self._files.where(None if name is None else self._stored[name])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(self._stored[name])

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        return self._files.read(self._stored[name])


def _tokens(fields: Fields) -> int:
    proposal = fields["speculators_config"]
    methods = {method["proposal_type"]: method for method in proposal["proposal_methods"]}
    return methods[proposal["default_proposal_method"]]["speculative_tokens"]
