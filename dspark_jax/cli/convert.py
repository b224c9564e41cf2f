"""Convert a drafter of DeepSpec, Speculators, SpecForge, z-lab or DeepSeek-V4 to DeepSpec's or Speculators' layout.

What its config.json or its tensors say and the other layout cannot, is refused by name; nothing is made up.
"""

import argparse
import sys
from pathlib import Path

from dspark_jax.interop.deepspec import save_drafter
from dspark_jax.interop.drafters import load_drafter, stored_dtype
from dspark_jax.interop.huggingface import load_vocabulary, read_spec, resolve
from dspark_jax.interop.layouts import layout_of
from dspark_jax.interop.speculators import save_speculators
from dspark_jax.interop.tensor_files import read_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in", dest="input", required=True, type=Path, metavar="DIR", help="the drafter to read")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the directory to write, new or empty")
    parser.add_argument("--to", required=True, choices=("deepspec", "speculators"), help="the layout to write")
    parser.add_argument(
        "--target",
        metavar="NAME|DIR|HUB_ID",
        help="the model that the drafter drafts for: its sizes are checked, and DeepSpec files and Eagle3 "
        "ones get copies of its embedding and LM head; needed where the input does not name it or its layers",
    )


def run(args: argparse.Namespace) -> int:
    if args.input.resolve() == args.out.resolve():
        raise ValueError(f"--in and --out are both {args.out}: write to another directory")
    fields = read_json(args.input / "config.json")
    layout = layout_of(fields).name
    target = None if args.target is None else resolve(args.target)
    dtype = stored_dtype(args.input)
    spec, vocabulary = (None, None) if target is None else (read_spec(target), load_vocabulary(target, dtype))
    drafter = load_drafter(args.input, dtype, target_spec=spec, vocabulary=vocabulary)
    target_fields = {} if target is None else read_json(target / "config.json")
    if args.to == "deepspec":
        extra = target_fields | (fields if layout == "deepspec" else {})
        save_drafter(args.out, drafter, extra_config=extra, vocabulary=vocabulary)
    else:
        verifier, architectures = _verifier(args, fields, target_fields)
        save_speculators(
            args.out,
            drafter,
            verifier=verifier,
            verifier_architectures=architectures,
            target_config=target_fields or fields,
            vocabulary=vocabulary,
        )
    kind = type(drafter).__name__
    print(f"{args.out}: the {kind} drafter of {args.input}, from {layout} to {args.to}", file=sys.stderr)
    if args.to == "deepspec" and target is None:
        print(
            "The file has no copies of the target's embedding and LM head, which DeepSpec itself wants: "
            "give --target to have them.",
            file=sys.stderr,
        )
    return 0


def _verifier(args: argparse.Namespace, fields: dict, target_fields: dict) -> tuple[str, list[str]]:
    """The target's name and architectures: what was asked for, or what a Speculators file says."""
    if args.target is not None:
        return args.target, target_fields.get("architectures") or []
    stored = (fields.get("speculators_config") or {}).get("verifier") or {}
    if not stored.get("name_or_path"):
        raise ValueError("a Speculators file names its verifier: give --target")
    return stored["name_or_path"], stored.get("architectures") or []
