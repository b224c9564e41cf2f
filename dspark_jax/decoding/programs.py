"""The compiled programs of a target and its drafter: jit and donation appear here and nowhere else in decoding."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled, Lowered
from jax.tree_util import PyTreeDef

from dspark_jax.core.arrays import Array, DType
from dspark_jax.core.signals import COMPILING
from dspark_jax.decoding.buckets import FEW_PASSES, LITTLE_PADDING, insert, regroup
from dspark_jax.decoding.round import DecodeState, RoundPlan, decode_round, init_state, prefill
from dspark_jax.decoding.scheduler import Guide
from dspark_jax.decoding.transfer import Sent, words_shape, written
from dspark_jax.drafters.base import Drafter
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.nn.block_attention import suited_to
from dspark_jax.nn.cache import Caching, writes_suited_to
from dspark_jax.nn.paged_cache import form_suited_to
from dspark_jax.ops.sampling import Draws
from dspark_jax.targets.model import Target

# By platform. On CPU, XLA's default order of operations holds so many buffers at once that a round of a 135M model
# spends a third of its time on page faults. On GPU, Triton's products are tuned for every shape: on an H200 a round of
# the default model (16 requests) compiled in 15.7 s with them and in 8.5 s without, and took 3.4 ms and 3.1 ms. And
# products that share their input are merged there by copying their weights together in every round: verifying eight
# tokens with a 4B target took 4.39 ms with that and 3.96 ms without. Kernels of a CUDA graph that do not need each
# other may run side by side: the same pass took 3.58 ms in order and 3.26 ms so. And where tokens are no multiple of
# eight, those of every product were copied and padded: 287 of the 887 kernels of a round of one request with three
# drafts, which took 1.47 ms of the host to start and takes 1.11 without them.
_OPTIONS: dict[str, dict[str, bool | int | str]] = {
    "cpu": {"xla_cpu_enable_concurrency_optimized_scheduler": False},
    "gpu": {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
        "xla_disable_hlo_passes": "cublas-pad-for-gemms",
    },
}


def compiler_options(platform: str) -> dict[str, bool | int | str]:
    """What XLA is told when rounds are compiled for devices of this platform."""
    return _OPTIONS.get(platform, {})


def suited(target: Target, drafter: Drafter) -> tuple[Target, Drafter]:
    """The two with what suits their devices wherever nothing was chosen: caches, writes to them, attention."""
    where = jax.tree.leaves(target)[0].sharding
    if isinstance(drafter, DSpark) and drafter.block_attention is None:
        drafter = drafter.with_block_attention(suited_to(where))
    if target.cache_write is None:
        target = target.with_cache_write(writes_suited_to(where))
    if target.cache_form is None:
        target = target.with_cache_form(form_suited_to(where))
    if isinstance(drafter, Caching) and drafter.cache_write is None:
        drafter = drafter.with_cache_write(writes_suited_to(where))
    return target, drafter


class RoundShape(NamedTuple):
    """What a compiled round is made for."""

    plan: RoundPlan
    rows: int
    span: int
    draws: Draws


class Programs:
    """Device functions over one set of weights. States are donated: the caller goes on with what it gets back."""

    def __init__(self, target: Target, drafter: Drafter, *, dtype: DType):
        target, drafter = suited(target, drafter)
        where = jax.tree.leaves(target)[0].sharding
        self._target = target
        # Flattened once: walking a tree of modules costs more than a small model's round on an accelerator.
        self._weights, structure = jax.tree.flatten((target, drafter))
        self._structure = _first(structure)
        # A CPU takes a branch at no cost and has the most to lose from further programs to compile.
        self.branch_free = all(device.platform != "cpu" for device in where.device_set)
        self.passes = FEW_PASSES if self.branch_free else LITTLE_PADDING
        # On a GPU the host would wait for the device in the middle of a round to hear which branch it is.
        self.switches = all(device.platform != "gpu" for device in where.device_set)
        self.usual_draws = (Draws.GREEDY, Draws.PLAIN) if self.branch_free else (Draws.ANY,)

        self._compiled: dict[tuple[RoundShape, _GuideShape], Compiled] = {}
        # Words that were read, by their shape.
        self._free = defaultdict[tuple[int, int], list[Array]](list)
        platform = next(iter(self._weights[0].sharding.device_set)).platform
        self._round, self._prefill = _jitted(platform)
        self.regroup = jax.jit(regroup, static_argnums=2)
        self.insert = jax.jit(insert, donate_argnums=0)
        self.empty = jax.jit(lambda batch, span: init_state(target, drafter, batch, span, dtype), static_argnums=(0, 1))

    @property
    def compiled_rounds(self) -> int:
        """Programs of rounds made so far."""
        return len(self._compiled)

    def replace_drafter(self, drafter: Drafter) -> None:
        """Use other weights of a drafter built alike; nothing is compiled again."""
        self._weights = jax.tree.leaves((self._target, drafter))

    def round(
        self, plan: RoundPlan, state: DecodeState, guide: Guide, draws: Draws = Draws.ANY
    ) -> tuple[DecodeState, Sent]:
        """`decode_round`, specialised to what is known of the laws' draws."""
        law = state.law
        state = replace(state, law=replace(law, draws=draws))
        shape = RoundShape(plan, state.position_B.shape[0], state.cache.span, draws)
        key = shape, _guide_shape(guide)
        if key not in self._compiled:
            self._compiled[key] = self.lower(plan, state, guide, draws).compile()
        block, features = guide.estimator.weights_KF.shape
        wanted = words_shape(shape.rows, block, features)
        free = self._free[wanted]
        over_BW = free.pop() if free else jnp.zeros(wanted, jnp.int32, device=state.position_B.sharding)
        state, words_BW = self._compiled[key](self._weights, state, guide, over_BW)
        if self.branch_free:
            # On its way as soon as it is there, and not only when the host asks for it.
            words_BW.copy_to_host_async()
        drafts = block if plan.drafts is None else plan.drafts
        sent = Sent(words_BW=words_BW, free=free, drafts=drafts, features=features)
        return replace(state, law=replace(state.law, draws=law.draws)), sent

    def compile_rounds(
        self, wanted: Iterable[tuple[RoundShape, Guide]], watch: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Compile rounds side by side, for guides like these; `watch` hears how many are done, of how many.

        One after the other, as they come up, would leave all cores but one without work.
        """
        every = {(shape, _guide_shape(guide)): guide for shape, guide in wanted}
        missing = {key: guide for key, guide in every.items() if key not in self._compiled}
        pending: dict[Future[Compiled], tuple[RoundShape, _GuideShape]] = {}
        counts = count(1)

        def keep(over: Iterable[Future[Compiled]]) -> None:
            for future in over:
                self._compiled[pending.pop(future)] = future.result()
                watch(next(counts), len(missing))

        pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix=COMPILING)
        try:
            for key, guide in missing.items():
                shape, _ = key
                state = jax.eval_shape(lambda shape=shape: self.empty(shape.rows, shape.span))
                lowered = self.lower(shape.plan, state, guide, shape.draws)
                pending[pool.submit(lowered.compile)] = key
                # Lowering all of them takes minutes where there are many: what is over meanwhile is told meanwhile.
                keep([future for future in pending if future.done()])
            keep(as_completed(pending))
        finally:
            # After Ctrl-C nobody wants the rest, nor to wait for what is being compiled.
            pool.shutdown(wait=False, cancel_futures=True)

    def lower(self, plan: RoundPlan, state: DecodeState, guide: Guide, draws: Draws) -> Lowered:
        """The program of a round, ahead of time: target, drafter, state and guide may all be shapes with shardings."""
        state = replace(state, law=replace(state.law, draws=draws))
        words = words_shape(state.position_B.shape[0], *guide.estimator.weights_KF.shape)
        over_BW = jax.ShapeDtypeStruct(words, jnp.int32, sharding=getattr(state.position_B, "sharding", None))
        return self._round.lower(self._structure, self._weights, plan, state, guide, over_BW)

    def prefill(self, state: DecodeState, window_BN: np.ndarray, start_B: np.ndarray, count_B: np.ndarray):
        """`round.prefill` of tokens and the tokens that follow them, as one window a row."""
        return self._prefill(self._structure, self._weights, state, window_BN, start_B, count_B)


@cache
def _first(structure: PyTreeDef) -> PyTreeDef:
    """The first of its equals: prefills compare it with itself, which takes a tenth of the time."""
    return structure


@cache
def _jitted(platform: str) -> tuple[Any, Any]:
    """Rounds and prefills. One of each for all models of a process: what is built alike is traced and compiled once."""

    def round_(
        structure: PyTreeDef, weights: list[Array], plan: RoundPlan, state: DecodeState, guide: Guide, over_BW: Array
    ):
        target, drafter = jax.tree.unflatten(structure, weights)
        state, out = decode_round(target, drafter, plan, state, guide)
        return state, written(out, over_BW)

    def prefill_(
        structure: PyTreeDef, weights: list[Array], state: DecodeState, window_BN: Array, start_B: Array, count_B: Array
    ):
        target, drafter = jax.tree.unflatten(structure, weights)
        return prefill(target, drafter, state, window_BN[:, :-1], window_BN[:, 1:], start_B, count_B)

    options = compiler_options(platform)
    return (
        jax.jit(round_, static_argnums=(0, 2), donate_argnums=(3, 5), compiler_options=options),
        jax.jit(prefill_, static_argnums=0, donate_argnums=2, compiler_options=options),
    )


_GuideShape = tuple[tuple[int, ...], bool]


def _guide_shape(guide: Guide) -> _GuideShape:
    """All that compiled rounds can differ by in their guides."""
    return guide.estimator.weights_KF.shape, guide.rates_N is None
