"""Host memory while a target streams from its shards onto a mesh, beside what the devices hold.

    python benchmarks/streaming.py [--gigabytes 4] [--devices 4] [--json streaming.json]

The checkpoint is Qwen3-4B's shape cut to so many layers, made up in a temporary folder, bfloat16 in shards of at most
1 GB. It loads in a process of its own onto CPU devices, whose finished arrays also lie in host memory and are
subtracted. What remains is counted twice: anonymous memory, which is what loading allocates (a buffer that is being
filled for a device included), and mapped pages of the files, which the system may drop at any time. Together they
should stay under the largest shard plus the largest tensor.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from dspark_jax.core.mesh import make_mesh
from dspark_jax.interop.huggingface import load_target

SHARD = 1e9
WIDTH, FFW, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2560, 9728, 32, 8, 128, 151936
LAYER = {
    "input_layernorm": (WIDTH,),
    "post_attention_layernorm": (WIDTH,),
    "self_attn.q_norm": (HEAD_DIM,),
    "self_attn.k_norm": (HEAD_DIM,),
    "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
    "mlp.gate_proj": (FFW, WIDTH),
    "mlp.up_proj": (FFW, WIDTH),
    "mlp.down_proj": (WIDTH, FFW),
}
ENDS = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}


def main() -> int:
    args = _parser().parse_args()
    if args.load:
        print(json.dumps(_load(args.load, args.devices)))
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="streaming-") as name:
        sizes = _write(Path(name), args.gigabytes * 1e9)
        child = [sys.executable, __file__, "--load", name, "--devices", str(args.devices)]
        done = subprocess.run(child, stdout=subprocess.PIPE, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True)
    result = sizes | json.loads(done.stdout)
    result["bound"] = result["largest shard"] + result["largest tensor"]
    print(f"| {args.devices} devices | GB |\n| --- | ---: |")
    for label, size in result.items():
        print(f"| {label} | {size / 1e9:.3f} |")
    if args.json:
        args.json.write_text(json.dumps({"devices": args.devices, "bytes": result}, indent=2) + "\n")
    return 0 if result["peak of both together"] <= result["bound"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Host memory while a target streams from its shards.")
    parser.add_argument("--gigabytes", type=float, default=4, help="size of the checkpoint (%(default)s)")
    parser.add_argument("--devices", type=int, default=4, help="CPU devices that share each parameter (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where the checkpoint lives meanwhile (the temporary folder)")
    parser.add_argument("--json", type=Path, help="write the sizes there, in bytes")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    return parser


def _write(folder: Path, size: float) -> dict[str, int]:
    """The checkpoint, one shard in memory at a time."""
    layer, ends = (2 * sum(map(math.prod, shapes.values())) for shapes in (LAYER, ENDS))
    layers = max(1, round((size - ends) / layer))
    shapes = ENDS | {f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in LAYER.items()}
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if _bytes(shards[-1]) + 2 * math.prod(shape) > SHARD:
            shards.append({})
        shards[-1][name] = shape
    weight_map = {}
    noise = np.random.default_rng(0).normal(0, 0.02, 2**20).astype(ml_dtypes.bfloat16)
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: np.resize(noise, shape) for name, shape in shard.items()}, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(_config(layers)))
    return {
        "checkpoint": _bytes(shapes),
        "largest shard": max(map(_bytes, shards)),
        "largest tensor": max(2 * math.prod(shape) for shape in shapes.values()),
    }


def _bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return 2 * sum(map(math.prod, shapes.values()))


def _config(layers: int) -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": WIDTH,
        "intermediate_size": FFW,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }


def _load(folder: Path, devices: int) -> dict[str, int]:
    """Peaks over the load, in bytes, of what this process holds beyond its device arrays and beyond its start."""
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = make_mesh(fsdp=devices)
    with _watch(folder) as peaks:
        target = load_target(folder, "bfloat16", mesh=mesh)
    return {"device arrays": sum(map(_held, jax.tree.leaves(target)))} | peaks


@contextmanager
def _watch(folder: Path) -> Generator[dict[str, int]]:
    start, over = _anonymous(), threading.Event()
    labels = ("peak of anonymous memory beyond device arrays", "peak of mapped file pages", "peak of both together")
    peaks = dict.fromkeys(labels, 0)

    def sample() -> None:
        while not over.is_set():
            # Arrays first: one that appears in between counts as host memory, not the other way round.
            arrays = sum(map(_held, jax.live_arrays()))
            anonymous, mapped = _anonymous() - start - arrays, _mapped(folder)
            found = (anonymous, mapped, anonymous + mapped)
            for label, size in zip(labels, found, strict=True):
                peaks[label] = max(peaks[label], size)
            time.sleep(0.002)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def _held(array: jax.Array) -> int:
    """Bytes on all devices."""
    shard = math.prod(array.sharding.shard_shape(array.shape))
    return shard * array.dtype.itemsize * len(array.sharding.device_set)


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def _mapped(folder: Path) -> int:
    """Resident pages of the folder's files."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field, *rest = line.split()
        if not field.endswith(":"):
            ours = str(folder) in line
        elif ours and field == "Rss:":
            total += int(rest[0]) * 1024
    return total


if __name__ == "__main__":
    sys.exit(main())
