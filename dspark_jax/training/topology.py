"""Named machines, for planning a run on one that is not here."""

import math
import re
from dataclasses import dataclass

from jax.sharding import AbstractMesh, AxisType

from dspark_jax.core.mesh import MESH_AXES


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Of each device as JAX counts devices, of which a chip has `devices`: hbm in bytes, bandwidth of it and of all its
    links to other devices (one way) in bytes a second, flops of dense bfloat16 products a second."""

    hbm: float
    bandwidth: float
    links: float
    flops: float
    devices: int = 1

    def seconds(self, flops: float, moved: float) -> float:
        """The least time for so many operations and bytes, at the peaks of both (roofline)."""
        return max(flops / self.flops, moved / self.bandwidth)


# The vendors' figures, read as decimal gigabytes: cloud.google.com/tpu/docs/v4, v5e, v5p, v6e and tpu7x (whose chips
# have two devices), NVIDIA's data sheet of the H200.
ACCELERATORS = {
    "v4": Accelerator(hbm=32e9, bandwidth=1228e9, links=300e9, flops=275e12),
    "v5e": Accelerator(hbm=16e9, bandwidth=819e9, links=200e9, flops=197e12),
    "v5p": Accelerator(hbm=95e9, bandwidth=2765e9, links=600e9, flops=459e12),
    "v6e": Accelerator(hbm=32e9, bandwidth=1638e9, links=400e9, flops=918e12),
    "tpu7x": Accelerator(hbm=96e9, bandwidth=3690e9, links=300e9, flops=1153.5e12, devices=2),
    "h200": Accelerator(hbm=141e9, bandwidth=4800e9, links=450e9, flops=989e12),
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """`devices` of one kind, each with `hbm` bytes."""

    name: str
    devices: int
    hbm: float


# From small to large: where a run is tried when no machine is named.
SLICES = ("v5e:1", "v5e:2x4", "v5e:4x8", "v5e:8x8", "v5e:16x16", "v6e:16x16", "v5p:4x8x8", "v5p:8x8x8")


def parse_topology(text: str) -> Topology:
    """`kind:chips`, chips as a grid or a number: v5e:8x8, v5p:4x4x4, h200:8. ValueError names the known kinds."""
    kind, _, grid = text.partition(":")
    if kind not in ACCELERATORS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", grid):
        raise ValueError(
            f"--topology takes kind:chips, for example v5e:8x8 or h200:8, not {text!r}; "
            f"known kinds are {', '.join(ACCELERATORS)}"
        )
    accelerator = ACCELERATORS[kind]
    chips = math.prod(map(int, grid.split("x")))
    return Topology(name=text, devices=chips * accelerator.devices, hbm=accelerator.hbm)


def mesh_of(topology: Topology, *, fsdp: int, tensor: int) -> AbstractMesh:
    """The mesh a run has there. ValueError when fsdp x tensor does not divide the devices."""
    if topology.devices % (fsdp * tensor):
        raise ValueError(
            f"fsdp={fsdp} x tensor={tensor} does not divide the {topology.devices} devices of {topology.name}; "
            "choose factors whose product does"
        )
    shape = (topology.devices // (fsdp * tensor), fsdp, tensor)
    return AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * 3)
