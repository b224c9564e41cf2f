"""The drafter that a finished run leaves: its layouts, and the record that says the run is finished."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from dspark_jax.drafters.eagle3 import Eagle3
from dspark_jax.interop.deepspec import save_drafter
from dspark_jax.interop.huggingface import DEFAULT_TARGET_NAMES, load_vocabulary
from dspark_jax.interop.speculators import save_speculators
from dspark_jax.interop.speculators_config import speculators_fields
from dspark_jax.interop.tensor_files import read_json
from dspark_jax.training.draft import Drafter, DrafterConfig

Layout = Literal["deepspec", "speculators"]
RECORD = "metrics.json"


def require_exportable(layouts: Sequence[Layout], drafter: DrafterConfig, target: str, directory: Path) -> None:
    """ValueError, before anything is trained, when a layout cannot hold such a drafter."""
    if "speculators" in layouts:
        fields = read_json(directory / "config.json")
        try:
            speculators_fields(drafter, target=fields, **_verifier(target, fields))
        except ValueError as error:
            raise ValueError(f"export: this drafter cannot be written for speculators: {error}") from error


def export_drafter(
    run_dir: Path,
    drafter: Drafter,
    layouts: Sequence[Layout],
    *,
    target: str,
    directory: Path,
    record: Mapping[str, Any],
) -> None:
    """Writes `drafter` as serving reads it, and `drafter-speculators` where that is asked for, in bfloat16.

    The record comes last: where it is, the run is finished. `directory`: the one that holds the target.
    """
    fields = read_json(directory / "config.json")
    if "speculators" in layouts:
        save_speculators(
            run_dir / "drafter-speculators",
            drafter,
            target_config=fields,
            vocabulary=load_vocabulary(directory, jnp.bfloat16) if isinstance(drafter, Eagle3) else None,
            dtype=jnp.bfloat16,
            **_verifier(target, fields),
        )
    folder = run_dir / "drafter"
    save_drafter(folder, drafter, extra_config=fields, dtype=jnp.bfloat16)
    partial = folder / f".{RECORD}"
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / RECORD)


def _verifier(target: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """How a file for speculators names the target: as others know it."""
    name = DEFAULT_TARGET_NAMES[-1] if target in DEFAULT_TARGET_NAMES else target
    return {"verifier": name, "verifier_architectures": fields.get("architectures") or []}
