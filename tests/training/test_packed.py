"""A packed row is its documents: each trains as it would alone, and none feels another."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.data.pipeline import lay_out
from dspark_jax.data.supervision import Supervised
from dspark_jax.drafters.chain_objective import chain_objective
from dspark_jax.drafters.heads import VanillaMarkov
from dspark_jax.drafters.objective import LossWeights, block_objective
from dspark_jax.interop.huggingface import load_target
from dspark_jax.ops.masks import document_starts
from dspark_jax.training.draft import DSparkShape, Eagle3Shape, draft_config, new_drafter

SIZES, LENGTH = (6, 9, 5), 24
RNG = np.random.default_rng(0)
# All supervised: what stops a block at the end of its document is not the next one's prompt.
DOCUMENTS = [
    Supervised(tokens=RNG.integers(2, 40, size).astype(np.int32), loss_mask=np.ones(size, bool)) for size in SIZES
]
PACKED, ALONE = lay_out([DOCUMENTS, [], []], LENGTH), lay_out([[document] for document in DOCUMENTS], LENGTH)
FIRST = np.cumsum((0, *SIZES[:-1]))
# Two anchors a document; the last one's block reaches over its end.
OF_DOCUMENTS = np.array([(1, size - 2) for size in SIZES], np.int32)
EVERY = np.ones((3, LENGTH), bool)
ANCHORS_ALONE, ANCHORS_PACKED = np.zeros((2, 3, 6), np.int32)
ANCHORS_ALONE[:, :2], ANCHORS_PACKED[0] = OF_DOCUMENTS, (OF_DOCUMENTS + FIRST[:, None]).ravel()
SHAPES = {
    "dspark": DSparkShape(
        mask_token_id=47, num_layers=1, block_size=3, tapped_layers=(-1, 0), markov_head=VanillaMarkov(rank=4)
    ),
    "eagle3": Eagle3Shape(block_size=3, tapped_layers=(-1, 0)),
}


@pytest.fixture(scope="module")
def target(small_target):
    """One layer with a sliding window, one without."""
    target = load_target(small_target)
    sliding = replace(target.spec.layers[0], window=4)
    target.spec = replace(target.spec, layers=(sliding, *target.spec.layers[1:]))
    return target


@pytest.fixture(scope="module", params=SHAPES)
def loss(request, target):
    """loss(batch, features, hidden) -> (loss sums, gradients to drafter and features)."""
    shape = SHAPES[request.param]
    drafter = new_drafter(draft_config(shape, target.spec), rngs=nnx.Rngs(0), dtype=jnp.float32)

    def sums(drafter, features_BTE, hidden_BTD, batch, anchors_BA, chosen):
        starts_BT = document_starts(batch.segments_BT)
        shared = {
            "tokens_BT": batch.tokens_BT,
            "loss_mask_BT": batch.loss_mask_BT & chosen,
            "features_BTE": features_BTE,
            "hidden_BTD": hidden_BTD,
            "starts_BT": starts_BT,
        }
        if request.param == "eagle3":
            return jnp.sum(chain_objective(drafter, target.vocabulary, **shared).ce_K.sum)
        terms = block_objective(
            drafter,
            target.vocabulary,
            **shared,
            anchors_BA=anchors_BA,
            keep_BA=anchors_BA > 0,
            weights=LossWeights(),
        )
        return 0.1 * terms.ce.sum + 0.9 * terms.l1.sum + terms.confidence.sum

    compute = jax.jit(jax.value_and_grad(sums, argnums=(0, 1)))

    def run(batch, anchors_BA, chosen):
        seen = encode(target, batch)
        return compute(drafter, seen.features_BTE, seen.hidden_BTD, batch, anchors_BA, chosen)

    return run


@jax.jit
def encoded(target, tokens_BT, segments_BT):
    return target.encode(tokens_BT, (-1, 0), document_starts(segments_BT))


def encode(target, batch):
    return encoded(target, jnp.asarray(batch.tokens_BT), jnp.asarray(batch.segments_BT))


def test_the_target_reads_each_document_as_if_it_were_alone(target):
    together, apart = encode(target, PACKED), encode(target, ALONE)
    for number, (first, size) in enumerate(zip(FIRST, SIZES, strict=True)):
        for name in ("hidden_BTD", "features_BTE"):
            found = getattr(together, name)[0, first : first + size]
            np.testing.assert_allclose(found, getattr(apart, name)[number, :size], atol=1e-5)


def test_a_packed_row_trains_as_its_documents_alone(loss):
    together, (to_drafter, _) = loss(PACKED, ANCHORS_PACKED, EVERY)
    apart, (alone, _) = loss(ALONE, ANCHORS_ALONE, EVERY)
    assert float(apart) > 1
    np.testing.assert_allclose(together, apart, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(to_drafter), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_d_39_a_document_has_no_gradient_to_another(loss):
    for number, (first, size) in enumerate(zip(FIRST, SIZES, strict=True), start=1):
        _, (_, to_features) = loss(PACKED, ANCHORS_PACKED, PACKED.segments_BT == number)
        touched = np.abs(np.asarray(to_features[0])).max(axis=-1) > 0
        assert touched[first : first + size].any()
        assert not np.delete(touched, np.s_[first : first + size]).any()
