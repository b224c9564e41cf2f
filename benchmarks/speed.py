"""Tokens per second side by side in one process: drafted, autoregressive, and `transformers`.

    python benchmarks/speed.py --prompts DIR [--limit 2] [--batch 1 8] [--max-new-tokens 128] [--json speed.json]

The same prompts, weights and dtype for all. `transformers` generates plainly and by prompt lookup (drafts copied from
the prompt; one prompt at a time is all it takes). Each prompt is answered once to warm up, which is the first pass of
the table and holds what is compiled, then `--repeats` times, the methods in turn; a method's rate is that of its median
repeat. The time to a first token is that of one new token for one prompt, the median over prompts, after the warm-up.
`transformers` needs torch (extra `bench`) and is left out, with a line that says so, where torch is missing.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from prompts import read_sets

from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.drafters.base import Drafter, NoDrafter
from dspark_jax.engine.assembly import LoadedModel, add_model_arguments, load_model
from dspark_jax.interop.huggingface import resolve

LONGEST = 1024
LOOKED_UP = 10
"""Drafts of prompt lookup, which `transformers` leaves to the user."""

Prompts = Sequence[tuple[int, ...]]
Method = Callable[[Prompts, float, int, int], tuple[int, int]]
"""(prompts, temperature, seed, new tokens at most) -> (tokens made, rounds of all prompts or 0)."""


def main() -> int:
    args = _parser().parse_args()
    model = load_model(args, lambda line: print(line, file=sys.stderr))
    longest = min(model.max_len, LONGEST)
    prompts = [
        tuple(model.tokenizer.encode_chat([{"role": "user", "content": prompt}]))
        for prompts in read_sets(args.prompts, args.limit).values()
        for prompt in prompts
    ]
    prompts = [prompt for prompt in prompts if len(prompt) + args.max_new_tokens <= longest]
    if not prompts:
        raise SystemExit(
            f"speed: no prompt in {args.prompts} leaves room for {args.max_new_tokens} of {longest} tokens"
        )
    plain = _transformers(model, args) if importlib.util.find_spec("torch") else None
    if plain is None:
        print("torch is not installed: `transformers` is left out", file=sys.stderr)
    rows = []
    for batch in args.batch:
        if batch > 1 and len(prompts) < 4 * batch:
            print(f"speed: with {len(prompts)} prompts many of {batch} places are empty: see --limit", file=sys.stderr)
        methods = {
            "drafted": _ours(model, model.drafter, batch, longest),
            "autoregressive": _ours(model, NoDrafter(), batch, longest),
        }
        if plain is not None:
            methods["transformers"] = plain({}, batch)
            if batch == 1:
                methods["transformers, prompt lookup"] = plain({"prompt_lookup_num_tokens": LOOKED_UP}, 1)
        for temperature in args.temperatures:
            rates = _measure(methods, prompts, temperature, args)
            rows += [{"batch": batch, "temperature": temperature, "method": name, **rates[name]} for name in methods]
    _print_table(rows)
    if args.json:
        facts = {
            "device": jax.devices()[0].device_kind,
            "dtype": model.dtype,
            "prompts": len(prompts),
            "jax": jax.__version__,
        }
        args.json.write_text(json.dumps(facts | {"rows": rows}, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Tokens per second, side by side.")
    add_model_arguments(parser, scheduling=False)
    parser.set_defaults(max_batch=1)
    parser.add_argument("--prompts", type=Path, required=True, help="a directory with one JSONL file of prompts a set")
    parser.add_argument("--limit", type=int, default=2, help="prompts a set (%(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="prompts answered together (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    return parser


def _ours(model: LoadedModel, drafter: Drafter, batch: int, longest: int) -> Method:
    elastic = jax.default_backend() == "cpu"
    slots = DecodeSlots(
        model.target, drafter, max_batch=batch, max_len=longest, dtype=jnp.dtype(model.dtype), elastic=elastic
    )

    def answer(prompts: Prompts, temperature: float, seed: int, most: int) -> tuple[int, int]:
        jobs = (
            Job(
                prompt=prompt,
                sampling=Sampling(temperature=temperature, seed=seed),
                max_new_tokens=most,
                stop_ids=model.stop_ids,
            )
            for prompt in prompts
        )
        done = list(generate(slots, jobs))
        return sum(len(each.tokens) + (each.finish == "stop") for each in done), sum(each.stats.rounds for each in done)

    return answer


def _transformers(model: LoadedModel, args: argparse.Namespace) -> Callable[[dict, int], Method]:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    network = AutoModelForCausalLM.from_pretrained(resolve(args.target), dtype=getattr(torch, model.dtype)).to(device)
    padding = min(model.stop_ids)

    def method(options: dict, batch: int) -> Method:
        def together(prompts: Prompts, law: dict, most: int) -> tuple[int, int]:
            longest = max(map(len, prompts))
            padded = [(padding,) * (longest - len(prompt)) + prompt for prompt in prompts]
            seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
            with torch.inference_mode():
                out = network.generate(
                    torch.tensor(padded, device=device),
                    attention_mask=torch.tensor(seen, device=device),
                    max_new_tokens=most,
                    eos_token_id=sorted(model.stop_ids),
                    pad_token_id=padding,
                    **law,
                    **options,
                )
            # How many passes prompt lookup took is not told.
            return sum(_until_stop(row, model.stop_ids) for row in out[:, longest:].tolist()), 0

        def answer(prompts: Prompts, temperature: float, seed: int, most: int) -> tuple[int, int]:
            torch.manual_seed(seed)
            sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            law = sampled if temperature else {"do_sample": False}
            made = [together(prompts[i : i + batch], law, most) for i in range(0, len(prompts), batch)]
            return sum(tokens for tokens, _ in made), sum(rounds for _, rounds in made)

        return answer

    return method


def _until_stop(tokens: list[int], stop_ids: frozenset[int]) -> int:
    """How many there are, the first stop included."""
    return next((index + 1 for index, token in enumerate(tokens) if token in stop_ids), len(tokens))


def _measure(
    methods: dict[str, Method], prompts: Prompts, temperature: float, args: argparse.Namespace
) -> dict[str, dict[str, float | None]]:
    warm_up, first = {}, {}
    for name, method in methods.items():
        begin = time.perf_counter()
        # Ours compiles a program a shape, so it sees all prompts first; `transformers` compiles nothing.
        method(prompts[:1] if name.startswith("transformers") else prompts, temperature, 0, args.max_new_tokens)
        warm_up[name] = time.perf_counter() - begin
        first[name] = statistics.median(_seconds(method, prompt, temperature) for prompt in prompts)
    runs: dict[str, list[tuple[float, int, int]]] = {name: [] for name in methods}
    for repeat in range(args.repeats):
        for name, method in methods.items():
            begin = time.perf_counter()
            made, rounds = method(prompts, temperature, repeat, args.max_new_tokens)
            runs[name].append((time.perf_counter() - begin, made, rounds))
    rates = {name: [made / seconds for seconds, made, _ in run] for name, run in runs.items()}
    base = statistics.median(rates["autoregressive"])
    return {
        name: {
            "tokens_per_s": statistics.median(rates[name]),
            "slowest": min(rates[name]),
            "fastest": max(rates[name]),
            "accepted_length": _accepted_length(runs[name]),
            "against_autoregressive": statistics.median(rates[name]) / base,
            "first_token_s": first[name],
            "warm_up_s": warm_up[name],
        }
        for name in methods
    }


def _accepted_length(runs: list[tuple[float, int, int]]) -> float | None:
    """None where rounds were not counted."""
    rounds = sum(rounds for _, _, rounds in runs)
    return sum(made for _, made, _ in runs) / rounds if rounds else None


def _seconds(method: Method, prompt: tuple[int, ...], temperature: float) -> float:
    begin = time.perf_counter()
    method([prompt], temperature, 0, 1)
    return time.perf_counter() - begin


def _print_table(rows: list[dict]) -> None:
    print(
        "| batch | T | method | tokens/s (slowest to fastest) | tokens a round | x autoregressive | first token ms "
        "| first pass s |"
    )
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        length = "" if row["accepted_length"] is None else f"{row['accepted_length']:.2f}"
        print(
            f"| {row['batch']} | {row['temperature']:g} | {row['method']} | {row['tokens_per_s']:.1f} "
            f"({row['slowest']:.1f} to {row['fastest']:.1f}) | {length} | "
            f"{row['against_autoregressive']:.2f} | {1e3 * row['first_token_s']:.1f} | {row['warm_up_s']:.1f} |"
        )


if __name__ == "__main__":
    sys.exit(main())
