"""What is known about a target before anything is downloaded."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from dspark_jax.interop.huggingface import DEFAULT_TARGET_NAMES, read_spec
from dspark_jax.interop.smollm2 import PACKAGE
from dspark_jax.targets.model import TargetSpec

_PRETRAINED = Path(str(files("dspark_jax") / "pretrained"))


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """A target's shape, and where its weights would come from: None when they are on this machine."""

    spec: TargetSpec
    source: str | None


def shipped_target(name: str) -> Path | None:
    """The directory of a target that ships with the package."""
    folder = _PRETRAINED / name
    # The default target does not: what ships under its name is its drafter.
    ships = name and name not in DEFAULT_TARGET_NAMES and (folder / "model.safetensors").is_file()
    return folder if ships else None


def target_facts(name: str) -> TargetFacts:
    """From the target's own config.json where it is here, else from a copy of it that ships with the package.

    ValueError when there is neither: a shape is never guessed.
    """
    local = shipped_target(name) or Path(name).expanduser()
    if (local / "config.json").is_file():
        return TargetFacts(spec=read_spec(local), source=None)
    if name in DEFAULT_TARGET_NAMES:
        name, source = DEFAULT_TARGET_NAMES[-1], f"the package {PACKAGE} from the package index (93 MB)"
    else:
        source = f"{name} from the Hugging Face Hub: weights, tokenizer, chat template and config"
    copy = _PRETRAINED / "hub" / name
    if not (copy / "config.json").is_file():
        raise ValueError(
            f"the shape of target {name} is not known without downloading it (known are {', '.join(_known())}): "
            "give a local directory that holds its config.json"
        )
    return TargetFacts(spec=read_spec(copy), source=source)


def _known() -> list[str]:
    hub = _PRETRAINED / "hub"
    return sorted(str(file.parent.relative_to(hub)) for file in hub.glob("*/*/config.json"))
