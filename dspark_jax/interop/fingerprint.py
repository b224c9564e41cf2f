"""What tells one drafter from another, for files that were measured with it."""

import hashlib
from pathlib import Path


def drafter_fingerprint(directory: Path) -> str:
    """sha256 over config.json and every *.safetensors file of a directory, names and contents."""
    digest = hashlib.sha256()
    for file in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        with open(file, "rb") as content:
            digest.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return f"sha256:{digest.hexdigest()}"
