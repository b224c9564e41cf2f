"""What a compiled program moves, read from its text; what is in a loop counts as often as the loop runs."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_LARGEST = 5
_SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "c64": 8}
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+)\[([\d,]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"(body|calls|to_apply)=%([\w.\-]+)")
_CONDITION = re.compile(r"condition=%([\w.\-]+)")
# What names, groups or waits for arrays and writes none; what happens inside a loop is counted there.
_SILENT = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional"}


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of one device and one run of the program. `collectives`: kind -> (how many, bytes of their results).
    `written`: bytes of what every instruction writes, whether or not it leaves the chip. `largest`: of the arrays that
    instructions write, by size: (shape, bytes, name of the first instruction that does)."""

    collectives: dict[str, tuple[int, float]]
    written: float
    largest: tuple[tuple[str, float, str], ...]


@dataclass(kw_only=True)
class _Computation:
    collectives: list[tuple[str, float]] = field(default_factory=list)
    written: float = 0.0
    arrays: dict[str, tuple[str, float, str]] = field(default_factory=dict)
    calls: list[tuple[str, str | None, bool]] = field(default_factory=list)
    """What is called, under which condition if in a loop, and whether as a fusion."""
    bounds: list[int] = field(default_factory=list)
    """Of a loop, where this is its condition: the numbers its counter may be compared with."""


def traffic(text: str) -> Traffic:
    """Of a program as `compiled.as_text()` gives it. A loop that does not simply count up is taken to run once."""
    entry, computations = _parse(text)
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    written, arrays = 0.0, dict[str, tuple[str, float, str]]()
    for name, times, fused in _runs(entry, computations):
        computation = computations[name]
        for kind, size in computation.collectives:
            found[kind][0] += times
            found[kind][1] += times * size
        if not fused:
            written += times * computation.written
            arrays = computation.arrays | arrays
    largest = sorted(arrays.values(), key=lambda array: array[1], reverse=True)
    return Traffic(
        collectives={kind: (int(n), size) for kind, (n, size) in sorted(found.items())},
        written=written,
        largest=tuple(largest[:_LARGEST]),
    )


def _parse(text: str) -> tuple[str, dict[str, _Computation]]:
    entry, computations = "", {}
    current = _Computation()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations[head[2]] = _Computation()
            entry = head[2] if head[1] else entry
        elif match := _INSTRUCTION.match(line):
            name, shape, opcode, rest = match.groups()
            condition = _CONDITION.search(rest)
            for role, called in _CALLED.findall(rest):
                until = condition[1] if condition and role == "body" else None
                current.calls.append((called, until, opcode == "fusion"))
            if opcode == "constant" and shape.startswith("s32[]") and rest[: rest.find(")")].isdigit():
                current.bounds.append(int(rest[: rest.find(")")]))
            sizes = [_bytes(*array) for array in _ARRAY.findall(shape)]
            kind = opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                # What starts one returns its operand too.
                current.collectives.append((kind, sum(sizes) if kind == opcode else max(sizes)))
            elif opcode not in _SILENT and not opcode.endswith("-done") and "dynamic-update-slice" not in name:
                current.written += sum(sizes)
                for (dtype, dims), size in zip(_ARRAY.findall(shape), sizes, strict=True):
                    current.arrays.setdefault(f"{dtype}[{dims}]", (f"{dtype}[{dims}]", size, name))
    return entry, computations


def _runs(entry: str, computations: dict[str, _Computation]) -> Iterator[tuple[str, int, bool]]:
    """Every call of every computation: its name, how often, and whether inside a fusion."""
    pending = [(entry, 1, False)]
    while pending:
        name, times, fused = pending.pop()
        if name in computations:
            yield name, times, fused
            for called, until, inside in computations[name].calls:
                # Loops of lax.scan and lax.map count from 0 to the one constant of their condition.
                bounds = computations[until].bounds if until in computations else []
                pending.append((called, times * (bounds[0] if len(bounds) == 1 else 1), fused or inside))


def _bytes(kind: str, dims: str) -> float:
    size = _SIZES.get(kind) or int(re.sub(r"\D", "", kind)) / 8
    return float(size) * math.prod(int(dim) for dim in dims.split(",") if dim)
