"""Tasks that are made here: exact, seeded, of any size, and easy enough for a model of 135M parameters."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rzoo.data.chains import chain
from rzoo.evals.task import CHOICE, Adapter, Instance, Source, Task, Verdict

SIZE = 40  # questions where no limit is asked
TRIES = 20  # at a question that was not there yet
APART = 3  # places by size of two animals that are compared
CHAIN_DEPTHS, CHAINS = 14, 20  # operations, up to; questions of each
CHAIN_TOKENS = 6 * CHAIN_DEPTHS + 16  # of the steps and of what stands around them, for a model of bytes

THINGS, COLORS, BY_SIZE, *LISTS = (
    line.split()
    for line in (
        "apple bread chair door egg fish glass horse iron jar key lamp moon nest oil pen ring stone tree wheel",
        "red blue green yellow black white brown pink",
        "ant bee mouse rabbit cat goat horse cow elephant whale",
        "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
        "January February March April May June July August September October November December",
        "A B C D E F G H I J K L M",
        "one two three four five six seven eight nine ten eleven twelve",
    )
)

Rng = np.random.Generator
Made = tuple[str, str, tuple[str, ...]]  # a question, its answer, the options
Make = Callable[[Rng], Made]


def _picked(rng: Rng, values: list[str], count: int) -> list[str]:
    return [values[i] for i in rng.permutation(len(values))[:count]]


def _orders(rng: Rng, right: list[str]) -> tuple[str, ...]:
    """The right order and three others, shuffled."""
    found = [" ".join(right)]
    while len(found) < 4:
        found = list(dict.fromkeys([*found, " ".join(_picked(rng, right, len(right)))]))
    return tuple(_picked(rng, found, 4))


def copied(rng: Rng) -> Made:
    """Words, to be said again in the same order."""
    words = _picked(rng, THINGS, 5)
    return " ".join(words), " ".join(words), _orders(rng, words)


def compared(rng: Rng) -> Made:
    """Two animals, one of which is much the larger, by common knowledge."""
    far = [(i, j) for i in range(len(BY_SIZE)) for j in range(len(BY_SIZE)) if abs(i - j) >= APART]
    first, second = far[rng.integers(len(far))]
    text = f"Compared with the {BY_SIZE[first]}, the {BY_SIZE[second]} is"
    return text, "larger" if second > first else "smaller", ("larger", "smaller")


def put_in_order(rng: Rng) -> Made:
    """Digits, to be put in order."""
    digits = _picked(rng, list("123456789"), 4)
    return " ".join(digits), " ".join(sorted(digits)), _orders(rng, sorted(digits))


def looked_up(rng: Rng) -> Made:
    """A short list of things and their colors, one of which is asked for."""
    things, colors, which = _picked(rng, THINGS, 4), _picked(rng, COLORS, 4), int(rng.integers(4))
    told = ". ".join(f"The {thing} is {color}" for thing, color in zip(things, colors, strict=True))
    asked = f"What color is the {things[which]}? The {things[which]} is"
    return f"{told}. {asked}", colors[which], tuple(colors)


def continued(rng: Rng) -> Made:
    """A well-known order, or words that repeat, and what comes next."""
    order = LISTS[rng.integers(len(LISTS))]
    if rng.integers(2):
        start = int(rng.integers(len(order) - 4))
        shown, answer = order[start : start + 4], order[start + 4]
    else:
        cycle = _picked(rng, order, int(rng.integers(2, 4)))
        shown, answer = (cycle * 3)[: 2 * len(cycle) + 1], cycle[1]
    others = [word for word in _picked(rng, order, len(order)) if word != answer][:3]
    return ", ".join(shown) + ",", answer, tuple(_picked(rng, [answer, *others], 4))


def added(rng: Rng) -> Made:
    """The sum of two digits, among its neighbours."""
    a, b = (int(n) for n in rng.integers(1, 10, 2))
    near = _picked(rng, [str(a + b + off) for off in (-2, -1, 1, 2)], 3)
    return f"{a} + {b} =", str(a + b), tuple(_picked(rng, [str(a + b), *near], 4))


def exact(instance: Instance, text: str) -> Verdict:
    """Right where the answer is what is asked for, spaces around it apart."""
    found = text.strip()
    return Verdict(float(found == instance.answer), found or None, None if found else "unparsed")


def _instances(make: Make, name: str, shots: Sequence[Instance]) -> Callable[[Source], Iterator[Instance]]:
    """Questions that depend on the seed and their number alone; no solved example, and none twice while there are
    others.
    """

    def made(source: Source) -> Iterator[Instance]:
        seen = {shot.text for shot in shots}
        for i in range(source.size or SIZE):
            tries = (_instance(make, (source.seed, 1, i, again), f"{name}-{i}") for again in range(TRIES))
            one = next((one for one in tries if one.text not in seen), None)
            one = one or _instance(make, (source.seed, 1, i, TRIES), f"{name}-{i}")
            seen.add(one.text)
            yield one

    return made


def _instance(make: Make, seed: tuple[int, ...], name: str) -> Instance:
    text, answer, options = make(np.random.default_rng(seed))
    return Instance(id=name, text=text, answer=answer, options=options)


def _task(make: Make, name: str, about: str, question: str = "{text}", shots: int = 0) -> Task:
    solved = tuple(_instance(make, (0, 0, i), f"shot-{i}") for i in range(shots))
    adapter = Adapter(method=CHOICE, question=question, between="\n", shots=solved)
    return Task(name=name, about=about, instances=_instances(make, name, solved), text=adapter)


def _chains(source: Source) -> Iterator[Instance]:
    count = source.size or CHAIN_DEPTHS * CHAINS
    for i in range(count):
        depth = 1 + i % CHAIN_DEPTHS
        one = chain(np.random.default_rng((source.seed, 2, i)), depth)
        yield Instance(id=f"chain-{i}", text=one.prompt, answer=one.answer, group=str(depth))


TASKS = [
    _task(copied, "copy", "five words said again in their order", "Words: {text}\nCopy:", shots=2),
    _task(compared, "compare", "which of two animals is the larger"),
    _task(put_in_order, "sort", "four digits put in order", "Numbers: {text}\nSorted:", shots=2),
    _task(looked_up, "lookup", "the color of one of four things"),
    _task(continued, "pattern", "what comes next in an order or a repetition", shots=4),
    _task(added, "arithmetic", "sums of two digits", shots=4),
    Task(
        name="chain",
        about="chained arithmetic modulo 10, from left to right, as r1-tiny learned it",
        instances=_chains,
        text=Adapter(max_tokens=CHAIN_TOKENS),
        chat=Adapter(max_tokens=CHAIN_TOKENS, thought=0),
        scorer=exact,
    ),
]
EASY = tuple(task.name for task in TASKS[:-1])
