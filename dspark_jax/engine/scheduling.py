"""How much of what is drafted gets verified: the flags that say so, and the step curve that some policies follow."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.core.logs import NowAndThen
from dspark_jax.data.journal import require_writable
from dspark_jax.decoding.fingerprint import Fingerprint
from dspark_jax.decoding.measure import default_spans, plans, profile, states
from dspark_jax.decoding.profile import StepCurve
from dspark_jax.decoding.profile_file import Profile, load_profile
from dspark_jax.decoding.programs import Programs
from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.scheduler import EarlyStop, FixedLength, Policy, Threshold, TwoStep
from dspark_jax.drafters.base import Drafter
from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.engine.arguments import at_least, probability
from dspark_jax.interop.deepspec_config import DrafterConfig
from dspark_jax.interop.smollm2 import WRITABLE_CACHE, cache_root
from dspark_jax.targets.model import Target

NONE, MEASURE = "none", "measure"
_NO_CHOICE = "every draft"
NO_FLAGS: dict[str, Any] = {
    "policy": _NO_CHOICE,
    "confidence_threshold": None,
    "verify_length": None,
    "step_curve": None,
    "rule": Rule.TOKEN.value,
}
"""What `choose_scheduling` reads where no flags are offered: every draft is verified, and nothing said of it."""

_FOLLOWING: dict[str, Policy] = {"early-stop": EarlyStop(interpolate=True), "two-step": TwoStep()}
_POLICIES = ("fixed", "threshold", *_FOLLOWING)

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """What slots are told about verification."""

    policy: Policy = field(default_factory=FixedLength)
    curve: StepCurve | None = None
    rule: Rule = Rule.TOKEN


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is to be served; `confident` as check_scheduling has it."""

    target: Target
    drafter: Drafter
    dtype: str
    confident: bool


def add_scheduling_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `choose_scheduling` reads."""
    parser.add_argument(
        "--policy",
        choices=_POLICIES,
        help="how many drafts are verified: a fixed number (fixed), those before the first of low confidence "
        "(threshold), or as many as pay at the current load (two-step, early-stop), which needs a step curve; by "
        "default two-step where there is one, else fixed",
    )
    parser.add_argument(
        "--verify-length", type=at_least(0), metavar="K", help="drafts that --policy fixed verifies (by default all)"
    )
    parser.add_argument(
        "--confidence-threshold",
        type=probability,
        metavar="P",
        help="verify only the drafts before the first whose confidence is under P (--policy threshold)",
    )
    parser.add_argument(
        "--step-curve",
        metavar="FILE|none|measure",
        help="how long rounds take: a file of `dspark profile`, none, or measured before serving starts; by default "
        "what `dspark profile` last measured for this model on this machine",
    )
    add_rule_argument(parser)


def add_rule_argument(parser: argparse.ArgumentParser) -> None:
    """--rule alone."""
    parser.add_argument(
        "--rule",
        choices=[rule.value for rule in Rule],
        default=Rule.TOKEN.value,
        help="how drafts are judged, one by one or as a block, which keeps more of them (%(default)s)",
    )


def knows_chances(config: DrafterConfig | None, *, calibrated: bool) -> bool:
    """Whether anything is known of a draft's chances: by the drafter's confidence head, or by a calibration."""
    return calibrated or (isinstance(config, DSparkConfig) and config.confidence)


def check_scheduling(args: argparse.Namespace, *, block: int, confident: bool) -> str | None:
    """The policy that the flags name or imply; ValueError where they do not go together or not with the drafter.

    block: drafts a round, 0 without a drafter. confident: see knows_chances.
    """
    name = args.policy
    for flag, value, belongs_to in (
        ("--confidence-threshold", args.confidence_threshold, "threshold"),
        ("--verify-length", args.verify_length, "fixed"),
    ):
        if value is not None and name not in (None, belongs_to):
            raise ValueError(f"{flag} belongs to --policy {belongs_to}, not to {name}: give one of them")
        name = belongs_to if value is not None else name
    if name == "threshold" and args.confidence_threshold is None:
        raise ValueError("--policy threshold needs --confidence-threshold P")
    if args.verify_length is not None and args.verify_length > block:
        raise ValueError(f"--verify-length {args.verify_length} is more than the drafter's block of {block}")
    follows = name in _FOLLOWING or args.step_curve not in (None, NONE)
    if follows and name not in (None, *_FOLLOWING):
        raise ValueError(f"--step-curve is for --policy two-step and early-stop; {name} follows no curve")
    if name in _FOLLOWING and args.step_curve == NONE:
        raise ValueError(f"--policy {name} needs a step curve, and --step-curve none forgoes it: give one of them")
    if (follows or name == "threshold") and not confident:
        flag = "--confidence-threshold" if name == "threshold" else f"--policy {name}" if name else "--step-curve"
        raise ValueError(f"{flag} needs a drafter with a confidence head or a calibration: there is none")
    return name


def check_curve(args: argparse.Namespace, name: str | None, fingerprint: Callable[[], Fingerprint]) -> None:
    """ValueError, OSError before anything is loaded for the step curve that choose_scheduling would refuse.

    name: what check_scheduling returned. fingerprint: asked for only where the flags need a curve that is there.
    """
    given = args.step_curve
    if name not in (None, *_FOLLOWING) or given in (NONE, MEASURE) or (name is None and given is None):
        return
    mine = fingerprint()
    path = profile_path(mine) if given is None else Path(given).expanduser()
    _require(_read(path, given, mine, must=True, say=lambda line: None), name)


def choose_scheduling(
    args: argparse.Namespace, subject: Subject, *, max_batch: int, max_len: int, say: Say
) -> Scheduling:
    """What the flags ask for, and where they leave it open the best that this machine is ready for.

    ValueError, OSError with a sentence for what check_scheduling refuses, and for a curve of something else.
    """
    rule, block = Rule(args.rule), subject.drafter.block_size
    name = check_scheduling(args, block=block, confident=subject.confident)
    if name == "threshold":
        least = args.confidence_threshold
        say(f"Drafts before the first whose confidence is under {least:g} are verified (threshold).")
        return Scheduling(policy=Threshold(confidence=least), rule=rule)
    if name in ("fixed", _NO_CHOICE) or block == 0:
        length = args.verify_length
        if name == "fixed" and block > 0:
            verified = "Every draft is verified" if length in (None, block) else f"Drafts verified a round: {length}"
            say(f"{verified} (fixed).")
        return Scheduling(policy=FixedLength(length=length), rule=rule)
    curve = None
    if subject.confident and args.step_curve != NONE:
        curve = _curve(args.step_curve, subject, rule, max_batch, max_len, must=name is not None, say=say)
    _require(curve, name)
    if curve is None:
        unmeasured = subject.confident and args.step_curve != NONE
        say(f"Every draft is verified (fixed{'; `dspark profile` lets that follow the load' if unmeasured else ''}).")
        return Scheduling(rule=rule)
    say(f"Verification follows the load ({name or 'two-step'}).")
    return Scheduling(policy=_FOLLOWING[name or "two-step"], curve=curve, rule=rule)


def profile_path(fingerprint: Fingerprint, *, predicted: bool = False) -> Path:
    """Where the step curve of this model on this machine is kept. A prediction never takes a measurement's place."""
    return _kept_in() / f"{fingerprint.digest}{'.predicted' if predicted else ''}.json"


def require_kept(out: Path | None = None) -> None:
    """OSError with a remedy where no step curve can be written to `out`, by default to the cache."""
    if out is None:
        require_writable(_kept_in(), WRITABLE_CACHE)
    else:
        require_writable(out.parent, "name another file with --out")


def _kept_in() -> Path:
    return cache_root() / "profiles"


def _curve(
    given: str | None, subject: Subject, rule: Rule, max_batch: int, max_len: int, *, must: bool, say: Say
) -> StepCurve | None:
    fingerprint = Fingerprint.of(subject.target, subject.drafter, dtype=subject.dtype, rule=rule)
    path = profile_path(fingerprint) if given in (None, MEASURE) else Path(given).expanduser()
    if given == MEASURE:
        return _measured(path, fingerprint, subject, max_batch, max_len, say).curve
    found = _read(path, given, fingerprint, must=must, say=say)
    if found is None:
        return None
    if found.predicted:
        say(f"{path} was predicted, not measured: {found.method}.")
    largest = max(shape.rows for shape in found.curve.measured)
    if largest < max_batch:
        most = "1 request" if largest == 1 else f"{largest} requests"
        say(f"{path} holds rounds of at most {most}; rounds of more are taken to last as long.")
    return found.curve


def _read(path: Path, given: str | None, fingerprint: Fingerprint, *, must: bool, say: Say) -> Profile | None:
    """What `path` holds; None where nothing has to be there and nothing of use is."""
    if given is None and not path.exists():
        return None
    if not path.exists():
        raise FileNotFoundError(f"--step-curve {given}: there is no such file; `dspark profile` writes one")
    try:
        return load_profile(path, fingerprint, predicted=given is not None)
    except ValueError as error:
        if given is not None or must:
            raise
        say(f"{error}.")
        return None


def _require(curve: Profile | StepCurve | None, name: str | None) -> None:
    if curve is None and name is not None:
        raise ValueError(
            f"--policy {name} needs a step curve, and none was measured for this model on this machine: "
            "run `dspark profile`, or give --step-curve measure"
        )


def _measured(
    path: Path, fingerprint: Fingerprint, subject: Subject, max_batch: int, max_len: int, say: Say
) -> Profile:
    programs = Programs(subject.target, subject.drafter, dtype=jnp.dtype(subject.dtype))
    spans = default_spans(max_len, fingerprint.block, on_cpu=jax.default_backend() == "cpu")
    say(f"Measuring rounds of up to {max_batch} requests; what is measured is kept in {path} ...")
    total = sum(len(plans(rows, fingerprint.block)) for rows, _ in states(max_batch, spans))
    now_and_then, measured = NowAndThen(say), 0

    def watch(done: int, _already: int) -> None:
        nonlocal measured
        measured = done

    def tell(text: str) -> None:
        now_and_then(f"{measured} of {total} kinds of round are measured, {text} ...")

    return profile(path, fingerprint, programs, max_batch=max_batch, spans=spans, watch=watch, tell=tell, say=say)
