"""Drafters written for the speculators package: config.json and model.safetensors of one directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from dspark_jax.interop.deepspec import drafter_tensors, write_drafter
from dspark_jax.interop.drafter_kinds import FileDrafter
from dspark_jax.interop.speculators_config import speculators_fields


def save_speculators(
    directory: Path,
    drafter: FileDrafter,
    *,
    verifier: str,
    verifier_architectures: Sequence[str],
    target_config: Mapping[str, Any] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> None:
    """Writes a drafter over the whole vocabulary; embedding and LM head are the verifier's and not in the file.

    `verifier`: the target's name as the package will look it up, with the `architectures` of its config.json, whose
    other fields are `target_config`. `dtype`: None keeps it.
    """
    fields = speculators_fields(
        drafter.config,
        verifier=verifier,
        verifier_architectures=verifier_architectures,
        target=target_config or {},
    )
    write_drafter(directory, fields, drafter_tensors(drafter, dtype=dtype))
