"""Measures the step curve: rounds of every plan that the two-step scheduler may choose, in every state it may hold."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dspark_jax.core.signals import keeping
from dspark_jax.decoding.buckets import SMALLEST_SPAN, row_bucket, whole_span
from dspark_jax.decoding.confidence import Estimator
from dspark_jax.decoding.fingerprint import Fingerprint
from dspark_jax.decoding.planner import two_step_plans
from dspark_jax.decoding.profile import Shape, StepCurve
from dspark_jax.decoding.profile_file import Profile, load_profile, save_profile
from dspark_jax.decoding.programs import Programs, RoundShape
from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.round import DecodeState, RoundPlan
from dspark_jax.decoding.scheduler import Guide, TwoStep
from dspark_jax.ops.sampling import Draws

REPEATS = 5
_IN_A_ROW = 16
PARTIAL = ".partial"

_AND = "; also "

Say = Callable[[str], None]
Watch = Callable[[int, int], None]
"""Hears how many kinds of round have been measured, and how many of them by an earlier run."""


def default_spans(max_len: int, block: int, *, on_cpu: bool) -> tuple[int, ...]:
    """Spans to measure for requests of up to max_len tokens. Time is nearly linear in the span, so a few will do."""
    wanted = (SMALLEST_SPAN, 2048) if on_cpu else (SMALLEST_SPAN, 2048, 8192)
    return tuple(sorted({min(span, whole_span(max_len, block)) for span in wanted}))


def row_buckets(max_batch: int) -> tuple[int, ...]:
    """Row counts that a state of up to max_batch requests takes."""
    return tuple(sorted({row_bucket(rows, max_batch) for rows in range(1, max_batch + 1)}))


def states(max_batch: int, spans: Sequence[int]) -> list[tuple[int, int]]:
    """(rows, span) of everything that is measured."""
    return [(rows, span) for rows in row_buckets(max_batch) for span in spans]


def plans(rows: int, block: int, rule: Rule = Rule.TOKEN) -> list[tuple[RoundPlan, int]]:
    """The rounds that are measured in such a state, with the tokens they verify."""
    return two_step_plans(rows, block, TwoStep(), rule)


def measure(
    programs: Programs,
    rows: int,
    span: int,
    *,
    block: int,
    rule: Rule,
    estimator: Estimator | None = None,
    repeats: int = REPEATS,
    tell: Say = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[Shape, float]]:
    """Seconds of a round, drafting included, of every plan for states of this shape.

    `estimator`: what confidences come from; the head alone by default. On an accelerator rounds are timed as they are
    served, a few in a row after one of their kind, each read while the next one runs, from the end of one to the end
    of another: how long one alone takes is mostly the way to the device and back. Shapes are read off what ran, not
    off what was asked for. `tell` hears what is being done meanwhile.
    """
    guide = Guide.unguided(rows, block)
    guide = guide if estimator is None else replace(guide, estimator=estimator)
    kinds = [plan for plan, _ in plans(rows, block, rule)]
    draws = Draws.PLAIN if programs.branch_free else Draws.ANY
    programs.compile_rounds(
        [(RoundShape(plan, rows, span, draws), guide) for plan in kinds],
        lambda done, total: tell(f"{done} of the next {total} compiled"),
    )
    # The first round after others of another program may take longer.
    room = span // (block + 1)
    untimed = min(int(programs.branch_free), room - 1)
    in_a_row = min(_in_a_row(programs), room - untimed)
    state = programs.empty(rows, span)

    def run(plan: RoundPlan) -> tuple[DecodeState, Shape, float]:
        after = jax.block_until_ready(_mixed(state, (untimed + in_a_row) * (block + 1)))
        ends = [clock()]
        after, out = programs.round(plan, after, guide, draws)
        for _ in range(untimed + in_a_row - 1):
            before = out
            after, out = programs.round(plan, after, guide, draws)
            before.read()
            ends.append(clock())
        said = out.read()
        jax.block_until_ready(after)
        ends.append(clock())
        seconds = (ends[-1] - ends[untimed]) / in_a_row
        ran_rows, width = said.tokens_BN.shape
        verified = ran_rows + int(np.sum(said.verified_B))
        return after, Shape(ran_rows, after.cache.span, verified, width - 1), seconds

    shapes: dict[RoundPlan, Shape] = {}
    for plan in kinds:
        # The first time allocates.
        state, shapes[plan], _ = run(plan)
    turns: list[dict[RoundPlan, float]] = []
    all_turns = _turns(programs, repeats)
    for turn in range(all_turns):
        # There and back, so that a machine that slows down or speeds up meanwhile favours none.
        turns.append({})
        for plan in kinds[:: -1 if turn % 2 else 1]:
            state, shapes[plan], turns[-1][plan] = run(plan)
        tell(f"the next {len(kinds)} timed {turn + 1} of {all_turns} times")
    seconds_NP = np.array([[turn[plan] for plan in kinds] for turn in turns])
    yield from zip(shapes.values(), typical_seconds(seconds_NP).tolist(), strict=True)


def typical_seconds(seconds_NP: Float[np.ndarray, "N P"]) -> Float[np.ndarray, "P"]:
    """What each of P kinds of round takes, of N turns in which each ran once.

    The median is of how a round compares with its turn, since others on the machine slow whole turns down: so the
    proportions of rounds came out half as scattered on a busy CPU as by the median of seconds.
    """
    logs_NP = np.log(seconds_NP)
    pace_N1 = logs_NP.mean(axis=1, keepdims=True)
    return np.exp(np.median(logs_NP - pace_N1, axis=0) + np.median(pace_N1))


def profile(
    path: Path,
    fingerprint: Fingerprint,
    programs: Programs,
    *,
    max_batch: int,
    spans: Sequence[int],
    repeats: int = REPEATS,
    watch: Watch = lambda done, already: None,
    tell: Say = lambda text: None,
    say: Say = lambda line: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Measures all states of up to max_batch rows, and writes `path`. `tell` hears what is being done within a state.

    What an interrupted run of the same method measured lies beside `path` and is not measured again. Other states that
    `path` knows stay, and `say` hears of it.
    """
    in_a_row = _in_a_row(programs)
    what = "rounds" if in_a_row == 1 else f"runs of {in_a_row} rounds after one of their kind"
    return fill(
        path,
        fingerprint,
        lambda rows, span: measure(
            programs,
            rows,
            span,
            block=fingerprint.block,
            rule=Rule(fingerprint.rule),
            repeats=repeats,
            tell=tell,
            clock=clock,
        ),
        max_batch=max_batch,
        spans=spans,
        method=f"median of {_turns(programs, repeats)} {what} beside their turn's mean, all kinds in turn, after one "
        "that warms up, over contexts of all lengths",
        watch=watch,
        say=say,
    )


def fill(
    path: Path,
    fingerprint: Fingerprint,
    rounds_of: Callable[[int, int], Iterator[tuple[Shape, float]]],
    *,
    max_batch: int,
    spans: Sequence[int],
    method: str,
    predicted: bool = False,
    watch: Watch = lambda done, already: None,
    say: Say = lambda line: None,
) -> Profile:
    """Gathers the rounds of every (rows, span), small states first, in a file that takes `path`'s place at the end.

    ValueError where `path` is no step curve of this fingerprint: it is not written over.
    """
    partial = path.with_name(path.name + PARTIAL)
    before = _read(path, fingerprint, "name another file with --out")
    if before is not None and before.predicted != predicted:
        kind = "predicted, not measured" if before.predicted else "measured, not predicted"
        raise ValueError(f"{path} was {kind}: remove it, or name another file with --out")
    interrupted = _read(partial, fingerprint, "remove what an interrupted run left there")
    measured: dict[Shape, float] = {}
    if interrupted is not None and (interrupted.method, interrupted.predicted) == (method, predicted):
        measured |= interrupted.curve.measured
    elif interrupted is not None:
        count, way = len(interrupted.curve.measured), interrupted.method
        say(f"The {count} kinds of round that an interrupted run timed in another way ({way}) are timed anew.")
    done = already = 0
    with keeping(lambda: _kept(done)):
        for rows, span in states(max_batch, spans):
            if any((shape.rows, shape.span) == (rows, span) for shape in measured):
                done += len(plans(rows, fingerprint.block))
                already = done
                watch(done, already)
                continue
            found: dict[Shape, float] = {}
            for shape, seconds in rounds_of(rows, span):
                found[shape] = seconds
                watch(done + len(found), already)
            measured |= found
            save_profile(partial, _profile(fingerprint, measured, method, predicted))
            done += len(found)
    result = _profile(fingerprint, measured, method, predicted)
    if before is not None:
        result = _merged(before, result)
    wanted = set(states(max_batch, spans))
    if others := sum((shape.rows, shape.span) not in wanted for shape in result.curve.measured):
        say(f"{path} keeps {others} other kinds of round that earlier runs left.")
    save_profile(path, result)
    partial.unlink(missing_ok=True)
    return result


def _kept(done: int) -> str:
    if not done:
        return "Nothing was measured to its end yet."
    return f"The {done} kinds of round measured so far are kept: the same command goes on from there."


def _read(path: Path, fingerprint: Fingerprint, remedy: str) -> Profile | None:
    """What lies there already; None where there is nothing. ValueError where it is of no use."""
    if not path.exists():
        return None
    try:
        return load_profile(path, fingerprint, predicted=True)
    except ValueError as error:
        raise ValueError(f"{error}, or {remedy}") from None


def _merged(old: Profile, new: Profile) -> Profile:
    """The new one with the states that only the old one has."""
    renewed = {(shape.rows, shape.span) for shape in new.curve.measured}
    kept = {shape: s for shape, s in old.curve.measured.items() if (shape.rows, shape.span) not in renewed}
    methods = (new.method, *(old.method.split(_AND) if kept else ()))
    return replace(new, curve=StepCurve(kept | dict(new.curve.measured)), method=_AND.join(dict.fromkeys(methods)))


def _profile(fingerprint: Fingerprint, measured: dict[Shape, float], method: str, predicted: bool) -> Profile:
    return Profile(fingerprint=fingerprint, curve=StepCurve(measured), method=method, predicted=predicted)


def _turns(programs: Programs, repeats: int) -> int:
    """Rounds of milliseconds compile far longer than they are measured: a steadier curve costs next to nothing."""
    return repeats * (4 if programs.branch_free else 2)


def _in_a_row(programs: Programs) -> int:
    return _IN_A_ROW if programs.branch_free else 1


def _mixed(state: DecodeState, room: int) -> DecodeState:
    """Every row sampled at temperature 1. Their contexts are evenly spread, as those of mixed requests are, and the
    longest leaves `room` positions of the span."""
    rows, span = state.position_B.shape[0], state.cache.span
    return replace(
        state,
        position_B=jnp.arange(1, rows + 1, dtype=jnp.int32) * (span - room) // rows,
        law=replace(state.law, temperature_B=jnp.ones(rows, jnp.float32)),
    )
