"""Tokens per second at batch 1, side by side in one process: drafted, autoregressive, and `transformers` generate.

    python benchmarks/speed.py --prompts DIR [--limit 2] [--max-new-tokens 128] [--json speed.json]

The same prompts, weights and dtype for all. Each prompt is answered once to warm up (compilation is reported
apart), then `--repeats` times, the methods in turn; a method's rate is that of its median repeat. `transformers`
needs torch (extra `bench`) and is left out, with a line that says so, where torch is missing.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from prompts import read_sets

from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.drafters.base import Drafter, NoDrafter
from dspark_jax.engine.assembly import LoadedModel, add_model_arguments, load_model
from dspark_jax.interop.huggingface import resolve

Method = Callable[[tuple[int, ...], float, int], tuple[int, int]]
"""(prompt, temperature, seed) -> (tokens made, rounds)."""


def main() -> int:
    args = _parser().parse_args()
    model = load_model(args, lambda line: print(line, file=sys.stderr))
    prompts = [
        tuple(model.tokenizer.encode_chat([{"role": "user", "content": prompt}]))
        for prompts in read_sets(args.prompts, args.limit).values()
        for prompt in prompts
    ]
    prompts = [prompt for prompt in prompts if len(prompt) + args.max_new_tokens <= min(model.max_len, 1024)]
    methods: dict[str, Method] = {
        "drafted": _ours(model, model.drafter, args.max_new_tokens),
        "autoregressive": _ours(model, NoDrafter(), args.max_new_tokens),
    }
    if importlib.util.find_spec("torch"):
        methods["transformers"] = _transformers(model, args)
    else:
        print("torch is not installed: `transformers` generate is left out", file=sys.stderr)
    rows = []
    for temperature in args.temperatures:
        rates = _measure(methods, prompts, temperature, args.repeats)
        rows += [{"temperature": temperature, "method": name, **rate} for name, rate in rates.items()]
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
    parser = argparse.ArgumentParser(description="Tokens per second at batch 1, side by side.")
    add_model_arguments(parser, scheduling=False)
    parser.set_defaults(max_batch=1)
    parser.add_argument("--prompts", type=Path, required=True, help="a directory with one JSONL file of prompts a set")
    parser.add_argument("--limit", type=int, default=2, help="prompts a set (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    return parser


def _ours(model: LoadedModel, drafter: Drafter, max_new_tokens: int) -> Method:
    elastic = jax.default_backend() == "cpu"
    slots = DecodeSlots(
        model.target, drafter, max_batch=1, max_len=model.max_len, dtype=jnp.dtype(model.dtype), elastic=elastic
    )

    def answer(prompt: tuple[int, ...], temperature: float, seed: int) -> tuple[int, int]:
        handle = slots.admit(prompt, Sampling(temperature=temperature, seed=seed))
        made = rounds = 0
        while made < max_new_tokens:
            tokens = slots.step()[0].tokens
            made, rounds = made + len(tokens), rounds + 1
            if model.stop_ids & set(tokens):
                break
        slots.release(handle)
        return min(made, max_new_tokens), rounds

    return answer


def _transformers(model: LoadedModel, args: argparse.Namespace) -> Method:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    network = AutoModelForCausalLM.from_pretrained(resolve(args.target), dtype=getattr(torch, model.dtype)).to(device)

    def answer(prompt: tuple[int, ...], temperature: float, seed: int) -> tuple[int, int]:
        torch.manual_seed(seed)
        law = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature
            else {"do_sample": False}
        )
        ids = torch.tensor([prompt], device=device)
        with torch.inference_mode():
            out = network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=args.max_new_tokens,
                eos_token_id=sorted(model.stop_ids),
                pad_token_id=min(model.stop_ids),
                **law,
            )
        made = out.shape[1] - len(prompt)
        return made, made

    return answer


def _measure(
    methods: dict[str, Method], prompts: list[tuple[int, ...]], temperature: float, repeats: int
) -> dict[str, dict[str, float]]:
    warm_up = {}
    for name, method in methods.items():
        begin = time.perf_counter()
        # Ours compiles a program a shape, so it sees all prompts first; `transformers` compiles nothing.
        for prompt in prompts[:1] if name == "transformers" else prompts:
            method(prompt, temperature, 0)
        warm_up[name] = time.perf_counter() - begin
    runs: dict[str, list[tuple[float, int, int]]] = {name: [] for name in methods}
    for repeat in range(repeats):
        for name, method in methods.items():
            begin = time.perf_counter()
            counts = [method(prompt, temperature, repeat) for prompt in prompts]
            seconds = time.perf_counter() - begin
            runs[name].append((seconds, sum(made for made, _ in counts), sum(rounds for _, rounds in counts)))
    rates = {name: [made / seconds for seconds, made, _ in run] for name, run in runs.items()}
    base = statistics.median(rates["autoregressive"])
    return {
        name: {
            "tokens_per_s": statistics.median(rates[name]),
            "slowest": min(rates[name]),
            "fastest": max(rates[name]),
            "ms_per_round": statistics.median(1e3 * seconds / rounds for seconds, _, rounds in runs[name]),
            "accepted_length": sum(made for _, made, _ in runs[name]) / sum(rounds for _, _, rounds in runs[name]),
            "against_autoregressive": statistics.median(rates[name]) / base,
            "warm_up_s": warm_up[name],
        }
        for name in methods
    }


def _print_table(rows: list[dict]) -> None:
    print(
        "| T | method | tokens/s (slowest to fastest) | ms a round | tokens a round | x autoregressive | first pass s |"
    )
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row['temperature']:g} | {row['method']} | {row['tokens_per_s']:.1f} "
            f"({row['slowest']:.1f} to {row['fastest']:.1f}) | {row['ms_per_round']:.2f} | "
            f"{row['accepted_length']:.2f} | {row['against_autoregressive']:.2f} | {row['warm_up_s']:.1f} |"
        )


if __name__ == "__main__":
    sys.exit(main())
