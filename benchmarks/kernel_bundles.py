"""Static cost of the TPU kernels over tile sizes: the bundles of one step, from libtpu's own dump; no TPU is needed.

A bundle is one instruction word, so a step that never waits takes as many cycles. Prints a table, and JSON with --out.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from dspark_jax.training.compiler import ENVIRONMENT, require_libtpu

SLICES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}
TILES = {"block": (128, 256, 512, 1024), "training": (128, 256, 512)}
KERNELS = {
    "block": ("block_attention",),
    "training": ("training_attention", "training_attention_dq", "training_attention_dkv"),
}

# The shapes of Qwen3-4B's drafter: 16 rows of 4096 positions; in training, 512 anchors in 4096 tokens.
PROGRAM = """
import sys
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from dspark_jax.kernels.block_attention import block_attention
from dspark_jax.kernels.training_attention import training_attention

kernel, tile, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
device = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0])
shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype, sharding=device)
if kernel == "block":
    cache, own = shape(16, 8, 4096, 128), shape(16, 8, 7, 128)
    arguments = shape(16, 7, 32, 128), cache, cache, own, own, shape(16, dtype=jnp.int32)
    run = partial(block_attention, scale=0.1, tile=tile)
else:
    context, own = shape(1, 8, 4096, 128), shape(1, 8, 3584, 128)
    places = (shape(1, 512, dtype=jnp.int32),) * 2
    arguments = (shape(1, 3584, 32, 128), context, context, own, own), places
    loss = lambda x, places: jnp.sum(training_attention(*x, *places, scale=0.1, tile=tile).astype(jnp.float32) ** 2)
    run = jax.grad(loss)
jax.jit(run).lower(*arguments).compile()
"""


def step_bundles(text: str) -> int:
    """Bundles of the longest region that a predicate may skip: a step over context."""
    skips = [int(at, 16) for at in re.findall(r"^ *(0x[0-9a-f]+) +(?:LB|PF):", text, re.MULTILINE)]
    return max(end - start for start, end in pairwise(skips))


def measure(kernel: str, tile: int, kind: str) -> list[dict[str, str | int | float]]:
    """A row a kernel that the program holds; none for tiles that do not fit into VMEM."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = os.environ | ENVIRONMENT | {"LIBTPU_INIT_ARGS": flags}
        command = [sys.executable, "-c", PROGRAM, kernel, str(tile), SLICES[kind]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{kernel}, tile {tile}, {kind}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return []
        rows = []
        for name in KERNELS[kernel]:
            ours = re.compile(rf"\d+-(?:\w+_)?{name}_*\.\d+-\d+-final_bundles\.txt")
            (path,) = (path for path in Path(folder).iterdir() if ours.fullmatch(path.name))
            bundles = step_bundles(path.read_text())
            rows.append({"kind": kind, "kernel": name, "tile": tile, "bundles": bundles, "a position": bundles / tile})
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=SLICES, default="v5e", help="generation of TPU to compile for")
    parser.add_argument("--out", type=Path, help="where the rows go as JSON")
    args = parser.parse_args()
    try:
        require_libtpu()
    except ValueError:
        parser.error("libtpu is needed: pip install 'jax[tpu]'")
    rows = [row for kernel, tiles in TILES.items() for tile in tiles for row in measure(kernel, tile, args.kind)]
    print(f"{'kernel':<24}{'tile':>6}{'bundles':>9}{'a position':>12}")
    for row in sorted(rows, key=lambda row: str(row["kernel"])):
        print(f"{row['kernel']:<24}{row['tile']:>6}{row['bundles']:>9}{row['a position']:>12.2f}")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
