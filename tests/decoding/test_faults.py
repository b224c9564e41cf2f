"""Faults that others shipped, provoked in whole rounds: each test carries the fault's number."""

import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from flax import nnx

from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.scheduler import FixedLength
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.decoding.stats import DecodeStats
from dspark_jax.drafters.mtp import Mtp, MtpConfig

logits_of = jax.jit(lambda target, tokens: target.vocabulary.logits(target.encode(tokens, ()).hidden_BTD))

SHARDED = """
import json
import sys
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 2)
from dspark_jax.decoding import planner
from dspark_jax.core.mesh import make_mesh, module_shardings
from dspark_jax.decoding.scheduler import Threshold
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.interop.drafters import load_drafter
from dspark_jax.interop.huggingface import load_target

golden = Path(sys.argv[1])
target = load_target(golden / "targets" / "qwen3_tiny", "float32")
drafter = load_drafter(golden / "drafters" / "dflash_qwen3", "float32")
assert drafter.markov_head is None and drafter.confidence_head is None
assert drafter.config.markov_rank == 0
record = json.loads((golden / "drafters" / "dflash_qwen3" / "decode_reference.json").read_text())[1]
start, rounds = len(record["prompt"]) + 1, record["acceptance_lengths"][:6]
assert sum(rounds) > len(rounds)
for ways in (2,):
    mesh = make_mesh(tensor=ways, devices=jax.devices()[:ways])
    placed = [jax.device_put(module, module_shardings(mesh, module)) for module in (target, drafter)]
    split = placed[1].layers[0].attention.q[...].addressable_shards[0].data.shape
    assert split == (64, 4 // ways, 32), split
    slots = DecodeSlots(*placed, max_batch=1, max_len=48)
    slots.admit(record["output_ids"][:start], Sampling())
    outs = [slots.step()[0] for _ in rounds]
    text = [token for out in outs for token in out.tokens]
    assert [len(out.tokens) for out in outs] == rounds, (ways, outs)
    assert text == record["output_ids"][start : start + len(text)], (ways, text)
    assert all(set(out.confidence) == {1.0} for out in outs)

# D-27: every device must choose the same lengths, and those that one device alone does; which of two branches verifies
# them follows.
planner.switch_sizes = lambda rows, block: (2 * rows, rows * (block + 1))
drafter = load_drafter(golden / "drafters" / "dspark_vanilla_qwen3", "float32")
lengths = []
for ways in (1, 2):
    mesh = make_mesh(tensor=ways, devices=jax.devices()[:ways])
    placed = [jax.device_put(module, module_shardings(mesh, module)) for module in (target, drafter)]
    slots = DecodeSlots(*placed, max_batch=2, max_len=48, policy=Threshold(confidence=0.5), elastic=False)
    slots.admit_many([record["output_ids"][:start], record["output_ids"][: start + 3]], [Sampling()] * 2)
    lengths.append([out.verified for _ in range(5) for out in slots.step()])
assert lengths[0] == lengths[1], lengths
assert len(set(lengths[0])) > 1, lengths
"""


def test_d_03_d_27_rank_0_decodes_and_lengths_agree_under_tensor_parallelism(golden):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(SHARDED), str(golden)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def windowed(golden_target, golden_drafter, golden_folder):
    """(slots over the Gemma target, whose window is 8; texts of 64 tokens in the language it was trained on)."""
    target = golden_target("gemma4")
    assert {spec.window for spec in target.spec.layers} == {8, None}
    slots = DecodeSlots(target, golden_drafter("dspark_vanilla_gemma4"), max_batch=4, max_len=96, elastic=False)
    starts = np.load(golden_folder("targets/gemma4_tiny") / "reference.npz")["greedy_prompt"]
    jobs = [
        Job(prompt=tuple(starts[i % 2].tolist()), sampling=Sampling(temperature=0.8, seed=i), max_new_tokens=58)
        for i in range(8)
    ]
    return slots, [(*completion.job.prompt, *completion.tokens) for completion in generate(slots, jobs)]


@pytest.mark.parametrize("times", [1, 2, 8])
def test_d_11_prompts_beyond_the_window_neither_change_the_text_nor_lose_the_drafts(golden_target, windowed, times):
    """Every text is computed anew by one pass without a cache."""
    slots, texts = windowed
    jobs = [Job(prompt=text[: 8 * times], sampling=Sampling(), max_new_tokens=20) for text in texts]
    completions = list(generate(slots, jobs))
    tokens = np.zeros((8, 96), np.int32)
    for row, completion in enumerate(completions):
        written = [*completion.job.prompt, *completion.tokens]
        tokens[row, : len(written)] = written
    best = np.argmax(logits_of(golden_target("gemma4"), tokens), axis=-1)
    for row, completion in enumerate(completions):
        assert best[row, 8 * times - 1 : 8 * times + 19].tolist() == list(completion.tokens)
    stats = sum((completion.stats for completion in completions), DecodeStats())
    assert stats.proposed > 0
    assert stats.accepted_length > 1.5


@pytest.mark.parametrize(
    "length", [pytest.param(0, marks=pytest.mark.slow), 1, 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_d_13_any_number_of_drafts_up_to_the_block_is_verified_and_changes_nothing(small, is_greedy, length):
    target, _ = small
    slots = DecodeSlots(*small, max_batch=4, max_len=60, policy=FixedLength(length=length), elastic=False)
    prompts = [(3,), (1, 2, 5, 8), (7, 7, 1), (9, 4, 4, 2, 11, 0)]
    jobs = [Job(prompt=prompt, sampling=Sampling(), max_new_tokens=30) for prompt in prompts]
    completions = list(generate(slots, jobs))
    assert is_greedy(target, [c.job.prompt for c in completions], [c.tokens for c in completions])
    stats = sum((completion.stats for completion in completions), DecodeStats())
    assert stats.proposed == stats.verified == length * stats.rounds
    assert (stats.accepted > 0) == (length > 0)


@pytest.mark.parametrize("block", [1, 3])
def test_d_14_mtp_with_random_weights_changes_nothing(small, built, is_greedy, block):
    """At batch 1 and in a batch; one draft a round, and recursively more."""
    target, dspark = small
    config = MtpConfig(vocab_size=16, layer=dspark.config.layer, num_target_layers=2, block_size=block)
    drafter = built(lambda: Mtp(config, rngs=nnx.Rngs(0)), seed=6)
    slots = DecodeSlots(target, drafter, max_batch=4, max_len=60, elastic=False)
    prompts = [(3,), (1, 2, 5, 8), (7, 7, 1), (9, 4, 4, 2, 11, 0), (5, 5), (12, 13, 1)]
    jobs = [Job(prompt=prompt, sampling=Sampling(), max_new_tokens=40) for prompt in prompts]
    batched = list(generate(slots, jobs))
    alone = [completion for job in jobs[:2] for completion in generate(slots, [job])]
    for completions in (batched, alone):
        assert is_greedy(target, [c.job.prompt for c in completions], [c.tokens for c in completions])
    stats = sum((completion.stats for completion in batched), DecodeStats())
    assert stats.proposed == block * stats.rounds > stats.accepted > 0
