"""Each kind of drafter starts, trains, evaluates, exports and comes back; one of each objective learns."""

import io
import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console
from safetensors.numpy import load_file, save_file

from dspark_jax.data.pipeline import Batch
from dspark_jax.drafters.heads import GatedMarkov, RnnMarkov, VanillaMarkov
from dspark_jax.interop.drafters import load_drafter
from dspark_jax.interop.huggingface import load_target
from dspark_jax.training.draft import (
    DFlashShape,
    DSparkShape,
    Eagle3Shape,
    MtpShape,
    draft_config,
    draft_layer,
    new_drafter,
)
from dspark_jax.training.loop import Finished, train
from dspark_jax.training.objective import BlockObjective, ChainObjective, objective_of
from dspark_jax.training.optimizer import OptimizerConfig, build_optimizer
from dspark_jax.training.report import read_report, summarise
from dspark_jax.training.step import StepConfig, init_state, measure, train_step

BLOCK = {"mask_token_id": 47, "num_layers": 1, "block_size": 3, "tapped_layers": (-1, 0)}
SHAPES = {
    "dspark_gated": DSparkShape(**BLOCK, markov_head=GatedMarkov(rank=4)),
    "dspark_rnn": DSparkShape(**BLOCK, markov_head=RnnMarkov(rank=4)),
    "dflash": DFlashShape(**BLOCK),
    "eagle3": Eagle3Shape(block_size=3, tapped_layers=(-1, 0)),
    "mtp": MtpShape(),
}


@pytest.fixture(scope="module")
def small_gemma(golden_folder, tmp_path_factory):
    """The golden Gemma target cut to a sliding and a global layer."""
    source, folder = golden_folder("targets/gemma4_tiny"), tmp_path_factory.mktemp("gemma")
    fields = json.loads((source / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"]
    kept = {f"model.layers.{fields['layer_types'].index(kind)}.": f"model.layers.{n}." for n, kind in enumerate(kinds)}
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        prefix = next((prefix for prefix in kept if name.startswith(prefix)), "")
        if prefix or ".layers." not in name:
            tensors[kept.get(prefix, "") + name.removeprefix(prefix)] = tensor
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 2, "layer_types": kinds}))
    return folder


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("dspark_rnn", "dflash", "mtp"))) for name in SHAPES],
)
def test_two_steps_from_start_to_exported_drafter(name, small_config, small_target, small_gemma, tmp_path):
    evaluation = replace(small_config.evaluation, every=2, new_tokens=4, temperatures=(1.0,))
    folder = small_gemma if name == "dspark_gated" else small_target
    config = replace(small_config, target=str(folder), drafter=SHAPES[name], steps=2, evaluation=evaluation)
    outcome = train(config, tmp_path, command="train", console=Console(file=io.StringIO()))
    assert isinstance(outcome, Finished)
    assert [np.isfinite(line["loss"]) for line in read_report(tmp_path, "train")] == [True, True]
    assert outcome.evaluation["accepted_length_t1"] >= 1.0
    target = load_target(folder)
    assert load_drafter(outcome.drafter, target=target).config == draft_config(config.drafter, target.spec)


@pytest.fixture(scope="module")
def target(small_target):
    return load_target(small_target)


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = np.random.default_rng(0)
    mask = np.ones((4, 16), bool)
    mask[:, :3] = False
    tokens = rng.integers(2, 40, (4, 16)).astype(np.int32)
    return Batch(tokens_BT=tokens, loss_mask_BT=mask, segments_BT=np.ones((4, 16), np.int32))


@pytest.mark.parametrize("name", [pytest.param("dflash", marks=pytest.mark.slow), "eagle3"])
def test_the_loss_falls_on_a_batch_it_sees_often(name, target, batch):
    shape = SHAPES[name]
    optimizer = build_optimizer(OptimizerConfig(learning_rate=5e-3), 200)
    drafter = new_drafter(draft_config(shape, target.spec), rngs=nnx.Rngs(0), dtype=jnp.float32)
    state = init_state(drafter, optimizer, jax.random.key(0))
    config = StepConfig(objective=objective_of(shape, anchors=8), dtype=jnp.dtype("float32"))
    step = jax.jit(partial(train_step, optimizer=optimizer, config=config))
    losses = []
    for _ in range(60):
        state, metrics = step(state, target, batch)
        losses.append(summarise([metrics])["loss"])
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", ["dspark_gated", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_d_41_parts_of_a_batch_add_up_to_the_whole(name, target, batch):
    """By plain gradient descent: what the step subtracts is the gradient. Rows have unlike weights."""
    rng = np.random.default_rng(1)
    batch = batch._replace(loss_mask_BT=batch.loss_mask_BT & (rng.random((4, 16)) < np.array([[0.4], [1], [0.7], [0]])))
    shape, optimizer = SHAPES[name], optax.sgd(1.0)
    drafter = new_drafter(draft_config(shape, target.spec), rngs=nnx.Rngs(0), dtype=jnp.float32)
    start = init_state(drafter, optimizer, jax.random.key(0))
    outcomes = []
    for parts in (1, 4):
        config = StepConfig(objective=objective_of(shape, anchors=4), dtype=jnp.dtype("float32"), accumulate=parts)
        outcomes.append(jax.jit(partial(train_step, optimizer=optimizer, config=config))(start, target, batch))
    assert float(outcomes[0][1]["grad_norm"].sum) > 0.01
    for whole, summed in zip(*map(jax.tree.leaves, outcomes), strict=True):
        if not jnp.issubdtype(whole.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(summed, whole, rtol=2e-5, atol=1e-6)


def test_padding_does_not_move_the_terms_of_a_chain(target, batch):
    shape = SHAPES["eagle3"]
    drafter = new_drafter(draft_config(shape, target.spec), rngs=nnx.Rngs(0), dtype=jnp.float32)
    config = StepConfig(objective=objective_of(shape, anchors=8), dtype=jnp.dtype("float32"))
    compute = jax.jit(partial(measure, config=config))
    inside = np.broadcast_to(np.arange(16) < 12, (4, 16))
    short = batch._replace(segments_BT=inside.astype(np.int32), loss_mask_BT=batch.loss_mask_BT & inside)
    other = short._replace(tokens_BT=np.where(np.arange(16) < 12, batch.tokens_BT, 5).astype(np.int32))
    one, two = (compute(drafter, target, rows, jax.random.key(0)) for rows in (short, other))
    assert float(one.ce_K.sum[0]) > 0
    np.testing.assert_allclose(one.ce_K.sum, two.ce_K.sum, rtol=1e-5)


def test_each_shape_has_its_objective():
    assert objective_of(DFlashShape(mask_token_id=1, decay=2.0), anchors=5) == BlockObjective(
        anchors=5, weights=replace(DSparkShape(mask_token_id=1).loss, ce=1.0, l1=0.0, confidence=0.0, decay=2.0)
    )
    assert objective_of(DSparkShape(mask_token_id=1), anchors=5).weights == DSparkShape(mask_token_id=1).loss
    assert objective_of(Eagle3Shape(step_decay=0.7), anchors=5) == ChainObjective(step_decay=0.7)
    assert objective_of(MtpShape(), anchors=5) == ChainObjective(step_decay=0.8)


def test_the_configs_of_each_shape(target):
    dflash = draft_config(SHAPES["dflash"], target.spec)
    assert (dflash.markov_head, dflash.confidence) == (None, False)
    assert draft_config(DSparkShape(mask_token_id=1), target.spec).markov_head == VanillaMarkov(rank=256)
    assert draft_config(MtpShape(), target.spec).tapped_layers == (1,)
    assert draft_config(Eagle3Shape(ffw=8), target.spec).layer.ffw == 8
    with pytest.raises(ValueError, match="last layer cannot be tapped"):
        draft_config(Eagle3Shape(tapped_layers=(1,)), target.spec)


def test_a_drafter_layer_sees_everything(target):
    seeing = replace(target.spec.layers[0], head_dim=8)
    sliding = replace(target.spec.layers[0], window=4)
    mixed = replace(target.spec, layers=(sliding, seeing, sliding))
    assert draft_layer(mixed) == replace(seeing, qk_norm=True)
    assert draft_layer(replace(target.spec, layers=(sliding, sliding))) == replace(sliding, window=None, qk_norm=True)
