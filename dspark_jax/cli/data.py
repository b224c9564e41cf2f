"""Make training data: find or synthesize prompts, let the target answer them, remove what overlaps with test sets.

Everything is a recipe (`dspark data recipe` shows it) and can be killed and run again: what is done is kept.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import jax.numpy as jnp

from dspark_jax.cli import _endpoints, _pack, _prepare
from dspark_jax.cli._files import beside, refuse_same, say
from dspark_jax.cli._meter import Meter
from dspark_jax.core.signals import KEPT, NOTHING_KEPT, keeping
from dspark_jax.data.chat import BadRow, Row, parse_conversation, read_conversations, read_rows
from dspark_jax.data.decontaminate import TestSets, strings_in
from dspark_jax.data.generation import Answer, Generate, Request, Tokenizer
from dspark_jax.data.journal import Journal, write_whole
from dspark_jax.data.prompts import SeededPrompts, Selection, add_procedural, shuffled, wanted_prompts
from dspark_jax.data.recipe import DataRecipe, read_recipe, recipe_text
from dspark_jax.data.regenerate import Regeneration
from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.engine.arguments import at_least
from dspark_jax.engine.assembly import LoadedModel, add_model_arguments, load_model
from dspark_jax.training.overrides import apply_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    _prepare.add_arguments(actions.add_parser("prepare", help="read prompts out of chat files and public data sets"))

    synthesize = actions.add_parser("synthesize", help="let the target write prompts, and add procedural ones")
    _add_recipe(synthesize)
    _add_model(synthesize)
    _add_output(synthesize)
    synthesize.set_defaults(act=_synthesize)

    regenerate = actions.add_parser("regenerate", help="let the target answer the user turns of a chat file")
    _add_recipe(regenerate)
    _add_model(regenerate)
    _add_input(regenerate)
    _add_output(regenerate)
    regenerate.add_argument(
        "--temperature", nargs="+", type=float, metavar="T", help="one is given to each row (answers.temperatures)"
    )
    regenerate.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer (answers.max_new_tokens)")
    _endpoints.add_arguments(regenerate)
    regenerate.set_defaults(act=_regenerate)

    decontaminate = actions.add_parser("decontaminate", help="drop rows that share ten words in a row with test files")
    _add_input(decontaminate)
    _add_output(decontaminate)
    decontaminate.add_argument(
        "--tests", nargs="+", required=True, metavar="FILE", help="JSONL (every string in a row) or plain text"
    )
    decontaminate.set_defaults(act=_decontaminate)

    _pack.add_arguments(actions.add_parser("pack", help="tokenise conversations into packed rows for training"))

    show = actions.add_parser("recipe", help="print the recipe as JSON, to be kept or changed")
    _add_recipe(show)
    show.set_defaults(act=_show)


def run(args: argparse.Namespace) -> int:
    return args.act(args)


@keeping(lambda: KEPT)
def _synthesize(args: argparse.Namespace) -> int:
    recipe = _recipe(args)
    tests = TestSets.read(recipe.decontaminate)
    selection = Selection(recipe, tests)
    model = load_model(args, say)
    with Journal(beside(args.out, "attempts")) as journal:
        seeded = SeededPrompts(
            recipe,
            selection,
            generate=_generator(_slots(model, args), model.stop_ids),
            tokenizer=model.tokenizer,
            stop_ids=model.stop_ids,
            journal=journal,
        )
        with Meter("prompts", total=wanted_prompts(recipe)) as meter:
            for written in seeded.run():
                meter.show(len(selection.kept), written, "texts")
            add_procedural(recipe, selection)
    rows = ({"turns": list(prompt.turns), "source": prompt.source} for prompt in shuffled(selection.kept, recipe.seed))
    write_whole(args.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    write_whole(beside(args.out, "recipe", ".json"), recipe_text(recipe))
    say(f"{args.out}: {len(selection.kept):,} prompts of {wanted_prompts(recipe):,} wanted.")
    _say_counts("dropped", selection.dropped)
    return 0


@keeping(lambda: KEPT)
def _regenerate(args: argparse.Namespace) -> int:
    recipe = _recipe(args)
    answering = recipe.answers
    if args.temperature:
        answering = replace(answering, temperatures=tuple(args.temperature))
    if args.max_new_tokens is not None:
        answering = replace(answering, max_new_tokens=args.max_new_tokens)
    refuse_same(args.input, args.out)
    total = sum(1 for _ in read_rows(args.input))
    if not total:
        raise ValueError(f"{args.input} has no rows to answer")
    generate, tokenizer, max_len = _endpoints.connect(args) if args.endpoint else _own_engine(args)
    tokens, answered, as_it_was, reasons = 0, 0, 0, Counter()
    with Journal(args.out) as rows, Journal(beside(args.out, "rejected")) as rejected:
        regeneration = Regeneration(
            read_conversations(args.input),
            generate=generate,
            tokenizer=tokenizer,
            answered=rows,
            rejected=rejected,
            answering=answering,
            max_len=max_len,
        )
        with Meter("rows", total=total) as meter:
            for outcome in regeneration.outcomes():
                tokens += outcome.tokens
                answered += outcome.rejected is None
                as_it_was += outcome.as_it_was
                reasons.update([] if outcome.rejected is None else [outcome.rejected])
                already = regeneration.already
                meter.show(already + answered + reasons.total(), tokens, "tokens", already=already)
    say(
        f"{args.out}: {answered:,} rows answered with {tokens:,} tokens, {regeneration.already:,} were done before, "
        f"{reasons.total():,} rejected."
    )
    if as_it_was:
        say(f"{as_it_was:,} of the rows use tools and were kept as they are.")
    if reasons:
        say(f"The rejected rows are in {rejected.path}; the first: {next(iter(reasons))}")
        say("They are not tried again while that file is there.")
    return 0


@keeping(lambda: NOTHING_KEPT)
def _decontaminate(args: argparse.Namespace) -> int:
    refuse_same(args.input, args.out)
    tests = TestSets.read(args.tests)
    kept, dropped = [], []
    for row in read_rows(args.input):
        if (error := _unfit(row, tests)) is None:
            kept.append(row.text)
        else:
            dropped.append({"error": error, "text": row.text})
    write_whole(args.out, "".join(text + "\n" for text in kept))
    rejected = beside(args.out, "rejected")
    write_whole(rejected, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in dropped))
    say(f"{args.out}: {len(kept):,} rows kept; {len(dropped):,} dropped, with the reason in {rejected}.")
    if dropped:
        say(f"The first of them: {dropped[0]['error']}")
    return 0


def _unfit(row: Row | BadRow, tests: TestSets) -> str | None:
    """Why a row may not be trained on: it is no conversation, or a test set holds part of it."""
    if isinstance(row, BadRow):
        return row.error
    try:
        parse_conversation(row.value)
    except ValueError as error:
        return f"{row.where}: {error}"
    shared = next((run for text in strings_in(row.value) if (run := tests.shared_run(text))), None)
    return None if shared is None else f"{row.where}: shares {shared!r} with a test set"


def _show(args: argparse.Namespace) -> int:
    sys.stdout.write(recipe_text(_recipe(args)))
    return 0


def _own_engine(args: argparse.Namespace) -> tuple[Generate, Tokenizer, int]:
    model = load_model(args, say)
    return _generator(_slots(model, args), model.stop_ids), model.tokenizer, model.max_len


def _slots(model: LoadedModel, args: argparse.Namespace) -> DecodeSlots:
    return DecodeSlots(
        model.target,
        model.drafter,
        max_batch=model.max_batch,
        max_len=model.max_len,
        estimator=model.estimator,
        dtype=jnp.dtype(model.dtype),
        elastic=not args.fixed_shapes,
    )


def _generator(slots: DecodeSlots, stop_ids: frozenset[int]) -> Generate:
    """The slots behind the interface that data knows; what they compiled lasts over all calls."""

    def run(requests: Iterable[Request]) -> Iterator[Answer]:
        jobs = (
            Job(
                prompt=request.prompt,
                sampling=Sampling(temperature=request.temperature, top_p=request.top_p, seed=request.seed),
                max_new_tokens=request.max_new_tokens,
                stop_ids=stop_ids,
                tag=request,
            )
            for request in requests
        )
        for done in generate(slots, jobs):
            yield Answer(request=done.job.tag, tokens=done.tokens, finish=done.finish)

    return run


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", metavar="FILE", help="a recipe in JSON; fields it leaves out keep their defaults")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field, such as seeded.maths=2000"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    # A run that is killed and run again writes the same rows, whatever shares their batches: every draft is verified.
    add_model_arguments(parser, scheduling=False)
    parser.add_argument(
        "--batch",
        dest="max_batch",
        type=at_least(1),
        default=64,
        metavar="N",
        help="requests that decode together (%(default)s; an accelerator takes hundreds)",
    )
    parser.add_argument(
        "--fixed-shapes",
        action="store_true",
        help="hold the whole batch at --max-len from the start: far fewer programs to compile, for an accelerator",
    )


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--in", dest="input", required=True, metavar="FILE", help="JSONL rows of messages, conversations or turns"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="FILE", help="the JSONL file to write")


def _recipe(args: argparse.Namespace) -> DataRecipe:
    return apply_overrides(read_recipe(args.recipe) if args.recipe else DataRecipe(), args.set)


def _say_counts(what: str, counts: Counter[str]) -> None:
    for reason, count in counts.most_common():
        say(f"  {what} {count:,}: {reason}")
