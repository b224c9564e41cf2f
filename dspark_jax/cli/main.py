"""`dspark VERB`: finds the verb's module, reads its flags, turns its errors into one sentence."""

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from dspark_jax.core.logs import print_once
from dspark_jax.core.signals import interruptible, unmasked

USAGE_ERROR = 2


def verbs() -> dict[str, str]:
    """Every verb with the first line of its docstring. A verb is a module of this package; none is imported here."""
    files = sorted(Path(__file__).parent.glob("[!_]*.py"))
    return {file.stem: _summary(file) for file in files if file.stem != "main"}


def main(argv: Sequence[str] | None = None) -> int | None:
    """Runs a verb; its exit code, 2 for what the user can mend, 130 after Ctrl-C and 143 after SIGTERM."""
    return interruptible(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def _main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="dspark", description="Lossless speculative decoding with DSpark drafters, in JAX."
    )
    commands = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    known = verbs()
    parsers = {verb: commands.add_parser(verb, help=line, description=line) for verb, line in known.items()}
    if not argv or argv[0] not in known:
        parser.parse_args(argv)
        raise AssertionError("argparse accepts no unknown verb")
    module = importlib.import_module(f"dspark_jax.cli.{argv[0]}")
    module.add_arguments(parsers[argv[0]])
    args = parser.parse_args(argv)
    print_once()
    try:
        with unmasked():
            return module.run(args)
    except OSError as error:
        about = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        print(f"dspark {argv[0]}: {about}", file=sys.stderr)
        return USAGE_ERROR
    except ValueError as error:
        print(f"dspark {argv[0]}: {error}", file=sys.stderr)
        return USAGE_ERROR


def _summary(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip(".")
