"""Targets from Hugging Face directories: found by name, read into a `Target`."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from jax.sharding import Mesh

from dspark_jax.interop.families import FAMILIES, Family
from dspark_jax.interop.names import skipped_tensors
from dspark_jax.interop.parameters import fill, placing
from dspark_jax.interop.smollm2 import default_target
from dspark_jax.interop.tensor_files import TensorFiles, read_json
from dspark_jax.nn.layers import Vocabulary, VocabularySpec
from dspark_jax.targets.model import Target, TargetSpec

DEFAULT_TARGET_NAMES = ("smollm2_135m", "HuggingFaceTB/SmolLM2-135M-Instruct")


def resolve(name_or_dir: str | Path, *, weights: bool = True) -> Path:
    """The local directory behind the default target's name, a directory's path or a Hub repository's name.

    Without `weights` only configs and tokenizer are fetched from the Hub.
    Raises FileNotFoundError when there is no such directory or repository, PermissionError when it is gated and
    ConnectionError when the Hub cannot be reached.
    """
    name = str(name_or_dir)
    if name in DEFAULT_TARGET_NAMES:
        return default_target()
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    return _from_hub(name, [*(["*.safetensors"] if weights else []), "*.json", "*.jinja"])


def read_spec(directory: Path) -> TargetSpec:
    """What config.json describes; ValueError names the file, the field and what is supported."""
    return _family_and_spec(directory)[1]


def load_target(
    directory: Path,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    mesh: Mesh | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Target:
    """The target of a directory, cast to `dtype` tensor by tensor; no random weights are made on the way.

    With `mesh`, parameters go straight to their device shards. `say` hears what of the checkpoint is left out.
    """
    family, spec = _family_and_spec(directory)
    abstract = nnx.eval_shape(lambda: Target(spec, rngs=nnx.Rngs(0), dtype=dtype))
    table, files = family.table(spec), TensorFiles(directory)
    target = fill(abstract, table, files, place=placing(mesh, abstract))
    if skipped := skipped_tensors(table, files):
        parts = ", ".join(f"{prefix.rstrip('.')} ({count} tensors)" for prefix, count in skipped.items())
        say(f"{directory}: left out, as only text is served: {parts}")
    return target


def load_vocabulary(directory: Path, dtype: jax.typing.DTypeLike = jnp.float32) -> Vocabulary:
    """The embedding and LM head of a directory's target alone, cast to `dtype`."""
    family, spec = _family_and_spec(directory)
    files = TensorFiles(directory)
    abstract = nnx.eval_shape(lambda: _OnlyVocabulary(spec.vocabulary, dtype))
    return fill(abstract, family.table(spec), files, elsewhere=files.names).vocabulary


class _OnlyVocabulary(nnx.Module):
    """A target without its layers, so that paths are a target's."""

    def __init__(self, spec: VocabularySpec, dtype: jax.typing.DTypeLike):
        self.vocabulary = Vocabulary(spec, rngs=nnx.Rngs(0), dtype=dtype)


def stop_ids(directory: Path) -> frozenset[int]:
    """Token ids that end an answer, from generation_config.json or else config.json; empty when neither says."""
    for name in ("generation_config.json", "config.json"):
        if (directory / name).exists():
            fields = read_json(directory / name)
            ids = fields.get("eos_token_id", fields.get("text_config", {}).get("eos_token_id"))
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def _family_and_spec(directory: Path) -> tuple[Family, TargetSpec]:
    file = directory / "config.json"
    config = read_json(file)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in FAMILIES:
        raise ValueError(f"{file}: architectures {architectures} is not supported; supported: {', '.join(FAMILIES)}")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ValueError(
            f"{file}: quantization_config {method!r} is not supported; supported: F32, F16 or BF16 weights"
        )
    family = FAMILIES[architectures[0]]
    try:
        return family, family.spec(config)
    except KeyError as error:
        raise ValueError(f"{file}: the field {error.args[0]} is missing") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{directory}: {error}") from error


def _from_hub(name: str, patterns: list[str]) -> Path:
    """The files of a repository that have these names; what is already in the Hub's cache is not fetched again."""
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except HFValidationError:
        raise FileNotFoundError(f"{name}: there is no such directory, and it is no Hub name (owner/name)") from None
    except GatedRepoError:
        raise PermissionError(
            f"{name}: its owner asks for consent; accept the terms on its Hub page, then log in with `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise FileNotFoundError(
            f"{name}: there is no such directory and no such public model on the Hub "
            "(a private one needs `hf auth login`)"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, ConnectionError) as error:
        reason = str(error).splitlines()[0]
        raise ConnectionError(
            f"{name}: there is no such directory, and the Hub cannot be reached ({reason}): check the network and "
            "HF_HUB_OFFLINE, or give a local directory"
        ) from None
