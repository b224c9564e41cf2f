"""`dspark profile --topology`: a step curve from shapes alone."""

import argparse
import os
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

from dspark_jax.cli._meter import Meter
from dspark_jax.decoding.buckets import whole_span
from dspark_jax.decoding.measure import fill, plans, states
from dspark_jax.decoding.profile import Shape
from dspark_jax.decoding.profile_file import Profile
from dspark_jax.decoding.rejection import Rule
from dspark_jax.engine.assembly import ACCELERATOR_BATCH, NO_DRAFT, USUAL_LEN, shipped_drafter
from dspark_jax.engine.scheduling import profile_path
from dspark_jax.interop.drafters import load_config
from dspark_jax.targets.model import TargetSpec
from dspark_jax.training.compiler import compilers, require_libtpu
from dspark_jax.training.draft import DrafterConfig, DSparkShape, draft_config
from dspark_jax.training.known_targets import target_facts
from dspark_jax.training.roofline import Subject, fingerprint_of, predicted_round, tpu_kind

_SPANS = (256, 2048)

Say = Callable[[str], None]


def predict(args: argparse.Namespace, say: Say) -> tuple[Path, Profile]:
    """Where the profile of the flags' model on one device of args.topology was written, and the profile.

    Only config files are read: weights are shapes.
    """
    kind = tpu_kind(args.topology)
    require_libtpu()
    spec = target_facts(args.target).spec
    subject = Subject(
        kind=kind,
        spec=spec,
        drafter=_drafter(args, spec, say),
        dtype=args.dtype or "bfloat16",
        rule=Rule(args.rule),
    )
    block, max_batch = subject.drafter.block_size, args.max_batch or ACCELERATOR_BATCH
    longest = whole_span(args.max_len or min(spec.max_len, USUAL_LEN), block)
    spans = tuple(sorted({min(span, longest) for span in args.spans or _SPANS}))
    say(f"Compiling for one device of {args.topology}; nothing is measured ...")
    total = sum(len(plans(rows, block)) for rows, _ in states(max_batch, spans))
    with compilers(max(1, (os.cpu_count() or 1) // 2)) as pool, Meter("rounds", total=total) as meter:
        fingerprint = pool.submit(fingerprint_of, subject).result()
        path = args.out or profile_path(fingerprint, predicted=True)

        def rounds_of(rows: int, span: int) -> Iterator[tuple[Shape, float]]:
            count = len(plans(rows, block))
            yield from pool.map(predicted_round, repeat(subject), repeat(rows), repeat(span), range(count))

        found = fill(
            path,
            fingerprint,
            rounds_of,
            max_batch=max_batch,
            spans=spans,
            method=subject.method,
            predicted=True,
            watch=lambda done, already: meter.show(done, already=already),
            say=say,
        )
    return path, found


def _drafter(args: argparse.Namespace, spec: TargetSpec, say: Say) -> DrafterConfig:
    if args.draft == NO_DRAFT:
        raise ValueError("there is no drafter, so every round is the same: give one with --draft")
    directory = shipped_drafter(args.target) if args.draft is None else Path(args.draft).expanduser()
    if directory is not None:
        return load_config(directory, spec)
    say(f"No drafter is shipped for {args.target}: a DSpark drafter of the usual shape is taken.")
    return draft_config(DSparkShape(mask_token_id=0), spec)
