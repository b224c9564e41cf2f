"""Lists of phrases in text files: `[name]` opens a section, `#` a comment, every other line is one phrase."""

from importlib import resources


def shipped_sections(name: str) -> dict[str, tuple[str, ...]]:
    """The sections of a text file that ships with this package."""
    return parse_sections((resources.files("dspark_jax.data") / name).read_text(encoding="utf-8"), name)


def parse_sections(text: str, name: str) -> dict[str, tuple[str, ...]]:
    """Section names to their phrases. ValueError for a phrase outside a section and for an empty section."""
    sections: dict[str, list[str]] = {}
    current: list[str] | None = None
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]"):
            current = sections.setdefault(line[1:-1].strip(), [])
        elif current is None:
            raise ValueError(f"{name}:{number}: a [section] must come before the first phrase")
        else:
            current.append(line)
    empty = [section for section, phrases in sections.items() if not phrases]
    if empty:
        raise ValueError(f"{name}: section [{empty[0]}] is empty")
    return {section: tuple(phrases) for section, phrases in sections.items()}
