"""Small puzzles from templates: orderings, truth tellers, syllogisms, word manipulation, patterns, schedules."""

from itertools import pairwise
from random import Random

from dspark_jax.data.procedural_maths import NAMES
from dspark_jax.data.sections import shipped_sections

_STORY = shipped_sections("story_words.txt")
_WORDS, _GROUPS, _TRAITS = _STORY["words"], _STORY["groups"], _STORY["traits"]
_ORDERS = (("older", "oldest"), ("taller", "shortest"), ("faster", "fastest"), ("richer", "poorest"))


def logic_problem(random: Random) -> str:
    """One puzzle in words."""
    return random.choice(_PUZZLES)(random)


def _ordering(r: Random) -> str:
    people = r.sample(NAMES, r.randint(3, 5))
    word, extreme = r.choice(_ORDERS)
    facts = [f"{a} is {word} than {b}." for a, b in pairwise(people)]
    r.shuffle(facts)
    comparison = f"Is {people[-1]} {word} than {people[0]}?"
    question = r.choice([f"Who is the {extreme}?", "List everyone in order.", comparison])
    return f"{' '.join(facts)} {question}"


def _truth(r: Random) -> str:
    a, b, c = r.sample(NAMES, 3)
    claim = r.choice([f"{b} always lies", f"{b} and {c} are of the same kind", f"exactly one of {b} and {c} lies"])
    return (
        f"Each of {a}, {b} and {c} either always lies or always tells the truth. {a} says that {claim}. "
        f"{b} says that {r.choice([a, c])} {r.choice(['lies', 'tells the truth'])}. Who can be telling the truth?"
    )


def _syllogism(r: Random) -> str:
    a, b = r.sample(_GROUPS, 2)
    trait, name = r.choice(_TRAITS), r.choice(NAMES)
    first = r.choice([f"All {a} are {b}.", f"No {a} are {b}.", f"Some {a} are {b}."])
    second = r.choice([f"All {b} are {trait}.", f"{name} is one of the {a}.", f"{name} is not {trait}."])
    verdict = r.choice([f"some {a} are {trait}", f"{name} is one of the {b}", f"no {a} are {trait}"])
    return f"{first} {second} Does it follow that {verdict}? Answer yes or no and explain why."


def _letters(r: Random) -> str:
    words = r.sample(_WORDS, r.randint(2, 5))
    word = words[0]
    return r.choice([
        f"Reverse the letters of the word {word!r}, then count its vowels.",
        f"Put these words in alphabetical order: {', '.join(words)}.",
        f"Take the last letter of each of the words {', '.join(words)} and join them.",
        f"How many times does the letter {r.choice(word)!r} occur in {''.join(words)!r}?",
        f"Shift every letter of {word!r} forward by {r.randint(1, 9)} places in the alphabet.",
        f"Which of these words has the most different letters: {', '.join(words)}?",
    ])  # fmt: skip


def _pattern(r: Random) -> str:
    start, step = r.randint(0, 5), r.randint(1, 4)
    letters = ", ".join(chr(65 + (start + step * i) % 26) for i in range(5))
    a, b = r.sample(["red", "blue", "green", "white", "black"], 2)
    period = r.randint(2, 4)
    return r.choice([
        f"Which letter comes next: {letters}, ...?",
        f"Beads are strung as {period} {a}, {step} {b}, {period} {a}, {step} {b} and so on. "
        f"What colour is bead number {r.randint(20, 90)}?",
        f"Find the odd one out: {', '.join(str(n * period) for n in r.sample(range(3, 30), 4))}, "
        f"{period * r.randint(3, 20) + 1}.",
    ])  # fmt: skip


def _schedule(r: Random) -> str:
    a, b, c = r.sample(NAMES, 3)
    x, y = r.randint(2, 9), r.randint(2, 9)
    return r.choice([
        f"{a} visits the gym every {x} days and {b} every {y} days. Both were there today. In how many days do they "
        "meet there again?",
        f"{a}, {b} and {c} sit in a row. {a} is not at an end and {b} is left of {c}. Who sits where?",
        f"{a} is {x + 20} years old and {b} is {y + 3}. In how many years will {a} be twice as old as {b}?",
        f"{a} walks {x} blocks north, {y} blocks east and {x + y} blocks south. In which direction and how far "
        "away is the starting point?",
    ])  # fmt: skip


_PUZZLES = (_ordering, _truth, _syllogism, _letters, _pattern, _schedule)
