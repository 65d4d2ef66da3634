"""What a compiled step should not do, read from its scheduled program: lay arrays out anew, widen weights in memory,
hold the cache twice, wait for an exchange that other work could hide.

All functions take what hlo.parse made of the text, or the text; sizes are bytes.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rzoo.compile.hlo import CONTROL, FREE, SHAPE, Instruction, Program, bits_of, branches_of, parse, trips_of

# Instructions that change where numbers lie and none of them.
MOVES = frozenset(
    (
        "copy",
        "transpose",
        "reshape",
        "slice",
        "dynamic-slice",
        "dynamic-update-slice",
        "concatenate",
        "gather",
        "scatter",
    )
)
ALIAS = re.compile(r"\((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")


@dataclass(frozen=True)
class Found:
    """An instruction that should not be, the bytes that it writes, and how often it runs in one run of the program."""

    name: str
    bytes: int
    times: int


@dataclass(frozen=True)
class Overlap:
    """A collective, and what is launched, with the bytes read, between its start and the wait for its end."""

    kind: str
    name: str
    bytes: int
    launches: int
    read: int


@dataclass(frozen=True)
class Facts:
    """Of one step: launches, bytes read and written. Of the whole program: arrays of at least `at_least` bytes moved,
    those widened from 8 bits or fewer, and the bytes of arguments that results are written into.
    """

    launches: int
    read: int
    written: int
    moved: tuple[Found, ...]
    widened: tuple[Found, ...]
    aliased: int


def facts(text: str, at_least: int) -> Facts:
    """Reads a program; at_least: bytes of the smallest array that matters, such as the cache of one layer."""
    program = parse(text)
    costs = program.costs_of(step_of(program))
    return Facts(
        launches=costs.launches,
        read=costs.read,
        written=costs.written,
        moved=tuple(moved(program, at_least)),
        widened=tuple(widened(program, at_least)),
        aliased=aliased(text, program),
    )


def step_of(program: Program) -> str:
    """The computation that is one step: the body of the first loop of unknown length, else the whole."""
    loops = (i for i in program.computations[program.entry] if i.operation == "while")
    return next((str(i.called) for i in loops if trips_of(i) is None), program.entry)


def launched(program: Program, name: str | None = None, times: int = 1) -> Iterator[tuple[Instruction, int]]:
    """What a computation and all that it calls launch, each with how often; loops of unknown length count once."""
    for instruction in program.computations[name or program.entry]:
        if instruction.operation in CONTROL:
            inner = branches_of(instruction) if instruction.operation == "conditional" else [str(instruction.called)]
            for called in inner:
                yield from launched(program, called, times * (trips_of(instruction) or 1))
        elif instruction.operation not in FREE:
            yield instruction, times


def moved(program: Program, at_least: int) -> Iterator[Found]:
    """Copies, transposes and fusions of nothing else that write at least so many bytes: what is changed in place writes
    the change alone.
    """
    for instruction, times in launched(program):
        written = program.traffic(instruction)[1]
        body = program.computations.get(str(instruction.called), ()) if instruction.operation == "fusion" else ()
        large = [inner.operation for inner in body or (instruction,) if inner.size >= at_least]
        if written >= at_least and {*large} - FREE and {*large} <= MOVES | FREE:
            yield Found(instruction.name, written, times)


def widened(program: Program, at_least: int) -> Iterator[Found]:
    """Arrays of 8-bit or smaller numbers, of at least so many bytes, that are written to memory in a wider type. What a
    kernel widens on its way into a product is none: no result is as large.
    """
    for instruction, times in launched(program):
        counts = [count for count, size in _conversions(program, instruction) if size >= at_least]
        if counts and max(_counts(instruction.shape), default=0) >= min(counts):
            yield Found(instruction.name, instruction.size, times)


def _conversions(program: Program, instruction: Instruction) -> Iterator[tuple[int, int]]:
    """(numbers, bytes before) of each widening by an instruction or by what it calls."""
    if instruction.operation == "fusion":
        for inner in program.computations.get(str(instruction.called), ()):
            yield from _conversions(program, inner)
    elif instruction.operation == "convert":
        given = program.operand(instruction, 0)
        kind = SHAPE.search(given.shape) if given else None
        if given and kind and kind.group(1) != "pred" and bits_of(kind.group(1)) <= 8 and instruction.size > given.size:
            yield max(_counts(given.shape)), given.size


def _counts(shape: str) -> list[int]:
    """How many numbers each array of a shape holds."""
    return [math.prod(int(n) for n in dims.split(",") if n) for _, dims in SHAPE.findall(shape)]


def aliased(text: str, program: Program) -> int:
    """Bytes of the arguments whose memory results take over: those of a donated cache."""
    header = text.lstrip().partition("\n")[0]
    given = {i.operands[0]: i.size for i in program.computations[program.entry] if i.operation == "parameter"}
    return sum(given[number] for number in ALIAS.findall(header))


def overlaps(program: Program) -> list[Overlap]:
    """Every collective of every computation that has a start and an end of its own, in order."""
    found = []
    for body in program.computations.values():
        for first, start in enumerate(body):
            kind = program.exchanged(start)
            if kind is None or not start.operation.endswith("-start"):
                continue
            last = next(
                i for i, end in enumerate(body) if start.name in end.operands and end.operation.endswith("-done")
            )
            between = [i for i in body[first + 1 : last] if i.operation not in FREE | CONTROL]
            between = [i for i in between if not i.operation.endswith(("-done", "-update", "-start"))]
            read = sum(program.traffic(i)[0] for i in between)
            found.append(Overlap(kind, start.name, program.traffic(start)[0], len(between), read))
    return found
