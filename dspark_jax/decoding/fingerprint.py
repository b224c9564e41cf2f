"""What a step curve belongs to: another model, drafter or machine has other times."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from dspark_jax.core.arrays import DType
from dspark_jax.decoding.json_file import shortened
from dspark_jax.decoding.rejection import Rule
from dspark_jax.drafters.base import Drafter
from dspark_jax.targets.model import Target, TargetSpec

_DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Everything beside its shape that a round's time depends on."""

    target: str
    drafter: str
    dtype: str
    block: int
    rule: str
    mesh: str
    device: str
    devices: int
    jax: str

    @classmethod
    def of(cls, target: Target, drafter: Drafter, *, dtype: DType, rule: Rule) -> "Fingerprint":
        """Of rounds where these parameters lie; shapes that carry a sharding will do as well."""
        return cls.expected(target.spec, drafter, dtype=dtype, rule=rule, where=jax.tree.leaves(target)[0].sharding)

    @classmethod
    def expected(
        cls, spec: TargetSpec, drafter: Drafter, *, dtype: DType, rule: Rule, where: Sharding | None = None
    ) -> "Fingerprint":
        """Of a target that is not loaded yet, and of a drafter's shapes; by default where JAX puts arrays."""
        where = jnp.zeros(()).sharding if where is None else where
        mesh = where.mesh.shape if isinstance(where, NamedSharding) else {}
        return cls(
            target=f"{spec.family} {_digest(repr(spec))}",
            # Weights have no part in it: two drafters of one shape take the same time.
            drafter=f"{type(drafter).__name__} {_digest(repr(getattr(drafter, 'config', None)))}",
            dtype=jnp.dtype(dtype).name,
            block=drafter.block_size,
            rule=rule.value,
            mesh=", ".join(f"{axis}={size}" for axis, size in mesh.items()) or "1",
            device=_kind(next(iter(where.device_set))),
            devices=len(where.device_set),
            jax=jax.__version__,
        )

    @classmethod
    def from_json(cls, value: Any) -> "Fingerprint":
        """ValueError, TypeError for anything but what asdict gives."""
        if not isinstance(value, Mapping) or set(value) != {field.name for field in fields(cls)}:
            raise ValueError("its fingerprint has other fields")
        if any(type(value[field.name]) is not field.type for field in fields(cls)):
            raise ValueError("its fingerprint has a field of another type")
        return cls(**value)

    @property
    def digest(self) -> str:
        """A name for files."""
        return _digest(json.dumps(asdict(self), sort_keys=True))

    def differs(self, other: "Fingerprint") -> str:
        """The first field that differs, with both values, `other`'s second; empty where none does."""
        for name, mine in asdict(self).items():
            if (theirs := getattr(other, name)) != mine:
                return f"its {name} is {shortened(str(mine))}, and here it is {theirs}"
        return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _kind(device: jax.Device) -> str:
    # JAX calls every processor "cpu".
    return f"{os.cpu_count()} cores of {_processor()}" if device.platform == "cpu" else device.device_kind


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
