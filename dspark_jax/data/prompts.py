"""Prompts the target writes itself: it continues user turns that begin with a seed, and the good ones are kept.

Nobody's data is needed, and the subjects are those the model was tuned on. What it wrote is journalled as it finishes;
selection is a deterministic pass over the journal, so a killed run ends with the same prompts.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, get_args

from dspark_jax.data.decontaminate import TestSets
from dspark_jax.data.dedup import Deduplicator
from dspark_jax.data.filters import rejection
from dspark_jax.data.generation import Answer, Generate, Request, Tokenizer
from dspark_jax.data.journal import Journal
from dspark_jax.data.procedural import ProceduralKind, procedural_prompts
from dspark_jax.data.procedural_maths import INSTRUCTIONS
from dspark_jax.data.recipe import DataRecipe
from dspark_jax.data.sections import parse_sections, shipped_sections

_EXTRA_TRIES = 1.2
_LEAST_TRIES = 8


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The user's turns and where they come from, such as seeded/maths or procedural/code."""

    turns: tuple[str, ...]
    source: str


class Selection:
    """Keeps prompts that pass the recipe's filters, decontamination and deduplication; counts why others went."""

    def __init__(self, recipe: DataRecipe, tests: TestSets):
        self._recipe, self._tests = recipe, tests
        self._seen = Deduplicator(recipe.near_duplicates)
        self._follow_ups = shipped_sections("follow_ups.txt")["follow-ups"]
        self.kept: list[Prompt] = []
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()

    def offer(self, text: str, source: str, *, ended: bool = True) -> bool:
        """Keeps the prompt or not. Prompts made by rule (source procedural/...) pass for new if a number is new."""
        by_rule = source.startswith("procedural/")
        turns = self._turns(text, source)
        reason = None if by_rule else rejection(text, self._recipe.filters, ended=ended)
        if reason is None and any(self._tests.shared_run(turn) is not None for turn in turns):
            reason = "shares a run of words with a test set"
        if reason is None and not self._seen.is_new(text, exact_only=by_rule):
            reason = "is a duplicate"
        if reason is not None:
            self.dropped[reason] += 1
            return False
        self.kept.append(Prompt(turns=turns, source=source))
        self.counts[source] += 1
        return True

    def _turns(self, text: str, source: str) -> tuple[str, ...]:
        random = Random(f"{self._recipe.seed}/{text}")
        if source == "seeded/maths" and random.random() < self._recipe.instructions:
            text = f"{text}\n{random.choice(INSTRUCTIONS)}"
        return (text, random.choice(self._follow_ups)) if random.random() < self._recipe.follow_ups else (text,)


def read_seeds(recipe: DataRecipe) -> dict[str, tuple[str, ...]]:
    """The openings by section. ValueError when the recipe wants prompts of a section that the file lacks."""
    if recipe.seeds is None:
        sections = shipped_sections("seeds.txt")
    else:
        sections = parse_sections(Path(recipe.seeds).read_text(encoding="utf-8"), recipe.seeds)
    missing = [kind for kind, wanted in asdict(recipe.seeded).items() if wanted and kind not in sections]
    if missing:
        raise ValueError(f"{recipe.seeds} has no section [{missing[0]}]; add it or set seeded.{missing[0]}=0")
    return sections


def opening(seed: str, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> tuple[int, ...]:
    """The rendered beginning of a user turn that says `seed` and is not over.

    It is the template's rendering of that turn, cut before the token that ends it. ValueError when the template does
    not end a turn with a stop token.
    """
    ids = tokenizer.encode_chat([{"role": "user", "content": seed}], add_generation_prompt=False)
    end = max((at for at, token in enumerate(ids) if token in stop_ids), default=0)
    if not tokenizer.decode(ids[:end]).endswith(seed):
        raise ValueError("the chat template does not end a user's turn with a stop token, so nothing can continue it")
    return tuple(ids[:end])


class SeededPrompts:
    """Writes prompts until the selection has as many as the recipe wants, or the recipe's attempts are used up."""

    def __init__(
        self,
        recipe: DataRecipe,
        selection: Selection,
        *,
        generate: Generate,
        tokenizer: Tokenizer,
        stop_ids: frozenset[int],
        journal: Journal,
    ):
        self._recipe, self._selection, self._journal = recipe, selection, journal
        self._generate, self._tokenizer = generate, tokenizer
        self._seeds = read_seeds(recipe)
        self._openings = {seed: opening(seed, tokenizer, stop_ids) for seeds in self._seeds.values() for seed in seeds}
        # Another recipe's texts must not be taken for this one's, so the key names what the texts depend on.
        facts = (self._seeds, astuple(recipe.prompts), recipe.seed)
        self._digest = hashlib.blake2b(repr(facts).encode(), digest_size=6).hexdigest()

    def run(self) -> Iterator[int]:
        """Yields how many texts were written in this run, after each of them and after each selection."""
        written = 0
        tried: Counter[str] = Counter()
        # Selection goes by the number of the attempt, not by when it finished, or a rerun would keep other prompts.
        while batch := self._next_attempts(tried):
            texts = {row["key"]: row for row in self._journal.rows()} if self._journal.keys else {}
            missing = [attempt for attempt in batch if self._key(attempt) not in texts]
            for answer in self._generate(map(self._request, missing)):
                row = self._text_of(answer)
                texts[self._key(answer.request.tag)] = row
                self._journal.append(self._key(answer.request.tag), row)
                written += 1
                yield written
            for kind, number in batch:
                row = texts[self._key((kind, number))]
                if self._selection.counts[f"seeded/{kind}"] < getattr(self._recipe.seeded, kind):
                    self._selection.offer(row["text"], f"seeded/{kind}", ended=row["finish"] == "stop")
            yield written

    def _next_attempts(self, tried: Counter[str]) -> list[tuple[str, int]]:
        """(kind, number) of the attempts to make now, a few more than the prompts still missing."""
        attempts = []
        for kind, wanted in asdict(self._recipe.seeded).items():
            missing = wanted - self._selection.counts[f"seeded/{kind}"]
            limit = int(wanted * self._recipe.attempts) - tried[kind]
            now = min(int(missing * _EXTRA_TRIES) + _LEAST_TRIES, limit) if missing > 0 else 0
            attempts += [(kind, tried[kind] + i) for i in range(max(0, now))]
            tried[kind] += max(0, now)
        return attempts

    def _request(self, attempt: tuple[str, int]) -> Request:
        kind, number = attempt
        sampling = self._recipe.prompts
        random = Random(f"{self._recipe.seed}/{kind}/{number}")
        return Request(
            prompt=self._openings[self._seed(attempt)],
            temperature=sampling.temperatures[number % len(sampling.temperatures)],
            top_p=sampling.top_p,
            seed=random.getrandbits(31),
            max_new_tokens=sampling.max_new_tokens,
            tag=attempt,
        )

    def _seed(self, attempt: tuple[str, int]) -> str:
        """Seeds take turns, in an order that is new in each pass over them."""
        kind, number = attempt
        seeds = self._seeds[kind]
        turn, place = divmod(number, len(seeds))
        return Random(f"{self._recipe.seed}/{kind}/{turn}").sample(seeds, len(seeds))[place]

    def _text_of(self, answer: Answer) -> dict[str, Any]:
        # Decoded together with its seed: some tokenizers drop the space before a first word.
        prompt = list(answer.request.prompt)
        seed = self._seed(answer.request.tag)
        begin = len(self._tokenizer.decode(prompt)) - len(seed)
        text = self._tokenizer.decode([*prompt, *answer.tokens])[begin:].strip()
        return {"text": text, "finish": answer.finish}

    def _key(self, attempt: tuple[str, int]) -> str:
        return f"{self._digest}/{attempt[0]}/{attempt[1]}"


def add_procedural(recipe: DataRecipe, selection: Selection) -> None:
    """Offers prompts made by rule until the recipe's numbers are reached or only repetitions come."""
    for kind in get_args(ProceduralKind):
        wanted = getattr(recipe.procedural, kind)
        taken = 0
        for text in islice(procedural_prompts(kind, recipe.seed), 20 * wanted):
            if taken == wanted:
                break
            taken += selection.offer(text, f"procedural/{kind}")


def shuffled(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """All prompts in a seeded order that mixes their sources."""
    return Random(seed).sample(prompts, len(prompts))


def wanted_prompts(recipe: DataRecipe) -> int:
    """How many prompts the recipe asks for."""
    return sum(getattr(counts, each.name) for counts in (recipe.seeded, recipe.procedural) for each in fields(counts))
