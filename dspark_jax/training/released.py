"""The released recipes (arXiv 2607.05147 and deepseek-ai/DeepSpec), of which TrainConfig's defaults are the rest."""

from dataclasses import dataclass

from dspark_jax.drafters.heads import MarkovSpec, VanillaMarkov
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.draft import DFlashShape, DrafterShape, DSparkShape, Eagle3Shape, MtpShape
from dspark_jax.training.sources import ChatFiles


@dataclass(frozen=True, kw_only=True)
class ReleasedTarget:
    """A target that drafters were released for.

    name: on the Hub. data: conversations whose answers the target gave itself. fsdp: ways its parameters are split,
    enough for 16 GB devices.
    """

    name: str
    data: str
    mask_token_id: int
    tapped_layers: tuple[int, ...]
    fsdp: int


QWEN3_4B = ReleasedTarget(
    name="Qwen/Qwen3-4B",
    data="data/qwen3_4b.jsonl",
    mask_token_id=151669,
    tapped_layers=(1, 9, 17, 25, 33),
    fsdp=8,
)
QWEN3_8B = ReleasedTarget(
    name="Qwen/Qwen3-8B",
    data="data/qwen3_8b.jsonl",
    mask_token_id=151669,
    tapped_layers=(1, 9, 17, 25, 33),
    fsdp=8,
)
QWEN3_14B = ReleasedTarget(
    name="Qwen/Qwen3-14B",
    data="data/qwen3_14b.jsonl",
    mask_token_id=151669,
    tapped_layers=(1, 10, 19, 28, 37),
    fsdp=16,
)
GEMMA4_12B = ReleasedTarget(
    name="google/gemma-4-12B-it",
    data="data/gemma4_12b.jsonl",
    mask_token_id=4,
    tapped_layers=(5, 17, 29, 41, 46),
    fsdp=16,
)


def dspark(target: ReleasedTarget, markov_head: MarkovSpec | None = None) -> TrainConfig:
    """DSpark, with the vanilla head unless another is given."""
    return _run(
        target,
        DSparkShape(
            mask_token_id=target.mask_token_id,
            tapped_layers=target.tapped_layers,
            markov_head=markov_head or VanillaMarkov(),
        ),
    )


def dflash(target: ReleasedTarget) -> TrainConfig:
    return _run(target, DFlashShape(mask_token_id=target.mask_token_id, tapped_layers=target.tapped_layers))


def eagle3(target: ReleasedTarget) -> TrainConfig:
    return _run(target, Eagle3Shape(tapped_layers=target.tapped_layers))


def mtp(target: ReleasedTarget) -> TrainConfig:
    return _run(target, MtpShape())


def _run(target: ReleasedTarget, drafter: DrafterShape) -> TrainConfig:
    # One row at a time on each of 64 devices: so the compiled steps of qwen3_4b and gemma4_12b fit 16 GB
    # (docs/training_on_tpu.md).
    return TrainConfig(
        target=target.name,
        data=ChatFiles(paths=(target.data,)),
        drafter=drafter,
        accumulate=8,
        remat="layer",
        fsdp=target.fsdp,
    )
