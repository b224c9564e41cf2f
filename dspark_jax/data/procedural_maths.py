"""Exercises from templates: arithmetic, percentages, rates, sequences, dates, units, algebra, geometry, chance."""

from datetime import date, timedelta
from random import Random

from dspark_jax.data.sections import shipped_sections

_WORDS = shipped_sections("story_words.txt")
NAMES = _WORDS["names"]
_PLACES = _WORDS["places"]
_GOODS = (
    ("apples", "fruit stand"), ("notebooks", "stationery shop"), ("candles", "market stall"), ("muffins", "bakery"),
    ("tickets", "theatre"), ("roses", "flower shop"), ("batteries", "hardware shop"), ("mugs", "pottery studio"),
    ("pencils", "school shop"), ("sandwiches", "café"), ("postcards", "museum"), ("plants", "garden centre"),
    ("T-shirts", "clothes shop"), ("marbles", "toy shop"), ("bottles of juice", "kiosk"), ("stickers", "toy shop"),
)  # fmt: skip
INSTRUCTIONS = _WORDS["instructions"]
"""Ways of asking for a worked answer."""


def maths_problem(random: Random) -> str:
    """One problem in words, half of the time with an instruction on how to answer."""
    problem = random.choice(_PROBLEMS)(random)
    return f"{problem}\n{random.choice(INSTRUCTIONS)}" if random.random() < 0.5 else problem


def _shopping(r: Random) -> str:
    (goods, shop), name = r.choice(_GOODS), r.choice(NAMES)
    n, price, paid = r.randint(2, 24), r.randint(2, 40) / 4, r.choice([20, 50, 100, 200])
    return r.choice([
        f"A {shop} charges ${price:.2f} for one of its {goods}. {name} takes {n} of them and pays with ${paid * 2}. "
        "How much change is due?",
        f"{name} wants {n} {goods} at ${price:.2f} each but only has ${paid}. How much money is left over or missing?",
        f"At the {shop}, {n} {goods} cost ${n * price:.2f} in total. What would {n + r.randint(1, 9)} of them cost?",
    ])  # fmt: skip


def _stock(r: Random) -> str:
    (goods, shop), (day, later) = r.choice(_GOODS), r.choice([("Monday", "Tuesday"), ("Friday", "Saturday")])
    start, sold, came = r.randint(120, 900), r.randint(15, 60), r.randint(10, 90)
    end = r.choice(["the end of the day", "closing time"])
    return (
        f"The {shop} opens on {day} with {start} {goods}. It sells {sold} before noon and "
        f"{r.choice(['twice', 'half', 'a third'])} as many after noon. On {later} a delivery of {came} arrives and "
        f"{r.randint(5, 80)} are sold. How many {goods} remain at {end}?"
    )


def _sharing(r: Random) -> str:
    a, b = r.sample(NAMES, 2)
    goods, times, more = r.choice(_GOODS)[0], r.choice(["twice", "three times", "four times"]), r.randint(3, 30)
    total = r.randint(20, 200) * 6
    return r.choice([
        f"{a} has {times} as many {goods} as {b}. Together they own {total}. How many does each of them have?",
        f"{a} and {b} split {total} {goods} so that {a} gets {more} more than {b}. How many does {a} get?",
        f"{a} gives away {r.choice(['a quarter', 'a third', 'half'])} of {total} {goods}, then another {more}. "
        "How many are left?",
    ])  # fmt: skip


def _percentage(r: Random) -> str:
    name, base, rate = r.choice(NAMES), r.randint(4, 90) * 10, r.choice([5, 8, 10, 12, 15, 20, 25, 30, 35, 40])
    return r.choice([
        f"A jacket that normally costs ${base} is reduced by {rate}%. What is the sale price?",
        f"{name}'s rent rises from ${base * 3} to ${base * 3 + rate * 6}. By what percentage did it rise?",
        f"After a {rate}% discount a lamp costs ${base}. What was its price before? Round to the nearest cent.",
        f"{name} puts ${base * 10} in an account that earns {rate / 4:g}% interest a year, compounded yearly. "
        f"How much is in the account after {r.randint(2, 5)} years?",
        f"A town of {base * 100} people grows by {rate}% one year and shrinks by {rate}% the next. How many people "
        "live there now?",
        f"What is {rate}% of {base * 7 + r.randint(0, 9)}?",
        f"{name} answered {base // 10} of {base // 10 + rate} questions correctly. What percentage is that?",
    ])  # fmt: skip


def _travel(r: Random) -> str:
    name, other = r.sample(NAMES, 2)
    place, speed, hours, minutes = r.choice(_PLACES), r.randint(4, 24) * 5, r.randint(1, 6), r.choice([15, 20, 30, 45])
    return r.choice([
        f"{name} drives to {place} at {speed} km/h and needs {hours} hours and {minutes} minutes. How far away is it?",
        f"Two cyclists start {speed * 2} km apart and ride towards each other at {r.randint(12, 22)} km/h and "
        f"{r.randint(12, 22)} km/h. After how many minutes do they meet?",
        f"{name} walks to {place} at {r.randint(3, 6)} km/h and returns the same way at {r.randint(7, 12)} km/h. "
        "What is the average speed for the round trip?",
        f"{name} leaves at {r.randint(6, 11)}:{minutes} and {other} follows {minutes} minutes later at "
        f"{r.choice(['twice', 'one and a half times'])} the speed. How long until {other} catches up?",
    ])  # fmt: skip


def _work(r: Random) -> str:
    a, b = r.sample(NAMES, 2)
    x, y, n = r.randint(2, 12), r.randint(3, 15), r.randint(3, 14)
    return r.choice([
        f"{a} can paint a fence in {x} hours and {b} in {y} hours. How long do they need together?",
        f"A pipe fills a tank in {x} hours while a leak would empty it in {x + y} hours. How long does filling take?",
        f"If {n} workers finish a road in {n * x} days, how many days would {n + y} workers need at the same pace?",
        f"{a} earns ${x + 8} an hour and works {y + 20} hours a week. How much does {a} earn in {n} weeks?",
    ])  # fmt: skip


def _sequence(r: Random) -> str:
    start, step, ratio, index = r.randint(-9, 30), r.randint(2, 17), r.choice([2, 3, 4, -2]), r.randint(12, 60)
    arithmetic = ", ".join(str(start + step * i) for i in range(4))
    geometric = ", ".join(str(step * ratio**i) for i in range(4))
    mixed = ", ".join(str(i * i + start) for i in range(1, 6))
    return r.choice([
        f"The sequence {arithmetic}, ... is arithmetic. What is its {index}th term?",
        f"Find the next two terms of {geometric}, ...",
        f"Find the sum of the first {index} terms of the arithmetic sequence {arithmetic}, ...",
        f"What rule gives the numbers {mixed}, and which number comes next?",
        f"A sequence starts with {abs(start)} and {step}; every later term is the sum of the two before it. "
        f"What is the {r.randint(6, 11)}th term?",
    ])  # fmt: skip


def _dates(r: Random) -> str:
    day, days = date(r.randint(1995, 2035), 1, 1) + timedelta(days=r.randint(0, 364)), r.randint(9, 400)
    hour, minute, length = r.randint(6, 21), r.choice([5, 10, 20, 35, 50]), r.randint(35, 290)
    written = f"{day:%B} {day.day}, {day.year}"
    return r.choice([
        f"Which date is {days} days after {written}?",
        f"{written} is a {day:%A}. What day of the week is it {days} days later?",
        f"How many days are there from {written} to the end of that year?",
        f"A film starts at {hour:02d}:{minute:02d} and lasts {length} minutes. When does it end?",
        f"{r.choice(NAMES)} was born on {written}. How old will they be {r.randint(3, 9)} weeks before their "
        f"{r.randint(20, 60)}th birthday, in years, months and days?",
    ])  # fmt: skip


def _units(r: Random) -> str:
    source, target, low, high = r.choice([
        ("kilometres", "miles", 2, 400), ("pounds", "kilograms", 3, 300), ("litres", "US gallons", 2, 90),
        ("metres per second", "kilometres per hour", 2, 90), ("degrees Fahrenheit", "degrees Celsius", 10, 230),
        ("hours", "seconds", 2, 60), ("square metres", "square feet", 8, 400), ("inches", "centimetres", 4, 120),
        ("grams", "ounces", 20, 900),
        ("gigabytes", "megabytes", 2, 64), ("cubic centimetres", "litres", 50, 9000), ("minutes", "days", 900, 9000),
    ])  # fmt: skip
    value = r.randint(low, high)
    return r.choice([
        f"Convert {value} {source} to {target}.",
        f"How many {target} are {value} {source}?",
        f"{r.choice(NAMES)} measured {value} {source}. What is that in {target}, to one decimal place?",
    ])  # fmt: skip


def _equation(r: Random) -> str:
    # No factor of 1 or 0 anywhere: "1x" and "0x" are not how people write.
    a, b, c, d = (r.choice([-1, 1]) * r.randint(2, 12) for _ in range(4))
    p, q = r.choice([-1, 1]) * r.randint(2, 9), r.choice([-1, 1]) * r.randint(2, 9)
    q = q if abs(p + q) > 1 else p
    b_, c_, d_, sum_, product_ = (_signed(number) for number in (b, c, d, -(p + q), p * q))
    return r.choice([
        f"Solve for x: {a}x {b_} = {a * p + b}",
        f"Solve for x: {a}x {b_} = {c}x {d_}" if a != c else f"Solve for x: {a}x {b_} = {d}",
        f"Solve x^2 {sum_}x {product_} = 0.",
        f"Solve the system: {abs(a)}x + y = {abs(a) * p + q}, x - y = {p - q}.",
        f"Expand and simplify ({abs(a)}x {b_})(x {d_}).",
        f"Factor x^2 {sum_}x {product_}.",
        f"If f(x) = {abs(a)}x^2 {b_}x {c_}, what is f({p})?",
        f"For which x is {abs(a)}x {b_} greater than {c}?",
        f"Find the derivative of {abs(a)}x^{r.randint(2, 6)} {b_}x^2 {c_}x.",
    ])  # fmt: skip


def _signed(number: int) -> str:
    return f"{'-' if number < 0 else '+'} {abs(number)}"


def _numbers(r: Random) -> str:
    a, b, n, k = r.randint(12, 480), r.randint(12, 480), r.randint(30, 999), r.randint(3, 19)
    return r.choice([
        f"What is the greatest common divisor of {a} and {b}?",
        f"Find the least common multiple of {a % 60 + 4} and {b % 60 + 5}.",
        f"Write {n} as a product of primes.",
        f"What remainder does {a}^{k} leave when divided by {r.randint(3, 13)}?",
        f"How many integers from 1 to {n} are divisible by {k} but not by {k + 2}?",
        f"Compute {a} * {b % 90 + 3} - {n}.",
        f"Work out ({a} + {b}) / {k} and round the result to two decimal places.",
        f"Write {n} in base {r.choice([2, 3, 5, 8, 16])}.",
        f"The mean of {', '.join(str(r.randint(2, 60)) for _ in range(4))} and x is {r.randint(20, 40)}. What is x?",
        f"Which is larger, {r.randint(3, 19)}/{k + 4} or {r.randint(3, 19)}/{k + 9}?",
    ])  # fmt: skip


def _geometry(r: Random) -> str:
    a, b, h = r.randint(3, 40), r.randint(3, 40), r.randint(2, 25)
    return r.choice([
        f"A rectangle is {a} cm long and {b} cm wide. What are its area and its diagonal?",
        f"A cylinder has radius {h} cm and height {a} cm. What is its volume in terms of pi?",
        f"The legs of a right triangle measure {a} and {b}. How long is the hypotenuse?",
        f"A {a + 5} m by {b + 5} m lawn is surrounded by a path {h % 4 + 1} m wide. What is the area of the path?",
        f"Two angles of a triangle are {a + 20} degrees and {b + 15} degrees. How large is the third?",
        f"A circle has circumference {2 * h} pi. What is its area?",
        f"What is the distance between the points ({a - 20}, {h}) and ({b - 20}, {-h})?",
    ])  # fmt: skip


def _chance(r: Random) -> str:
    red, blue, draws, n = r.randint(2, 12), r.randint(2, 12), r.randint(2, 3), r.randint(5, 12)
    return r.choice([
        f"A bag holds {red} red and {blue} blue balls. {draws} are drawn without putting any back. "
        "What is the probability that all of them are red?",
        f"How many different committees of {draws + 1} can be chosen from {n} people?",
        f"Two fair dice are rolled. What is the probability that the sum is {n}?",
        f"A coin is tossed {n} times. What is the probability of exactly {draws} heads?",
        f"In how many orders can {n - 2} books stand on a shelf if two particular ones must be next to each other?",
    ])  # fmt: skip


_PROBLEMS = (
    _shopping, _stock, _sharing, _percentage, _travel, _work, _sequence, _dates, _units, _equation, _equation, _numbers,
    _geometry, _chance,
)  # fmt: skip
