"""config.json of the speculators package <-> the drafter's config.

Its layer ids are DeepSpec's plus one. `block_size` counts slots; with `sample_from_anchor` false the anchor's predicts
nothing, so that one token fewer is drafted. The number of the target's layers is in an MTP file only.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.heads import RnnMarkov
from dspark_jax.drafters.mtp import MtpConfig
from dspark_jax.interop.deepspec_config import DrafterConfig, head_fields, heads_of
from dspark_jax.interop.layer_fields import QWEN3, Fields, family_of, fields_of_layer, layer_of
from dspark_jax.interop.reduced_vocabulary import ReducedVocabulary
from dspark_jax.interop.speculators_chain import MtpTensors, eagle3_config, eagle3_fields, mtp_config, mtp_fields
from dspark_jax.interop.tensor_files import TensorFiles, TensorSource
from dspark_jax.nn.block import LayerSpec

_VERSION = "0.9.0"
_KINDS = ("dspark", "dflash", "eagle3", "mtp")
# Fields of the target's config that its layer config repeats.
_OF_TARGET = ("attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "max_position_embeddings")


def speculators_config(fields: Fields, target_layers: Callable[[], int]) -> DrafterConfig:
    """The drafter that the fields describe; ValueError names one that is missing or not supported."""
    kind = fields["speculators_model_type"]
    if kind not in _KINDS:
        supported = ", ".join(map(repr, _KINDS))
        raise ValueError(f"speculators_model_type {kind!r} is not supported; supported: {supported}")
    try:
        layer = _layer(fields)
        if kind == "eagle3":
            return eagle3_config(fields, layer, target_layers)
        if kind == "mtp":
            return mtp_config(fields, layer)
        return _block_config(fields, kind, layer, target_layers)
    except KeyError as error:
        raise ValueError(f"the field {error.args[0]} is missing") from None


def _layer(fields: Fields) -> LayerSpec:
    layer_fields = fields["transformer_layer_config"]
    if (model_type := layer_fields.get("model_type", "qwen3")) != "qwen3":
        raise ValueError(f"transformer_layer_config.model_type {model_type!r} is not supported; supported: 'qwen3'")
    layer = layer_of(layer_fields, QWEN3)
    if (width := fields.get("target_hidden_size")) not in (None, layer.d_model):
        raise ValueError(f"target_hidden_size {width} is not supported; supported: the drafter's, {layer.d_model}")
    return layer


def _block_config(fields: Fields, kind: str, layer: LayerSpec, target_layers: Callable[[], int]) -> DSparkConfig:
    from_anchor = fields.get("sample_from_anchor", kind == "dspark")
    heads: dict[str, Any] = {"markov_head": None, "confidence": False}
    if kind == "dspark":
        heads = heads_of({"markov_rank": 256, "enable_confidence_head": True, **fields})
    if not from_anchor and isinstance(heads["markov_head"], RnnMarkov):
        raise ValueError("markov_head_type 'rnn' is not supported with sample_from_anchor false; supported: true")
    layer_fields = fields["transformer_layer_config"]
    vocab_size = layer_fields["vocab_size"]
    if fields["draft_vocab_size"] > vocab_size:
        raise ValueError(f"draft_vocab_size {fields['draft_vocab_size']} is more than the vocabulary of {vocab_size}")
    return DSparkConfig(
        vocab_size=vocab_size,
        layer=layer,
        num_target_layers=target_layers(),
        tapped_layers=tuple(index - 1 for index in fields["aux_hidden_state_layer_ids"]),
        mask_token_id=fields["mask_token_id"],
        num_layers=layer_fields["num_hidden_layers"],
        block_size=fields["block_size"] - (not from_anchor),
        slot_predicts_itself=not from_anchor,
        reduced_vocabulary=fields["draft_vocab_size"] < vocab_size,
        **heads,
    )


def speculators_tensors(files: TensorFiles, fields: Fields) -> TensorSource:
    """The file's tensors under DeepSpec's names, over the target's whole vocabulary."""
    if fields["speculators_model_type"] == "mtp":
        return MtpTensors(files)
    draft_size, vocab_size = fields["draft_vocab_size"], fields["transformer_layer_config"]["vocab_size"]
    if draft_size == vocab_size:
        return files
    return ReducedVocabulary(files, vocab_size=vocab_size, draft_size=draft_size)


def speculators_fields(
    config: DrafterConfig, *, verifier: str, verifier_architectures: Sequence[str], target: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json's fields for a whole vocabulary. `target`: its config's fields, of which the layer repeats a few.

    ValueError for a drafter that the package has no model for.
    """
    if family_of(config.layer) != QWEN3:
        raise ValueError("speculators: only drafters with Qwen3's layer can be written")
    match config:
        case DSparkConfig():
            headless = config.markov_head is None and not config.confidence
            kind, model = ("dflash", "DFlash") if headless and config.slot_predicts_itself else ("dspark", "DSpark")
            layers, own = config.num_layers, _block_fields(config) | (_heads(config) if kind == "dspark" else {})
        case Eagle3Config():
            kind, model, layers, own = "eagle3", "Eagle3", 1, eagle3_fields(config)
        case MtpConfig():
            kind, model, layers, own = "mtp", "MTP", config.num_target_layers, mtp_fields(config)
    text = target.get("text_config", target)
    return {
        "architectures": [f"{model}DraftModel"],
        "speculators_config": _proposal(kind, config.block_size, verifier, verifier_architectures),
        "speculators_model_type": kind,
        "speculators_version": _VERSION,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            **{field: text[field] for field in _OF_TARGET if field in text},
            **fields_of_layer(config.layer, layers, {}),
            "tie_word_embeddings": False,
            "vocab_size": config.vocab_size,
        },
        **own,
    }


def _block_fields(config: DSparkConfig) -> dict[str, Any]:
    if config.reduced_vocabulary:
        raise ValueError("speculators: a drafter with a reduced vocabulary is read but not written")
    return {
        "aux_hidden_state_layer_ids": [index + 1 for index in config.tapped_layers],
        "block_size": config.input_slots,
        "draft_vocab_size": config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": not config.slot_predicts_itself,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,
    }


def _heads(config: DSparkConfig) -> dict[str, Any]:
    """All four fields: what the package would assume for one left out is another head."""
    with_markov = config.confidence_with_markov and config.markov_head is not None
    return {"markov_head_type": "vanilla", **head_fields(config), "confidence_head_with_markov": with_markov}


def _proposal(kind: str, tokens: int, verifier: str, architectures: Sequence[str]) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"architectures": list(architectures), "name_or_path": verifier},
    }
