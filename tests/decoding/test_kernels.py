"""Rounds with the TPU kernels: block attention while drafting, and writes to the caches."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.programs import Programs
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.nn.block_attention import KernelBlocks, PlainBlocks, suited_to
from dspark_jax.nn.cache import KernelWrites, PlainWrites, writes_suited_to

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
    plain = texts(target, drafter.with_block_attention(PlainBlocks()))
    assert texts(target, drafter.with_block_attention(KernelBlocks(interpret=True))) == plain
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


def test_it_leaves_the_cache_as_it_is_and_gives_the_same_hidden_states(tiny_target, tiny_drafter):
    state = tiny_drafter.init_state(2, 150, jnp.float32)
    state = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(0).normal(size=x.shape), x.dtype), state)
    places = jnp.array([3, 17]), jnp.array([0, 140])

    def block(how):
        drafter = tiny_drafter.with_block_attention(how)
        return jax.jit(lambda state: drafter.cached_block(tiny_target.vocabulary, state, *places))(state)

    (plain, written), (kernel, left) = block(PlainBlocks()), block(KernelBlocks(interpret=True))
    np.testing.assert_allclose(kernel, plain, atol=2e-5)
    assert all(map(np.array_equal, jax.tree.leaves(left), jax.tree.leaves(state)))
    assert not np.array_equal(written.keys[0], state.keys[0])


def test_a_drafter_s_own_choice_stays_and_none_suits_the_device(tiny_target, tiny_drafter, monkeypatch):
    chosen = []
    record = lambda where: chosen.append(where) or PlainBlocks()  # noqa: E731
    monkeypatch.setattr("dspark_jax.decoding.programs.suited_to", record)
    Programs(tiny_target, tiny_drafter.with_block_attention(KernelBlocks(interpret=True)), dtype=jnp.float32)
    assert not chosen
    Programs(tiny_target, tiny_drafter, dtype=jnp.float32)
    assert len(chosen) == 1
    assert tiny_drafter.block_attention is None


def test_only_a_single_tpu_takes_the_kernel_unasked():
    class Tpu:
        platform = "tpu"

    class Tpus(jax.sharding.Sharding):
        device_set = property(lambda self: {Tpu() for _ in range(count)})

    count = 1
    assert suited_to(Tpus()) == KernelBlocks()
    assert writes_suited_to(Tpus()) == KernelWrites()
    count = 4
    assert suited_to(Tpus()) == PlainBlocks()
    assert writes_suited_to(Tpus()) == PlainWrites()
    cpu = jax.devices()[:1]
    assert suited_to(SingleDeviceSharding(cpu[0])) == PlainBlocks()
    assert suited_to(NamedSharding(Mesh(np.array(cpu), ("data",)), PartitionSpec())) == PlainBlocks()
