"""The block attention kernel compiled ahead for every TPU, and spread over simulated devices."""

import pytest

FEW = "CASES = (64, jnp.bfloat16, False, None), (128, jnp.bfloat16, True, 600)"
ALL = "CASES = product((64, 128, 256), (jnp.bfloat16, jnp.float32), (False, True), (None, 600))"
ONE = """
from dspark_jax.kernels.block_attention import block_attention, paged_block_attention

BATCH, SLOTS, HEADS, KV_HEADS, SPAN, PAGE = 16, 7, 8, 2, 4096, 256

for channels, dtype, paged, window in CASES:
    q = shape(BATCH, SLOTS, HEADS, channels, dtype=dtype)
    own = shape(BATCH, KV_HEADS, SLOTS, channels, dtype=dtype)
    start = shape(BATCH, dtype=jnp.int32)
    if paged:
        cache = shape(BATCH * SPAN // PAGE, KV_HEADS, PAGE, channels, dtype=dtype)
        run, places = paged_block_attention, (shape(BATCH, SPAN // PAGE, dtype=jnp.int32), start)
    else:
        cache = shape(BATCH, KV_HEADS, SPAN, channels, dtype=dtype)
        run, places = block_attention, (start,)
    run = partial(run, scale=0.1, window=window, soft_cap=30.0)
    compiled = jax.jit(run).lower(q, cache, cache, own, own, *places).compile()
    report(
        compiled,
        cache.shape,
        case=f"{channels} {dtype.__name__} paged={paged} window={window}",
        # A sublane tile holds 16 rows of 128 lanes; a block's few rows are padded to it.
        queries=BATCH * SLOTS * HEADS * max(channels, 128) * 4 * 16,
        cache=cache.size * cache.dtype.itemsize,
    )
"""

SPREAD = """
from dspark_jax.core.mesh import make_mesh, sharding
from dspark_jax.kernels.block_attention import sharded_block_attention, sharded_paged_block_attention

mesh = make_mesh(tensor=2, devices=described.devices[:4])
rows, heads = sharding(mesh, "batch", "kv_heads"), sharding(mesh, "batch", None, "heads")
q = shape(8, 7, 16, 64, where=heads)
cache, own = shape(8, 4, 4096, 64, where=rows), shape(8, 4, 7, 64, where=rows)
pages = shape(128, 4, 256, 64, where=rows)
start = shape(8, dtype=jnp.int32, where=sharding(mesh, "batch"))
table = shape(8, 16, dtype=jnp.int32, where=sharding(mesh, "batch"))
for run, arguments in (
    (sharded_block_attention, (q, cache, cache, own, own, start)),
    (sharded_paged_block_attention, (q, pages, pages, own, own, table, start)),
):
    compiled = jax.jit(partial(run, mesh, scale=0.1)).lower(*arguments).compile()
    held = compiled.input_shardings[0][1].shard_shape(arguments[1].shape)
    report(
        compiled, held, collectives=len(re.findall(r" (?:all|collective|reduce)-[\\w-]+\\(", compiled.as_text()))
    )
"""


@pytest.mark.parametrize(
    ("cases", "count"), [(FEW, 2), pytest.param(ALL, 24, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_every_tpu_takes_the_kernel_and_leaves_the_cache_where_it_is(ahead, kind, cases, count):
    found = ahead(kind, cases + ONE)
    assert len(found) == count
    for facts in found:
        assert facts["kernels"] == 1, facts
        assert facts["copied"] == [], facts
        assert facts["temporaries"] <= facts["queries"], facts
        assert facts["temporaries"] < facts["cache"] / 4, facts


@pytest.mark.slow
def test_devices_that_share_rows_and_heads_exchange_nothing(ahead):
    found = ahead("v5e", SPREAD)
    assert len(found) == 2
    for facts in found:
        assert facts["kernels"] == 1, facts
        assert facts["copied"] == [], facts
        assert facts["collectives"] == 0, facts


ROUND = """
from dataclasses import replace

from flax import nnx

from dspark_jax.core.mesh import make_mesh, on_mesh
from dspark_jax.decoding.programs import Programs
from dspark_jax.decoding.round import RoundPlan
from dspark_jax.decoding.scheduler import Guide, Threshold
from dspark_jax.drafters.dspark import DSpark, DSparkConfig
from dspark_jax.nn.block import LayerSpec
from dspark_jax.nn.layers import VocabularySpec
from dspark_jax.nn.paged_attention import KernelPages
from dspark_jax.nn.paged_cache import InPages, InRows
from dspark_jax.ops.rope import RopeSpec
from dspark_jax.ops.sampling import Draws
from dspark_jax.targets.model import Target, TargetSpec

whole, packed = RoundPlan(), RoundPlan(policy=Threshold(confidence=0.5), sizes=(256,))
pages = InPages(attention=KernelPages())
sampled, greedy = Draws.PLAIN, Draws.GREEDY
for channels, form, plan, draws in (
    (64, pages, whole, greedy),
    (128, InRows(), whole, sampled),
    (128, pages, packed, greedy),
):
    layer = LayerSpec(
        d_model=512, ffw=1024, heads=8, kv_heads=2, head_dim=channels, rope=RopeSpec(), norm_eps=1e-5, qk_norm=True
    )
    vocabulary = VocabularySpec(size=4096, d_model=512, tied=True)
    spec = TargetSpec(family="qwen3", vocabulary=vocabulary, layers=(layer,) * 2, norm_eps=1e-5, max_len=4096)
    config = DSparkConfig(
        vocab_size=4096,
        layer=replace(layer, kv_heads=4),
        num_target_layers=2,
        tapped_layers=(-1, 0),
        mask_token_id=0,
        num_layers=3,
    )
    # Larger than VMEM, where XLA would keep what fits.
    rows, span = 64, 4096
    placed = partial(jax.tree.map, lambda leaf: shape(*leaf.shape, dtype=leaf.dtype))
    target, drafter, guide = placed(
        nnx.eval_shape(
            lambda: (
                Target(spec, rngs=nnx.Rngs(0), dtype=jnp.bfloat16),
                DSpark(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16),
                Guide.unguided(rows, 7),
            )
        ),
    )
    programs = Programs(target.with_cache_form(form), drafter, dtype=jnp.bfloat16)
    state = placed(jax.eval_shape(lambda: programs.empty(rows, span)))
    # JAX's kernel asks which TPU it is for.
    with on_mesh(make_mesh(devices=described.devices[:1])):
        compiled = programs.lower(plan, state, guide, draws).compile()
    report(
        compiled,
        state.draft.keys[0].shape,
        paged=type(state.cache).__name__ == "PagedCache",
        copied_target=copied(compiled, jax.tree.leaves(state.cache)[0].shape),
        loops=[line[line.find("metadata") :] for line in compiled.as_text().splitlines() if " while(" in line],
        cache=state.draft.keys[0].size * 2,
    )
"""


@pytest.mark.slow
def test_a_whole_round_compiles_for_a_tpu_around_the_kernels(ahead):
    """Attention of 3 draft layers and writes to their caches; writes to the 2 of the target, and in pages attention.

    Heads of 64 channels are in rows whatever is asked for.
    """
    found = ahead("v5e", ROUND)
    assert [facts["paged"] for facts in found] == [False, False, True]
    for facts in found:
        assert facts["kernels"] == 3 + 3 + (4 if facts["paged"] else 2), facts
        assert facts["copied"] == facts["copied_target"] == [], facts
        assert not facts["loops"], facts
        # Over rows XLA may hold the scores of a layer, float32 and half of a draft cache here.
        scores = 0 if facts["paged"] else facts["cache"] / 2
        assert facts["temporaries"] < scores + facts["cache"] / 6, facts


SIMULATED = """
from dspark_jax.kernels.block_attention import sharded_block_attention, sharded_paged_block_attention
from dspark_jax.ops.block_attention import block_attention

q, own_k, own_v = draw(4, 3, 4, 64), draw(4, 2, 3, 64), draw(4, 2, 3, 64)
cache = draw(2, 4, 2, 256, 64)
start = jnp.array([0, 100, 128, 250])
how = {"scale": 0.2, "window": 140}
expected = block_attention(q, *cache, own_k, own_v, start, **how)
spread = jax.jit(lambda *x: sharded_block_attention(mesh, *x, **how, tile=128, interpret=True))
np.testing.assert_allclose(spread(q, *cache, own_k, own_v, start), expected, atol=1e-5)
# Rows 0 and 1 keep pages 0..3 of the first device, rows 2 and 3 pages 0..3 of the second.
pages = cache.reshape(2, 4, 2, 2, 128, 64).swapaxes(2, 3).reshape(2, 8, 2, 128, 64)
table = jnp.array([[0, 1], [2, 3]] * 2)
spread = jax.jit(lambda *x: sharded_paged_block_attention(mesh, *x, **how, interpret=True))
np.testing.assert_allclose(spread(q, *pages, own_k, own_v, table, start), expected, atol=1e-5)
"""


@pytest.mark.slow
def test_four_simulated_devices_compute_what_one_does(simulated):
    simulated(SIMULATED)
