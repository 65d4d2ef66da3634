"""Tasks that are made here: exact, seeded, of any size, and easy enough for a model of 135M parameters."""

from collections.abc import Callable, Iterator

import numpy as np

from rzoo.data.chains import chain
from rzoo.evals.task import CHOICE, GENERATION, Adapter, Instance, Source, Task, Verdict

SIZE = 40  # questions where no limit is asked
SHOTS = 4
CHAIN_DEPTHS, CHAINS = 14, 20  # operations, up to; questions of each

NAMES = [
    "Anna",
    "Ben",
    "Carl",
    "Dora",
    "Emma",
    "Finn",
    "Greta",
    "Hugo",
    "Iris",
    "Jack",
    "Kate",
    "Leo",
    "Mia",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
    "Will",
]
THINGS = [
    "apple",
    "bread",
    "chair",
    "door",
    "egg",
    "fish",
    "glass",
    "horse",
    "iron",
    "jar",
    "key",
    "lamp",
    "moon",
    "nest",
    "oil",
    "pen",
    "ring",
    "stone",
    "tree",
    "wheel",
]
LISTS = {
    "days": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
    "months": [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ],
    "letters": ["A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "K", "L", "M"],
    "numbers": ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
}

Rng = np.random.Generator
Made = tuple[str, str, tuple[str, ...]]  # a question, its answer, the options of a choice


def _picked(rng: Rng, values: list[str], count: int) -> list[str]:
    return [values[i] for i in rng.permutation(len(values))[:count]]


def copied(rng: Rng) -> Made:
    """Some words, to be said again."""
    words = " ".join(_picked(rng, THINGS, 5))
    return words, words, ()


def compared(rng: Rng) -> Made:
    """Two numbers, the larger of which is asked for."""
    small, large = sorted(int(n) for n in rng.choice(np.arange(1, 100), 2, replace=False))
    shown = (small, large) if rng.integers(2) else (large, small)
    return f"{shown[0]} and {shown[1]}", str(large), (str(shown[0]), str(shown[1]))


def sorted_letters(rng: Rng) -> Made:
    """Letters, to be put in order."""
    letters = _picked(rng, [chr(65 + i) for i in range(26)], 4)
    return " ".join(letters), " ".join(sorted(letters)), ()


def looked_up(rng: Rng) -> Made:
    """A short list of who has what, and one of them asked for."""
    names, things = _picked(rng, NAMES, 4), _picked(rng, THINGS, 4)
    who = int(rng.integers(4))
    held = ". ".join(f"{name} has the {thing}" for name, thing in zip(names, things, strict=True))
    return f"{held}. {names[who]} has the", things[who], tuple(things)


def continued(rng: Rng) -> Made:
    """A well-known order, or words that repeat, and what comes next."""
    order = LISTS[list(LISTS)[rng.integers(len(LISTS))]]
    if rng.integers(2):
        start = int(rng.integers(len(order) - 4))
        shown, answer = order[start : start + 4], order[start + 4]
    else:
        cycle = _picked(rng, order, int(rng.integers(2, 4)))
        shown, answer = (cycle * 3)[: 2 * len(cycle) + 1], cycle[1]
    others = [word for word in _picked(rng, order, len(order)) if word != answer][:3]
    options = _picked(rng, [answer, *others], 4)
    return ", ".join(shown) + ",", answer, tuple(options)


def added(rng: Rng) -> Made:
    """A sum or a difference of small numbers."""
    a, b = (int(n) for n in rng.integers(1, 50, 2))
    if rng.integers(2):
        return f"{a} + {b} =", str(a + b), ()
    return f"{max(a, b)} - {min(a, b)} =", str(max(a, b) - min(a, b)), ()


def exact(instance: Instance, text: str) -> Verdict:
    """Right where the answer is what is asked for, spaces around it apart."""
    found = text.strip()
    return Verdict(float(found == instance.answer), found or None, None if found else "unparsed")


def _instances(make: Callable[[Rng], Made], name: str) -> Callable[[Source], Iterator[Instance]]:
    """Question i depends on the seed and on i alone, and no question is a solved example."""

    def made(source: Source) -> Iterator[Instance]:
        seen = {shot.text for shot in _shots(make)}
        number = 0
        for i in range(source.size or SIZE):
            one = _instance(make, (source.seed, 1, number), f"{name}-{i}")
            while one.text in seen:
                number += 1
                one = _instance(make, (source.seed, 1, number), f"{name}-{i}")
            seen.add(one.text)
            yield one

    return made


def _instance(make: Callable[[Rng], Made], seed: tuple[int, ...], name: str) -> Instance:
    text, answer, options = make(np.random.default_rng(seed))
    return Instance(id=name, text=text, answer=answer, options=options)


def _shots(make: Callable[[Rng], Made]) -> tuple[Instance, ...]:
    return tuple(_instance(make, (0, 0, i), f"shot-{i}") for i in range(SHOTS))


def _task(make: Callable[[Rng], Made], name: str, about: str, question: str, answer: str = " {answer}") -> Task:
    shots = _shots(make)
    adapter = Adapter(
        method=CHOICE if shots[0].options else GENERATION,
        question=question,
        answer=answer,
        between="\n",
        shots=shots,
        stop=("\n",),
        max_tokens=24,
    )
    return Task(name=name, about=about, instances=_instances(make, name), text=adapter, scorer=exact)


def _chains(source: Source) -> Iterator[Instance]:
    count = source.size or CHAIN_DEPTHS * CHAINS
    for i in range(count):
        depth = 1 + i % CHAIN_DEPTHS
        one = chain(np.random.default_rng((source.seed, 2, i)), depth)
        yield Instance(id=f"chain-{i}", text=one.prompt, answer=one.answer, group=str(depth))


TASKS = [
    _task(copied, "copy", "five words said again", "Words: {text}\nCopy:"),
    _task(compared, "compare", "the larger of two numbers below 100", "The larger of {text} is"),
    _task(sorted_letters, "sort", "four letters put in order", "Letters: {text}\nSorted:"),
    _task(looked_up, "lookup", "who has what, out of a list of four", "{text}"),
    _task(continued, "pattern", "what comes next in an order or a repetition", "{text}"),
    _task(added, "arithmetic", "sums and differences of numbers below 50", "{text}"),
    Task(
        name="chain",
        about="chained arithmetic modulo 10, from left to right, as r1-tiny learned it",
        instances=_chains,
        text=Adapter(max_tokens=6 * CHAIN_DEPTHS + 16),
        chat=Adapter(max_tokens=6 * CHAIN_DEPTHS + 16),
        scorer=exact,
    ),
]
EASY = tuple(task.name for task in TASKS[:-1])
