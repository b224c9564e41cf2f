"""config.json of a DeepSpec drafter <-> the drafter's config.

`architectures` names layer family and kind; everything else is read from the fields, never from a file's name: what
DeepSpec releases as DFlash is a DSpark drafter with markov_rank 0. `Qwen3MtpModel` and `Gemma4MtpModel` are this
package's own: DeepSpec has no MTP drafter. Their `num_speculative_tokens` is the block size.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.heads import GatedMarkov, MarkovSpec, RnnMarkov, VanillaMarkov
from dspark_jax.drafters.mtp import MtpConfig
from dspark_jax.interop.layer_fields import GEMMA4, QWEN3, Fields, family_of, fields_of_layer, layer_of

DrafterConfig = DSparkConfig | Eagle3Config | MtpConfig

MARKOV_HEADS = {"vanilla": VanillaMarkov, "gated": GatedMarkov, "rnn": RnnMarkov}
# Fields of a target's config that would contradict the drafter's own.
_SUPERSEDED = ("rope_theta", "rope_scaling", "torch_dtype", "auto_map", "quantization_config", "per_layer_config")


def config_of(fields: Fields) -> DrafterConfig:
    """The drafter that config.json describes; ValueError names a field that is missing or not supported."""
    architectures = fields.get("architectures")
    readers = {f"{family}{kind}Model": (family, read) for family in (QWEN3, GEMMA4) for kind, read in _READERS.items()}
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in readers:
        raise ValueError(f"architectures {architectures!r} is not supported; supported: one of {', '.join(readers)}")
    family, read = readers[architectures[0]]
    try:
        return read(fields, family)
    except KeyError as error:
        raise ValueError(f"the field {error.args[0]} is missing") from None


def fields_of(config: DrafterConfig, extra: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's fields: `extra` (say, the target's), under the drafter's own. The inverse of `config_of`.

    ValueError where DeepSpec has no field for what the drafter is.
    """
    family = family_of(config.layer)
    target = _flat(extra)
    kept = {field: value for field, value in target.items() if field not in _SUPERSEDED}
    if family == GEMMA4:
        kept = {"target_model_type": "gemma4", "target_text_model_type": "gemma4_text"} | kept
    match config:
        case DSparkConfig():
            kind, layers, own = "DSpark", config.num_layers, _dspark_fields(config)
        case Eagle3Config():
            kind, layers, own = "Eagle3", 1, _eagle3_fields(config)
        case MtpConfig():
            kind, layers, own = "Mtp", 1, _mtp_fields(config)
    return {
        **kept,
        **fields_of_layer(config.layer, layers, target),
        **own,
        "architectures": [f"{family}{kind}Model"],
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


def head_fields(config: DSparkConfig) -> dict[str, Any]:
    """The fields of both heads, which other layouts share; a drafter without heads leaves out what says nothing."""
    fields: dict[str, Any] = {"enable_confidence_head": config.confidence, "markov_rank": config.markov_rank}
    if config.markov_head is not None:
        fields["markov_head_type"] = _markov_type(config.markov_head)
    if config.markov_head is not None or not config.confidence_with_markov:
        fields["confidence_head_with_markov"] = config.confidence_with_markov
    return fields


def heads_of(fields: Fields) -> dict[str, Any]:
    """The heads among DSparkConfig's fields: the inverse of `head_fields`."""
    rank, confidence = fields["markov_rank"], fields["enable_confidence_head"]
    kind = fields.get("markov_head_type") or "vanilla"
    if rank and kind not in MARKOV_HEADS:
        raise ValueError(f"markov_head_type {kind!r} is not supported; supported: {', '.join(MARKOV_HEADS)}")
    return {
        "markov_head": MARKOV_HEADS[kind](rank=rank) if rank else None,
        "confidence": confidence,
        # Without either head it says nothing, whatever it says.
        "confidence_with_markov": fields.get("confidence_head_with_markov", True) or not (rank or confidence),
    }


def _markov_type(head: MarkovSpec) -> str:
    return next(name for name, spec in MARKOV_HEADS.items() if isinstance(head, spec))


def _dspark(fields: Fields, family: str) -> DSparkConfig:
    for field, least in (("markov_rank", 0), ("block_size", 1)):
        if type(fields[field]) is not int or fields[field] < least:
            raise ValueError(f"{field} {fields[field]!r} is not supported; supported: whole numbers from {least}")
    return DSparkConfig(
        vocab_size=fields["vocab_size"],
        layer=layer_of(fields, family),
        num_target_layers=fields["num_target_layers"],
        tapped_layers=tuple(fields["target_layer_ids"]),
        mask_token_id=fields["mask_token_id"],
        num_layers=fields["num_hidden_layers"],
        block_size=fields["block_size"],
        **heads_of(fields),
    )


def _dspark_fields(config: DSparkConfig) -> dict[str, Any]:
    if config.slot_predicts_itself:
        raise ValueError(
            "drafter: slot_predicts_itself (the original DFlash's alignment) has no DeepSpec layout; "
            "write it as speculators"
        )
    if config.reduced_vocabulary:
        raise ValueError(
            "drafter: reduced_vocabulary has no DeepSpec layout: its files draft from the whole vocabulary"
        )
    return {
        **head_fields(config),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.tapped_layers),
    }


def _eagle3(fields: Fields, family: str) -> Eagle3Config:
    _require_one_layer(fields)
    return Eagle3Config(
        vocab_size=fields["vocab_size"],
        layer=layer_of(fields, family),
        num_target_layers=fields["num_target_layers"],
        tapped_layers=tuple(fields["target_layer_ids"]),
        block_size=fields["ttt_length"],
        step_decay=fields["step_loss_decay"],
    )


def _eagle3_fields(config: Eagle3Config) -> dict[str, Any]:
    return {
        "draft_num_hidden_layers": 1,
        "step_loss_decay": config.step_decay,
        "target_layer_ids": list(config.tapped_layers),
        "ttt_length": config.block_size,
    }


def _mtp(fields: Fields, family: str) -> MtpConfig:
    _require_one_layer(fields)
    return MtpConfig(
        vocab_size=fields["vocab_size"],
        layer=layer_of(fields, family),
        num_target_layers=fields["num_target_layers"],
        block_size=fields["num_speculative_tokens"],
        step_decay=fields["step_loss_decay"],
    )


def _mtp_fields(config: MtpConfig) -> dict[str, Any]:
    return {
        "num_nextn_predict_layers": 1,
        "num_speculative_tokens": config.block_size,
        "step_loss_decay": config.step_decay,
    }


_READERS: dict[str, Callable[[Fields, str], DrafterConfig]] = {"DSpark": _dspark, "Eagle3": _eagle3, "Mtp": _mtp}


def _require_one_layer(fields: Fields) -> None:
    if fields["num_hidden_layers"] != 1:
        raise ValueError(f"num_hidden_layers {fields['num_hidden_layers']} is not supported; supported: 1")


def _flat(extra: Fields) -> dict[str, Any]:
    """A target's fields at the top level, as DeepSpec copies them, also where the target wraps a text model."""
    if "text_config" not in extra:
        return dict(extra)
    text = extra["text_config"]
    return {**text, "target_model_type": extra["model_type"], "target_text_model_type": text["model_type"]}
