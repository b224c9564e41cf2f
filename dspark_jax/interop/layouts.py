"""Which project wrote a drafter's config.json, told from its fields: the only place where that is decided."""

from collections.abc import Callable
from dataclasses import dataclass

from dspark_jax.interop.deepseek_v4 import deepseek_v4_config, deepseek_v4_tensors
from dspark_jax.interop.deepspec_config import DrafterConfig, config_of
from dspark_jax.interop.dflash_config import dflash_config
from dspark_jax.interop.layer_fields import Fields
from dspark_jax.interop.speculators_config import speculators_config, speculators_tensors
from dspark_jax.interop.tensor_files import TensorFiles, TensorSource
from dspark_jax.targets.model import TargetSpec


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a reader may ask beside the fields: the target, where it is known, and the names of the tensors."""

    fields: Fields
    target: TargetSpec | None
    has_tensor: Callable[[str], bool]

    def target_layers(self) -> int:
        """How many layers the target has, from the file or else from the target itself."""
        if (stored := self.fields.get("num_target_layers")) is not None:
            return stored
        if self.target is None:
            raise ValueError("num_target_layers is missing and this layout has no such field: give the target")
        return len(self.target.layers)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One project's way to write a drafter."""

    name: str
    recognise: Callable[[Fields], bool]
    config: Callable[[Checkpoint], DrafterConfig]
    tensors: Callable[[TensorFiles, Fields], TensorSource] = lambda files, fields: files


LAYOUTS = (
    Layout(
        name="speculators",
        recognise=lambda fields: "speculators_model_type" in fields,
        config=lambda given: speculators_config(given.fields, given.target_layers),
        tensors=speculators_tensors,
    ),
    Layout(
        name="deepseek_v4",
        recognise=lambda fields: any(field.startswith("dspark_") for field in fields),
        config=lambda given: deepseek_v4_config(given.fields, given.target_layers, given.has_tensor),
        tensors=deepseek_v4_tensors,
    ),
    # SpecForge and z-lab.
    Layout(
        name="dflash",
        recognise=lambda fields: "dflash_config" in fields,
        config=lambda given: dflash_config(given.fields, given.target_layers, given.has_tensor),
    ),
    Layout(name="deepspec", recognise=lambda fields: True, config=lambda given: config_of(given.fields)),
)


def layout_of(fields: Fields) -> Layout:
    """The layout of a config.json; what nobody else claims is read as DeepSpec's, which names what it misses."""
    if "dflash_architecture_config" in fields:
        raise ValueError(
            "dflash_architecture_config (ModelOpt) is not supported; supported: the layouts of DeepSpec, Speculators, "
            "SpecForge and z-lab"
        )
    return next(layout for layout in LAYOUTS if layout.recognise(fields))
