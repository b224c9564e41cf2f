"""How good a drafter is: loss terms on held-out text, and accepted lengths of real speculative decoding."""

import math
from dataclasses import dataclass
from functools import partial
from itertools import islice

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax.core.mesh import sharding
from dspark_jax.data.pipeline import Rows
from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.decoding.stats import DecodeStats
from dspark_jax.targets.model import Target
from dspark_jax.training.draft import Drafter
from dspark_jax.training.hosts import gathered, on_devices, own_mesh
from dspark_jax.training.report import Values, summarise
from dspark_jax.training.step import StepConfig, cast, measure, named

_SLOTS = 32
_KEY = 0


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """every: steps between evaluations; batches: held-out batches read; prompts: how many are decoded, at each of
    the temperatures, for new_tokens each."""

    every: int = 500
    batches: int = 8
    prompts: int = 16
    new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)

    def __post_init__(self):
        for name in ("every", "batches", "prompts", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"evaluation.{name} must be at least 1, not {getattr(self, name)}")
        if not self.temperatures or not all(0.0 <= temperature < math.inf for temperature in self.temperatures):
            raise ValueError(f"evaluation.temperatures are one or more numbers from 0 up, not {self.temperatures}")


class Evaluator:
    """Compiles once for a target; called with the masters of a drafter as training goes on.

    Losses are measured by all processes together, with `target`; each decodes for itself, with its own.
    """

    def __init__(
        self,
        target: Target,
        own_target: Target,
        batches: grain.MapDataset,
        prompts: list[tuple[int, ...]],
        *,
        config: EvaluationConfig,
        step: StepConfig,
        mesh: Mesh,
        stop_ids: frozenset[int],
        max_len: int,
    ):
        self._target, self._own_target, self._batches, self._prompts = target, own_target, batches, prompts
        self._config, self._step, self._stop_ids, self._max_len = config, step, stop_ids, max_len
        self._batch_sharding = sharding(mesh, "batch")
        self._measure = jax.jit(partial(measure, config=step), out_shardings=sharding(mesh))
        self._cast = jax.jit(partial(cast, dtype=step.dtype))
        self._slots: DecodeSlots | None = None

    def __call__(self, masters: Drafter) -> Values:
        """The loss, its terms, accept_K and top1_K over the held-out batches; accepted_length_tT for each temperature
        T, bonus included."""
        values = self._losses(masters)
        drafter = gathered(self._cast(masters), own_mesh())
        if self._slots is None:
            self._slots = DecodeSlots(
                self._own_target,
                drafter,
                max_batch=min(_SLOTS, max(1, len(self._prompts))),
                max_len=self._max_len,
                dtype=self._step.dtype,
                elastic=False,
            )
        else:
            self._slots.replace_drafter(drafter)
        for temperature in self._config.temperatures:
            values[f"accepted_length_t{temperature:g}"] = self.decode(self._slots, temperature).accepted_length
        return values

    def decode(self, slots: DecodeSlots, temperature: float) -> DecodeStats:
        """The counters of all prompts, decoded with the slots' drafter."""
        jobs = (
            Job(
                prompt=prompt,
                sampling=Sampling(temperature=temperature, seed=seed),
                max_new_tokens=self._config.new_tokens,
                stop_ids=self._stop_ids,
            )
            for seed, prompt in enumerate(self._prompts)
        )
        return sum((completion.stats for completion in generate(slots, jobs)), DecodeStats())

    def _losses(self, masters: Drafter) -> Values:
        # The same anchors every time, so that two evaluations differ by the drafter alone.
        keys = jax.random.split(jax.random.key(_KEY), len(self._batches))
        pairs = zip(self._batches, keys, strict=True)
        terms = [
            self._measure(masters, self._target, on_devices(batch, self._batch_sharding), key) for batch, key in pairs
        ]
        values = summarise([named(part) for part in terms])
        values.pop("accepted_length", None)
        values["loss"] = float(self._step.objective.loss(jax.tree.map(lambda *parts: sum(parts), *terms)))
        return values


def mean_accepted_length(values: Values) -> float:
    """What checkpoints are judged by: the mean over the temperatures that were decoded at."""
    lengths = [value for name, value in values.items() if name.startswith("accepted_length_t")]
    return sum(lengths) / len(lengths)


def held_out_prompts(store: Rows, rows: np.ndarray, count: int, longest: int) -> list[tuple[int, ...]]:
    """What comes before the first learnt token of up to `count` held-out documents, where that is at most `longest`."""
    documents = (document for row in rows for document in store.documents(row))
    prompts = (tuple(document.tokens[: np.argmax(document.loss_mask)].tolist()) for document in documents)
    return list(islice((prompt for prompt in prompts if 0 < len(prompt) <= longest), count))
