"""Programming tasks composed of parts: what a function takes, what it does with it, how the request is put."""

from random import Random

from dspark_jax.data.sections import shipped_sections

_PARTS = shipped_sections("code_tasks.txt")
_LANGUAGES = ("Python",) * 8 + ("JavaScript", "Java", "C++", "Go", "Rust", "TypeScript")
_STUB_REQUESTS = ("Complete this function:", "Finish the function below.", "Implement the following stub:")


def code_task(random: Random) -> str:
    """One request for a function, in one of several phrasings, sometimes with a condition or a stub to complete."""
    numbers = {
        "n": random.randint(5, 99),
        "k": random.randint(2, 9),
        "m": random.randint(2, 9),
        "base": random.choice([2, 3, 7, 8, 16]),
        "power": random.choice(["square", "cube", "fourth power"]),
    }
    argument, does = random.choice([_list_task, _text_task, _whole_task])(random)
    task = _phrase(random, argument, does)
    if random.random() < 0.4:
        task += ("\n" if task.endswith("```") else " ") + random.choice(_PARTS["extras"])
    return task.format(**numbers)


def _list_task(r: Random) -> tuple[str, str]:
    steps = r.sample(_PARTS["list steps"], r.choice([1, 1, 2]))
    return "a list of integers", f"{', then '.join(steps)} and {r.choice(_PARTS['list results'])}"


def _text_task(r: Random) -> tuple[str, str]:
    steps = r.sample(_PARTS["text steps"], r.choice([1, 1, 2]))
    return "a string", f"{', then '.join(steps)} and {r.choice(_PARTS['text results'])}"


def _whole_task(r: Random) -> tuple[str, str]:
    return "", r.choice(_PARTS["whole tasks"])


def _phrase(r: Random, argument: str, does: str) -> str:
    language, name = r.choice(_LANGUAGES), r.choice(_PARTS["names"])
    takes = f"takes {argument}, " if argument else ""
    if language == "Python" and r.random() < 0.3:
        parameter = {"a list of integers": "numbers: list[int]", "a string": "text: str"}.get(argument, "*args")
        given = f"Given {argument}, it " if argument else ""
        document = f"{given}{does}."
        document = document[0].upper() + document[1:]
        stub = f'def {name}({parameter}):\n    """{document}"""'
        return f"{r.choice(_STUB_REQUESTS)}\n```python\n{stub}\n```"
    return r.choice([
        f"Write a {language} function called `{name}` that {takes}{does}.",
        f"Write a function in {language} that {takes}{does}.",
        f"I need a {language} function that {takes}{does}.",
        f"Can you implement a {language} function which {takes}{does}?",
        f"Using {language}, define `{name}` so that it {takes}{does}.",
        f"How would you write a {language} function that {takes}{does}?",
    ])  # fmt: skip
