"""Drafters written for the speculators package: config.json and model.safetensors of one directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from dspark_jax.drafters.eagle3 import Eagle3
from dspark_jax.drafters.mtp import Mtp
from dspark_jax.interop.deepspec import drafter_tensors, write_drafter
from dspark_jax.interop.drafter_kinds import FileDrafter
from dspark_jax.interop.speculators_chain import mtp_tensors
from dspark_jax.interop.speculators_config import speculators_fields
from dspark_jax.nn.layers import Vocabulary


def save_speculators(
    directory: Path,
    drafter: FileDrafter,
    *,
    verifier: str,
    verifier_architectures: Sequence[str],
    target_config: Mapping[str, Any] | None = None,
    vocabulary: Vocabulary | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> None:
    """Writes a drafter over the whole vocabulary; embedding and LM head are the verifier's.

    `verifier`: the target's name as the package will look it up, with the `architectures` of its config.json, whose
    other fields are `target_config`. `vocabulary`: the target's, of which the package's Eagle3 files (and no others)
    hold copies: ValueError when they cannot be made. `dtype`: None keeps it.
    """
    fields = speculators_fields(
        drafter.config,
        verifier=verifier,
        verifier_architectures=verifier_architectures,
        target=target_config or {},
    )
    if not isinstance(drafter, Eagle3):
        vocabulary = None
    elif vocabulary is None:
        raise ValueError("speculators: an Eagle3 file holds the target's embedding and LM head: give the target")
    tensors = drafter_tensors(drafter, vocabulary=vocabulary, dtype=dtype)
    write_drafter(directory, fields, mtp_tensors(tensors) if isinstance(drafter, Mtp) else tensors)
