"""Twelve fields of mathematics, made here with exact answers; and a fact to be found at several depths of a text."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np

from rzoo.evals.task import Adapter, Instance, Source, Task
from rzoo.evals.tasks.generated import COLORS, THINGS
from rzoo.evals.tasks.word_problems import BOXED, number

EACH = 10  # questions of a field
SENTENCES, NEEDLES = 100, 8  # of a text; texts of each depth
DEPTHS = (0, 25, 50, 75, 100)  # where the fact stands, in percent of the text

Field = Callable[[int, int, int, int], tuple[str, Fraction | int]]

# Of four numbers from 2 to 12, unlike each other: a question and its answer.
FIELDS: dict[str, Field] = {
    "arithmetic": lambda a, b, c, d: (f"What is {a} * {b} - {c} * {d}?", a * b - c * d),
    "algebra": lambda a, b, c, d: (f"Solve {a}x + {b} = {c} for x.", Fraction(c - b, a)),
    "calculus": lambda a, b, c, d: (
        f"What is the derivative of {a}x^3 + {b}x^2 + {c}x at x = {d}?",
        3 * a * d * d + 2 * b * d + c,
    ),
    "linear algebra": lambda a, b, c, d: (
        f"What is the determinant of the matrix [[{a}, {b}], [{c}, {d}]]?",
        a * d - b * c,
    ),
    "differential equations": lambda a, b, c, d: (
        f"y' = {2 * a}x + {b} and y(0) = {c}. What is y({d})?",
        a * d * d + b * d + c,
    ),
    "number theory": lambda a, b, c, d: (
        f"What is the greatest common divisor of {a * b * d} and {a * c * d}?",
        math.gcd(a * b * d, a * c * d),
    ),
    "combinatorics": lambda a, b, c, d: (
        f"In how many ways can {min(a, b)} of {max(a, b)} books be chosen?",
        math.comb(max(a, b), min(a, b)),
    ),
    "probability": lambda a, b, c, d: (
        f"A bag holds {a} red and {b} blue balls. Two are drawn together. How likely is it that both are red?",
        Fraction(math.comb(a, 2), math.comb(a + b, 2)),
    ),
    "statistics": lambda a, b, c, d: (
        f"What is the variance of the numbers {a}, {b}, {c} and {d}, dividing by 4?",
        Fraction(4 * (a * a + b * b + c * c + d * d) - (a + b + c + d) ** 2, 16),
    ),
    "geometry": lambda a, b, c, d: (
        f"What is the area of the triangle with the corners (0, 0), ({a}, {b}) and ({c}, {d})?",
        Fraction(abs(a * d - b * c), 2),
    ),
    "trigonometry": lambda a, b, c, d: (
        f"What is {a} sin(30°) + {b} cos(60°) + {c} tan(45°) - {d} sin(90°)?",
        Fraction(a + b, 2) + c - d,
    ),
    "logic": lambda a, b, c, d: (
        f"How many of the numbers from 1 to {a * b} are divisible by {c} or by {d}, but not by both?",
        sum((n % c == 0) != (n % d == 0) for n in range(1, a * b + 1)),
    ),
}


def _fields(source: Source) -> Iterator[Instance]:
    names = list(FIELDS)
    for i in range(source.size or EACH * len(names)):
        rng, name = np.random.default_rng((source.seed, 3, i)), names[i % len(names)]
        a, b, c, d = (int(n) for n in 2 + rng.permutation(11)[:4])
        text, answer = FIELDS[name](a, b, c, d)
        yield Instance(id=f"fields-{i}", text=text, answer=str(answer), group=name)


def _needles(source: Source) -> Iterator[Instance]:
    for i in range(source.size or NEEDLES * len(DEPTHS)):
        rng, depth = np.random.default_rng((source.seed, 4, i)), DEPTHS[i % len(DEPTHS)]
        thing, *others = (THINGS[j] for j in rng.permutation(len(THINGS)))
        picks = rng.integers(len(others), size=SENTENCES), rng.integers(len(COLORS), size=SENTENCES)
        told = [f"There is a {COLORS[color]} {others[other]} here." for other, color in zip(*picks, strict=True)]
        hidden = int(rng.integers(1000, 10000))
        told.insert(SENTENCES * depth // 100, f"The number of the {thing} is {hidden}.")
        asked = f"{' '.join(told)}\nWhat is the number of the {thing}?"
        yield Instance(id=f"needle-{i}", text=asked, answer=str(hidden), group=str(depth))


TASKS = [
    Task(
        name="fields",
        about="twelve fields of mathematics, from arithmetic to logic",
        instances=_fields,
        text=Adapter(question="Question: {text}\nAnswer:", stop=("\nQuestion:", "\n\n"), max_tokens=256),
        chat=Adapter(instructions=BOXED, max_tokens=1024),
        scorer=number,
    ),
    Task(
        name="needle",
        about="a fact that stands at several depths of a text",
        instances=_needles,
        text=Adapter(question="{text} The number is", stop=(".", "\n"), max_tokens=16),
        chat=Adapter(question="{text} Answer with the number alone.", max_tokens=32),
        scorer=number,
    ),
]
