"""Rounds with kernels: attention on GPUs and TPUs, writes to the caches, and a target's cache in pages."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.programs import Programs
from dspark_jax.decoding.scheduler import Threshold
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.decoding.stats import DecodeStats
from dspark_jax.nn.block_attention import CachedBlocks, KernelBlocks, suited_to
from dspark_jax.nn.cache import KernelWrites, KVCache, PlainWrites, writes_suited_to
from dspark_jax.nn.paged_attention import KernelPages, PlainPages
from dspark_jax.nn.paged_cache import InPages, InRows, PagedCache, form_suited_to
from dspark_jax.nn.row_attention import FusedRows, PlainRows
from dspark_jax.ops.attention_parts import attention_part

PROMPTS = [[5, 9, 2], [1] * 37, [7]]


def texts(target, drafter):
    """What greedy generation says, and its counts."""
    slots = DecodeSlots(target, drafter, max_batch=3, max_len=200, elastic=False)
    jobs = [
        Job(prompt=tuple(prompt), sampling=Sampling(), max_new_tokens=40, tag=i) for i, prompt in enumerate(PROMPTS)
    ]
    done = sorted(generate(slots, jobs), key=lambda completion: completion.job.tag)
    return [(completion.tokens, completion.stats) for completion in done]


def test_the_kernel_drafts_what_plain_operations_do(small):
    target, drafter = small
    plain = texts(target, drafter.with_block_attention(CachedBlocks()))
    assert texts(target, drafter.with_block_attention(KernelBlocks(interpret=True))) == plain
    accepted, proposed = (sum(getattr(stats, name) for _, stats in plain) for name in ("accepted", "proposed"))
    assert 0 < accepted < proposed


def test_fused_attention_of_a_gpu_says_what_plain_operations_do(small, monkeypatch):
    """Its twin in the kernel's place; contexts are cut in pieces, some of them empty."""
    monkeypatch.setattr("dspark_jax.nn.row_attention._SHORTEST_PIECE", 16)
    target, drafter = small
    fused = FusedRows(part=attention_part, fits=lambda *_: True, least_scores=0)
    plain = texts(target.with_cache_form(InRows()), drafter.with_block_attention(CachedBlocks()))
    found = texts(target.with_cache_form(InRows(fused)), drafter.with_block_attention(CachedBlocks(fused)))
    assert found == plain
    accepted, proposed = (sum(getattr(stats, name) for _, stats in plain) for name in ("accepted", "proposed"))
    assert 0 < accepted < proposed


def test_caches_written_by_kernel_are_those_written_plainly(tiny_target, tiny_drafter):
    tokens, start_B = jnp.arange(6).reshape(2, 3), jnp.array([125, 253])

    def caches(how):
        target, drafter = tiny_target.with_cache_write(how), tiny_drafter.with_cache_write(how)

        def run():
            out = target.extend(target.init_cache(2, 256, jnp.float32), tokens, start_B, drafter.tapped_layers)
            state = drafter.init_state(2, 256, jnp.float32)
            return out.cache, drafter.extend(state, target.vocabulary, out.features_BTE, tokens, start_B, start_B)

        return jax.make_jaxpr(run)(), jax.jit(run)()

    (kernel, found), (plain, expected) = caches(KernelWrites(interpret=True)), caches(PlainWrites())
    layers = len(tiny_target.layers) + len(tiny_drafter.layers)
    assert (str(kernel).count("name=cache_write"), str(plain).count("name=cache_write")) == (layers, 0)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_over_pages_drafts_change_nothing_while_the_state_grows(thin, oracle_of, is_greedy):
    """Rounds pack what they verify; the long request brings more pages, and the other one is taken along."""
    target, _ = thin
    paged, oracle = target.with_cache_form(InPages(attention=PlainPages())), oracle_of(target, block=1, shift=None)
    slots = DecodeSlots(paged, oracle, max_batch=2, max_len=382, policy=Threshold(confidence=0.4))
    prompts, budgets = [(5, 9, 2), tuple(i * i % 16 for i in range(245))], (20, 20)
    jobs = [
        Job(prompt=prompt, sampling=Sampling(), max_new_tokens=budget, tag=len(prompt))
        for prompt, budget in zip(prompts, budgets, strict=True)
    ]
    caches, texts, stats = [], {}, DecodeStats()
    for done in generate(slots, jobs, observe=lambda *_: caches.append(slots._state.cache)):
        texts[done.job.tag], stats = done.tokens, stats + done.stats
    assert {type(cache) for cache in caches} == {PagedCache}
    assert {cache.pages_BI.shape for cache in caches} == {(2, 2), (2, 3)}
    assert is_greedy(target, prompts, [texts[len(prompt)] for prompt in prompts], length=320)
    assert 0 < stats.accepted < stats.verified < stats.proposed


def test_it_leaves_the_cache_as_it_is_and_gives_the_same_hidden_states(tiny_target, tiny_drafter):
    state = tiny_drafter.init_state(2, 150, jnp.float32)
    state = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(0).normal(size=x.shape), x.dtype), state)
    places = jnp.array([3, 17]), jnp.array([0, 140])

    def block(how):
        drafter = tiny_drafter.with_block_attention(how)
        return jax.jit(lambda state: drafter.cached_block(tiny_target.vocabulary, state, *places))(state)

    (plain, written), (kernel, left) = block(CachedBlocks()), block(KernelBlocks(interpret=True))
    np.testing.assert_allclose(kernel, plain, atol=2e-5)
    assert all(map(np.array_equal, jax.tree.leaves(left), jax.tree.leaves(state)))
    assert not np.array_equal(written.keys[0], state.keys[0])


def test_a_drafter_s_own_choice_stays_and_none_suits_the_device(tiny_target, tiny_drafter, monkeypatch):
    chosen = []
    record = lambda where: chosen.append(where) or CachedBlocks()  # noqa: E731
    monkeypatch.setattr("dspark_jax.decoding.programs.suited_to", record)
    Programs(tiny_target, tiny_drafter.with_block_attention(KernelBlocks(interpret=True)), dtype=jnp.float32)
    assert not chosen
    Programs(tiny_target, tiny_drafter, dtype=jnp.float32)
    assert len(chosen) == 1
    assert tiny_drafter.block_attention is None


def test_pages_are_taken_where_they_are_asked_for_or_suit_the_device(thin, monkeypatch):
    target, drafter = thin
    form = lambda target: type(Programs(target, drafter, dtype=jnp.float32).empty(1, 60).cache)  # noqa: E731
    pages = InPages(attention=KernelPages(interpret=True))
    assert form(target) is KVCache
    assert form(target.with_cache_form(pages)) is PagedCache
    monkeypatch.setattr("dspark_jax.decoding.programs.form_suited_to", lambda where: pages)
    assert form(target) is PagedCache
    assert form(target.with_cache_form(InRows())) is KVCache


def test_only_a_single_gpu_with_cudnn_s_kernel_takes_it_unasked():
    class Gpus(jax.sharding.Sharding):
        def __init__(self, *facts, count=1):
            names = "device_kind", "compute_capability"
            self.devices = {
                type("Gpu", (), {"platform": "gpu", **dict(zip(names, facts, strict=True))})() for _ in range(count)
            }

        device_set = property(lambda self: self.devices)

    h200 = "NVIDIA H200", "9.0"
    assert form_suited_to(Gpus(*h200)) == InRows(FusedRows())
    assert suited_to(Gpus(*h200)) == CachedBlocks(FusedRows())
    for others in (Gpus("Tesla V100", "7.0"), Gpus("NVIDIA T4", "7.5"), Gpus("MI300X", "gfx942"), Gpus(*h200, count=2)):
        assert form_suited_to(others) == InRows(PlainRows())
        assert suited_to(others) == CachedBlocks(PlainRows())


def test_only_a_single_tpu_takes_the_kernel_unasked():
    class Tpu:
        platform = "tpu"

    class Tpus(jax.sharding.Sharding):
        device_set = property(lambda self: {Tpu() for _ in range(count)})

    count = 1
    assert suited_to(Tpus()) == KernelBlocks()
    assert writes_suited_to(Tpus()) == KernelWrites()
    assert form_suited_to(Tpus()) == InPages(attention=KernelPages())
    count = 4
    assert suited_to(Tpus()) == CachedBlocks()
    assert writes_suited_to(Tpus()) == PlainWrites()
    assert form_suited_to(Tpus()) == InRows()
    cpu = jax.devices()[:1]
    assert suited_to(SingleDeviceSharding(cpu[0])) == CachedBlocks()
    assert form_suited_to(SingleDeviceSharding(cpu[0])) == InRows()
    assert suited_to(NamedSharding(Mesh(np.array(cpu), ("data",)), PartitionSpec())) == CachedBlocks()
