"""A step compiled for a machine that is not here: the arithmetic of its report, and once the whole way with libtpu."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from dspark_jax.training import compiler
from dspark_jax.training.compile_ahead import Compiled, compile_ahead, compile_step, refusal, report
from dspark_jax.training.compiler import compilers
from dspark_jax.training.config import find_config
from dspark_jax.training.draft import draft_config
from dspark_jax.training.flops import Flops, step_flops
from dspark_jax.training.known_targets import target_facts
from dspark_jax.training.overrides import apply_overrides
from dspark_jax.training.topology import parse_topology
from dspark_jax.training.traffic import Traffic, traffic

CONFIGS = Path(__file__).parents[2] / "configs"
PROGRAM = """HloModule jit_step

%inner (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %all-gather.1 = f32[8]{0:T(128)} all-gather(%p), channel_id=1, dimensions={0}
}

%until.1 (p.1: (s32[], f32[4])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[]{:T(512)} compare(%get-tuple-element.1, %constant.1), direction=LT
}

%body.1 (p.2: (s32[], f32[4])) -> (s32[], f32[4]) {
  %fusion.1 = bf16[16]{0} fusion(%p.2), kind=kLoop, calls=%inner
  ROOT %tuple.1 = (s32[], f32[4]) tuple(%fusion.1)
}

%until.2 (p.3: (s32[], f32[4])) -> pred[] {
  %constant.2 = s32[] constant(3)
  ROOT %lt.2 = pred[] compare(%get-tuple-element.2, %constant.2), direction=LT
}

%body.2 (p.4: (s32[], f32[4])) -> (s32[], f32[4]) {
  %all-reduce-start.1 = (f32[2]{0}, f32[2]{0}) all-reduce-start(%p.4), to_apply=%add
  %all-reduce-done.1 = f32[2]{0} all-reduce-done(%all-reduce-start.1)
  %while.1 = (s32[]{:T(128)}, /*index=1*/f32[4]{0}) while(%tuple.2), condition=%until.1, body=%body.1
  ROOT %tuple.3 = (s32[], f32[4]) tuple(%while.1)
}

ENTRY %main (p.5: f32[4]) -> f32[4] {
  %copy.1 = f32[100]{0} copy(%p.5)
  %while.2 = (s32[], f32[4]{0}) while(%tuple.4), condition=%until.2, body=%body.2
  ROOT %get-tuple-element.9 = f32[4]{0} get-tuple-element(%while.2), index=1
}
"""


def config_of(name, *changes):
    return apply_overrides(find_config(name, CONFIGS), changes)


def flops_of(*changes, kernel=False):
    config = config_of("qwen3_4b", *changes)
    spec = target_facts(config.target).spec
    return step_flops(config, spec, draft_config(config.drafter, spec), kernel=kernel)


def test_what_is_in_a_loop_counts_as_often_as_it_runs():
    found = traffic(PROGRAM)
    assert found.collectives == {"all-gather": (15, 15 * 32.0), "all-reduce": (3, 3 * 8.0)}
    # A fusion writes its result only.
    assert found.written == 400 + 15 * 32
    assert found.largest == (("f32[100]", 400, "copy.1"), ("bf16[16]", 32, "fusion.1"))


def test_operations_follow_the_sizes():
    base = flops_of("remat=none")
    target = 2 * 3.6e9 * 4096 * 512
    assert target < base.needed < 2 * target, "the target's forward pass is the larger part"
    assert base.needed < base.done
    assert flops_of("batch_size=1024", "remat=none").needed == pytest.approx(2 * base.needed)
    assert flops_of("accumulate=1", "remat=none") == base
    again = flops_of("remat=layer")
    assert again.needed == base.needed
    assert again.done > base.done
    kernel = flops_of("remat=layer", kernel=True)
    assert kernel.needed == base.needed
    assert base.needed < kernel.done < again.done


def test_the_report_takes_the_longest_limit():
    config = config_of("qwen3_4b", "batch_size=64", "sequence_length=1000")
    machine, second = parse_topology("v5e:2x2"), 4 * 197e12
    seen = Traffic(collectives={"all-gather": (7, 20e9)}, written=0.5 * 819e9 / 2, largest=(("f32[2]", 8.0, "copy"),))
    compiled = Compiled(arguments=10**9, temporaries=2 * 10**9, peak=3 * 10**9, traffic=seen)
    text = "\n".join(report(compiled, Flops(needed=second, done=2 * second), "v5e", machine, config))
    for part in ("3.000 GB: fits", "Predicted, not measured", "2.00 s, 32,000 tokens/s", "50.0%", "0.50 s", "0.10 s"):
        assert part in text
    slow = "\n".join(report(compiled, Flops(needed=second, done=0.0), "v5e", machine, config))
    assert "0.50 s, 128,000 tokens/s" in slow
    full = replace(compiled, peak=17 * 10**9)
    assert "does not fit" in "\n".join(report(full, Flops(needed=1.0, done=1.0), "v5e", machine, config))


def test_what_the_compiler_refuses_is_one_sentence():
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 24.50G of 15.75G hbm. Exceeded\nmore"
    assert "it takes 24.50G of the 15.75G that a device has; set a larger accumulate" in refusal(message)
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (33.54G) exceeds "
        "available HBM (15.75G)."
    )
    assert "it takes 33.54G of the 15.75G that a device has" in refusal(message)
    assert refusal("INTERNAL: no\nmore") == "INTERNAL: no"


def test_what_cannot_be_compiled_for_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="h200:8: programs are compiled ahead for TPUs only"):
        compile_ahead(config_of("qwen3_4b"), "h200:8", None, print)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs libtpu: install it"):
        compile_ahead(config_of("qwen3_4b"), "v5e:8x8", None, print)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_step_with_two_layers_of_the_real_target_fits_and_gathers_weights(monkeypatch):
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
    config = config_of(
        "qwen3_4b",
        "drafter.num_layers=1",
        "drafter.tapped_layers=0",
        "accumulate=4",
        "batch_size=16",
        "fsdp=4",
    )
    spec = target_facts(config.target).spec
    spec = replace(spec, layers=spec.layers[:2])
    with compilers(1) as pool:
        compiled = pool.submit(compile_step, config, spec, "v5e:2x2", "O1").result()
        with pytest.raises(ValueError, match="--topology v5e:3x7: libtpu cannot compile for it"):
            pool.submit(compile_step, config, spec, "v5e:3x7", "O1").result()
    assert compiled.peak < 16e9
    # As compiled: 2.58 GB of temporaries, 6.6 GB gathered, 1.8 GB reduced. Gathering the LM head for every chunk of the
    # loss took 352 GB, adding up the Markov head's gradient after every chunk 36 GB.
    assert compiled.temporaries < 3.5e9
    collectives = compiled.traffic.collectives
    assert 1e9 < collectives["all-gather"][1] < 10e9
    assert sum(size for _, size in collectives.values()) < 12e9
