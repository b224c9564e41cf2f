"""Memory and time of the vocabulary loss with its gradient, against anchors x block x vocabulary, ours and plain.

python benchmarks/loss_memory.py --out docs/figures/loss_memory

Temporary bytes are those of the compiled program, which needs no memory to be compiled. With --time programs are also
run, where they fit. Writes OUT.json and OUT.png.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
from flax import nnx
from jax import lax

from dspark_jax.drafters.vocabulary_loss import Positions, Trained, compare_laws, plainly_compare_laws
from dspark_jax.nn.layers import Vocabulary, VocabularySpec
from dspark_jax.ops.losses import Compared

WIDTH, RANK, BLOCK, CHUNK = 2560, 256, 7, 64
VOCABULARIES, ANCHORS = (49152, 151936, 262144), (64, 128, 256, 512)


def recomputed(vocabulary: Vocabulary, trained: Trained, positions: Positions) -> Compared:
    """JAX's own gradient over the same chunks, each under jax.checkpoint."""
    compute = jax.checkpoint(partial(plainly_compare_laws, vocabulary, trained))
    length = positions.hidden_BND.shape[1]

    def chunked(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]).swapaxes(0, 1)

    compared = lax.map(compute, jax.tree.map(chunked, positions))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], length), compared)


WAYS: dict[str, Callable[..., Compared]] = {
    "plain": plainly_compare_laws,
    "checkpoint": recomputed,
    "ours": partial(compare_laws, chunk=CHUNK),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures/loss_memory"))
    parser.add_argument("--time", action="store_true", help="run the programs too")
    flags = parser.parse_args()
    rows = [measure(way, vocab, anchors, flags.time) for vocab in VOCABULARIES for anchors in ANCHORS for way in WAYS]
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    device = jax.devices()[0].device_kind
    facts = {"device": device, "jax": jax.__version__, "width": WIDTH, "rank": RANK, "block": BLOCK, "chunk": CHUNK}
    flags.out.with_suffix(".json").write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    draw(rows, flags.out.with_suffix(".png"), device)


def measure(way: str, vocab: int, anchors: int, run: bool) -> dict[str, Any]:
    """One row of the table: a sequence of `anchors` blocks, bfloat16 weights."""
    shapes = arguments(vocab, anchors * BLOCK)
    compiled = jax.jit(partial(gradient, WAYS[way])).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    row = {"way": way, "vocabulary": vocab, "anchors": anchors, "temporary_bytes": memory.temp_size_in_bytes}
    if run:
        row["milliseconds"] = round(1e3 * seconds(compiled, shapes), 3)
    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


def arguments(vocab: int, length: int) -> tuple[Any, ...]:
    spec = VocabularySpec(size=vocab, d_model=WIDTH, tied=False)
    states = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    return (
        nnx.eval_shape(lambda: Vocabulary(spec, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)),
        states((vocab, RANK)),
        states((1, length, WIDTH)),
        states((1, length, RANK)),
        states((1, length, WIDTH)),
        jax.ShapeDtypeStruct((1, length), jnp.int32),
    )


def gradient(compute: Callable[..., Compared], vocabulary, w2_VR, hidden_BND, latent_BNR, aligned_BND, labels_BN):
    """The published mixture of cross-entropy and L1, and its gradient to all that is trained."""

    def loss(w2_VR, hidden_BND, latent_BNR):
        positions = Positions(
            hidden_BND=hidden_BND, latent_BNR=latent_BNR, aligned_BND=aligned_BND, labels_BN=labels_BN
        )
        compared = compute(vocabulary, Trained(w2_VR=w2_VR, draft_bias_V=None), positions)
        return jnp.mean(0.1 * compared.ce + 0.9 * compared.l1)

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(w2_VR, hidden_BND, latent_BNR)


def seconds(compiled: Callable[..., Any], shapes: tuple[Any, ...]) -> float:
    """The least of five runs."""
    keys = iter(jax.random.split(jax.random.key(0), 16))

    def filled(leaf: Any) -> jax.Array:
        if leaf.dtype == jnp.int32:
            return jnp.zeros(leaf.shape, jnp.int32)
        return (jax.random.normal(next(keys), leaf.shape, jnp.bfloat16) * leaf.shape[-1] ** -0.25).astype(leaf.dtype)

    inputs = jax.tree.map(filled, shapes)
    jax.block_until_ready(compiled(*inputs))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        times.append(time.perf_counter() - began)
    return min(times)


def draw(rows: list[dict[str, Any]], path: Path, device: str) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for way, marker in zip(WAYS, "osv", strict=True):
        ours = [row for row in rows if row["way"] == way]
        sizes = [row["anchors"] * BLOCK * row["vocabulary"] for row in ours]
        axes.scatter(sizes, [row["temporary_bytes"] / 2**30 for row in ours], marker=marker, label=way)
    axes.set(xscale="log", yscale="log", xlabel="anchors x block x vocabulary", ylabel="temporary memory, GiB")
    axes.set_title(f"Vocabulary loss with gradient, one row, {device}")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
