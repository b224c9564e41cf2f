"""Several processes training one drafter: they run the same program, and the first one speaks for all."""

import argparse
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.core.mesh import make_mesh
from dspark_jax.data.pipeline import Host

Tree = TypeVar("Tree")
# Bytes of what a process says to the others.
_SAID = 1024


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What `join` reads."""
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where several processes meet (not on a TPU slice)")
    parser.add_argument("--processes", type=int, metavar="N", help="how many there are")
    parser.add_argument("--process", type=int, metavar="I", help="which of them this is, from 0")


def join(flags: argparse.Namespace) -> None:
    """Meet the other processes, where there are any: named by flags, or a TPU slice of several hosts.

    ValueError when the flags do not belong together. Must come before anything touches a device.
    """
    coordinator, processes, process = flags.coordinator, flags.processes, flags.process
    if (coordinator, processes, process) != (None, None, None):
        if coordinator is None or processes is None or process is None:
            raise ValueError("--coordinator HOST:PORT, --processes N and --process I belong together; give all three")
        if not 0 <= process < processes:
            raise ValueError(f"--process is a number from 0 to {processes - 1}, not {process}")
        jax.distributed.initialize(coordinator, processes, process)
    elif len(os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1:
        jax.distributed.initialize()


def here() -> Host:
    """This process among all."""
    return Host(index=jax.process_index(), count=jax.process_count())


def alone() -> bool:
    """Whether there is no other process."""
    return jax.process_count() == 1


def first() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def meet(what: str) -> None:
    """Wait until every process is here."""
    if not alone():
        multihost_utils.sync_global_devices(what)


def in_turn(make: Callable[[], Tree]) -> Tree:
    """The first process makes, then the others do: what it left on a shared disk they find. As in `all_succeed`."""
    made = all_succeed(lambda: make() if first() else None)
    return all_succeed(lambda: make() if made is None else made)


def everyone(text: str) -> list[str]:
    """What each process says, in their order, cut where it is long."""
    if alone():
        return [text]
    said = np.frombuffer(text.encode()[:_SAID].ljust(_SAID, b"\0"), np.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in multihost_utils.process_allgather(said)]


def all_succeed(make: Callable[[], Tree]) -> Tree:
    """What `make` returns here, if it does so on every process.

    ValueError on all of them when it raises ValueError or OSError on one: nobody waits for a process that has ended.
    """
    if alone():
        return make()
    made, complaint = None, ""
    try:
        made = make()
    except (ValueError, OSError) as error:
        complaint = str(error) or type(error).__name__
    for process, said in enumerate(everyone(complaint)):
        if said:
            raise ValueError(f"process {process}: {said}")
    return made  # pyrefly: ignore[bad-return]


def sharing(folder: Path) -> tuple[int, ...]:
    """The processes that find in `folder` what this one writes there, itself among them: those of its host, or all."""
    if alone():
        return (0,)
    # Of this call alone: a killed run may have left its own.
    mark = f".{most(secrets.randbits(30))}-"
    all_succeed((folder / f"{mark}{here().index}").touch)
    # By name: a network file system may list a folder as it was.
    found = tuple(process for process in range(here().count) if (folder / f"{mark}{process}").exists())
    meet("seen")
    (folder / f"{mark}{here().index}").unlink()
    return found


def anywhere(flag: bool) -> bool:
    """Whether any process says so. All must ask at the same step."""
    if alone():
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def most(value: int) -> int:
    """The largest that any process has."""
    return value if alone() else int(np.max(multihost_utils.process_allgather(np.asarray(value, np.int32))))


def require_alike(what: str, value: int) -> None:
    """ValueError on every process unless all have the same value: those that differ would wait for each other."""
    if alone():
        return
    values = np.asarray(multihost_utils.process_allgather(np.asarray(value % 2**31, np.int32)))
    if len(set(values.tolist())) > 1:
        raise ValueError(
            f"{what} differs between the {len(values)} processes; give all of them the same files and flags"
        )


def agreed(value: float) -> float:
    """What the first process says: each has measured for itself, and all must decide alike."""
    return value if alone() else float(multihost_utils.broadcast_one_to_all(np.float32(value)))


def on_devices(batch: Tree, sharding: jax.sharding.Sharding) -> Tree:
    """A global batch of which this process holds its share."""
    if alone():
        return jax.device_put(batch, sharding)
    return jax.tree.map(lambda part: jax.make_array_from_process_local_data(sharding, np.asarray(part)), batch)


def own_rows(array: jax.Array | np.ndarray) -> np.ndarray:
    """The share of a global batch that this process gave to `on_devices`."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return np.asarray(array)
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def gathered(tree: Tree, mesh: Mesh | None = None) -> Tree:
    """Every array whole: on the host, or on each device of a mesh of this process's own."""
    if alone():
        return tree
    whole: Any = multihost_utils.process_allgather(tree, tiled=True)
    return whole if mesh is None else jax.device_put(whole, NamedSharding(mesh, PartitionSpec()))


def own_mesh() -> Mesh:
    """The devices of this process."""
    return make_mesh(fsdp=jax.local_device_count(), devices=jax.local_devices())
