"""Benchmark prompts: one JSONL file a set, rows with `turns`; the first turn of the first rows is used."""

import json
from pathlib import Path


def read_sets(directory: Path, limit: int) -> dict[str, list[str]]:
    """Set name -> its first `limit` prompts. ValueError when the directory holds no set."""
    sets = {
        file.stem: [json.loads(line)["turns"][0] for line in file.read_text(encoding="utf-8").splitlines()[:limit]]
        for file in sorted(directory.glob("*.jsonl"))
    }
    if not sets:
        raise ValueError(
            f"{directory}: no *.jsonl files; give a directory with one file of {{'turns': [...]}} rows a set"
        )
    return sets
