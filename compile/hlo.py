"""Reading XLA's scheduled programs: what they launch, read, write and exchange, loops times their trip counts.

A program is text in HLO's own notation, as `compiled.as_text()` gives it after scheduling, in which every instruction
outside of a fusion is one launch or none. Bytes are those of arrays in the device's memory: an operand of which a
fusion takes a slice counts as the slice, and a result that is written into its operand as what is written.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

SHAPE = re.compile(r"\b(pred|token|opaque|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.-]+)")
LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
PARTITIONS = re.compile(r"num_partitions=(\d+)")
PAIR = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
# Instructions that start no work of their own.
FREE = frozenset(
    (
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "domain",
    )
)
CONTROL = frozenset(("while", "conditional", "call"))
# Instructions within a fusion that hand on what they are given, and those that take a part of their first operand.
THROUGH = frozenset(("bitcast", "reshape", "transpose", "copy", "convert", "get-tuple-element", "tuple"))
PARTS = frozenset(("dynamic-slice", "slice", "gather"))


def bits_of(kind: str) -> int:
    """Bits of a number of an HLO type: "bf16" -> 16, "f8e4m3fn" -> 8, "pred" -> 8."""
    found = re.search(r"\d+", kind)
    return 8 if kind == "pred" else int(found.group()) if found else 0


def bytes_in(shape: str) -> int:
    """Bytes of a shape as HLO writes it, of a tuple all of its parts."""
    sizes = [(bits_of(kind), math.prod(int(n) for n in dims.split(",") if n)) for kind, dims in SHAPE.findall(shape)]
    return sum(-(-bits * count // 8) for bits, count in sizes)


@dataclass(frozen=True)
class Instruction:
    """One line: its name, shape, operation, operands by name, and the attributes after them."""

    name: str
    shape: str
    operation: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return bytes_in(self.shape)

    @property
    def called(self) -> str | None:
        """The computation that this one runs: a fusion's, a loop's body."""
        found = CALLED.search(self.attributes)
        return found.group(1) if found else None


@dataclass
class Costs:
    """Of one run of a computation on one device. collectives: (kind, devices of the first group) -> [count, bytes]."""

    launches: int = 0
    read: int = 0
    written: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    collectives: dict[tuple[str, tuple[int, ...]], list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0])
    )
    unknown_loops: int = 0

    @property
    def fusions(self) -> dict[str, int]:
        """Kind of fusion ("kLoop") -> how many are launched."""
        return {
            kind.removeprefix("fusion "): count
            for kind, count in sorted(self.kinds.items())
            if kind.startswith("fusion ")
        }

    def add(self, other: "Costs", times: int = 1) -> None:
        """Adds another computation, run so many times."""
        self.launches += times * other.launches
        self.read += times * other.read
        self.written += times * other.written
        self.unknown_loops += other.unknown_loops
        for kind, count in other.kinds.items():
            self.kinds[kind] += times * count
        for key, (count, size) in other.collectives.items():
            self.collectives[key][0] += times * count
            self.collectives[key][1] += times * size


@dataclass(frozen=True)
class Program:
    """A scheduled program: its computations by name, each in order; entry: the one that runs first; devices: how
    many run it together.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    devices: int = 1

    @cached_property
    def costs(self) -> Costs:
        """Of one run. A loop of unknown length counts once, as a decode loop does for a step."""
        return self.costs_of(self.entry)

    def costs_of(self, name: str | None) -> Costs:
        """Of one computation and all that it calls."""
        total = Costs()
        for instruction in self.computations[str(name)]:
            if instruction.operation in CONTROL:
                self._add_called(total, instruction)
            elif instruction.operation not in FREE and not instruction.operation.endswith(("-done", "-update")):
                self._add_own(total, instruction)
        return total

    def _add_called(self, total: Costs, instruction: Instruction) -> None:
        if instruction.operation == "conditional":
            total.add(max(map(self.costs_of, branches_of(instruction)), key=lambda costs: costs.read))
            return
        times = trips_of(instruction)
        total.unknown_loops += instruction.operation == "while" and times is None
        total.add(self.costs_of(instruction.called), times or 1)

    def _add_own(self, total: Costs, instruction: Instruction) -> None:
        total.launches += 1
        total.kinds[self.kind(instruction)] += 1
        collective = self._collective(instruction)
        if collective is not None:
            entry = total.collectives[collective[0], group_of(collective[1]) or tuple(range(self.devices))]
            entry[0] += 1
            entry[1] += self._payload(collective[1], instruction)
        read, written = self.traffic(instruction)
        total.read += read
        total.written += written

    def kind(self, instruction: Instruction) -> str:
        """A word for what is launched: the operation, of a fusion or custom call with its kind or target."""
        wanted = {"fusion": r'"kind":"(\w+)"|kind=(k\w+)', "custom-call": r'custom_call_target="([^"]+)"()'}
        pattern = wanted.get(instruction.operation)
        found = re.search(pattern, instruction.attributes) if pattern else None
        named = f" {found.group(1) or found.group(2)}" if found else ""
        return instruction.operation.removesuffix("-start") + named

    def operand(self, instruction: Instruction, place: int) -> Instruction | None:
        """What makes an operand of an instruction; None where it has none or it comes from elsewhere."""
        names = instruction.operands
        return self._named(instruction).get(names[place]) if place < len(names) else None

    def exchanged(self, instruction: Instruction) -> str | None:
        """The kind of collective that an instruction is or starts; None for others."""
        found = self._collective(instruction)
        return found[0] if found else None

    def _collective(self, instruction: Instruction) -> tuple[str, Instruction] | None:
        """(kind, the instruction that says over which devices) of one that exchanges something."""
        inner = instruction
        if instruction.operation == "async-start" and instruction.called in self.computations:
            inner = next(i for i in self.computations[str(instruction.called)] if i.root)
        kind = inner.operation.removesuffix("-start")
        return (kind, inner) if kind in COLLECTIVES else None

    def _payload(self, inner: Instruction, outer: Instruction) -> int:
        """Bytes of the whole that is exchanged: the larger of what goes in and what comes out."""
        given = sum(i.size for i in map(self._named(outer).get, outer.operands) if i)
        whole = outer.size - given if outer.operation.endswith("-start") and outer.shape.startswith("(") else outer.size
        return max(given, min(whole, inner.size) if inner is not outer else whole)

    def _named(self, instruction: Instruction) -> dict[str, Instruction]:
        """The instructions of the computation that holds this one, by name."""
        return self._tables[self._homes[instruction.name]]

    @cached_property
    def _tables(self) -> dict[str, dict[str, Instruction]]:
        return {name: {i.name: i for i in body} for name, body in self.computations.items()}

    @cached_property
    def _homes(self) -> dict[str, str]:
        return {i.name: name for name, body in self.computations.items() for i in body}

    def traffic(self, instruction: Instruction) -> tuple[int, int]:
        """Bytes (read, written) by one instruction outside of a fusion."""
        table = self._named(instruction)
        given = [table[name].size if name in table else 0 for name in instruction.operands]
        fused = self.computations.get(str(instruction.called)) if instruction.operation == "fusion" else None
        if fused is not None:
            read = sum(self._read_of(fused, i, size) for i, size in enumerate(given))
            return read, self._written_by(fused, instruction.size)
        if instruction.operation in PARTS:
            return instruction.size, instruction.size
        if instruction.operation == "dynamic-update-slice":
            return given[1], given[1]
        if instruction.operation.endswith("-start"):  # its shape holds operands and results
            return sum(given), max(0, instruction.size - sum(given))
        return sum(given), instruction.size

    def _read_of(self, body: tuple[Instruction, ...], number: int, whole: int) -> int:
        """Bytes that a fused computation reads of its parameter `number`."""
        parameter = next((i for i in body if i.operation == "parameter" and i.operands == (str(number),)), None)
        if parameter is None:
            return whole
        taken = self._taken(body, parameter.name)
        return whole if taken is None else min(whole, taken)

    def _taken(self, body: tuple[Instruction, ...], name: str) -> int | None:
        """Bytes taken of the value called `name` where only parts of it are; None: all of it."""
        total = 0
        for user in body:
            for place, operand in enumerate(user.operands):
                if operand != name or user.operation == "parameter":
                    continue
                part = self._taken_by(body, user, place)
                if part is None:
                    return None
                total += part
        return total

    def _taken_by(self, body: tuple[Instruction, ...], user: Instruction, place: int) -> int | None:
        if user.operation in PARTS and place == 0:
            return user.size
        if user.operation in ("dynamic-update-slice", "scatter") and place == 0:
            return 0
        if user.operation in THROUGH and not user.root:
            return self._taken(body, user.name)
        if user.operation == "fusion" and user.called in self.computations:
            inner = self.computations[str(user.called)]
            parameter = next(i for i in inner if i.operation == "parameter" and i.operands == (str(place),))
            return self._taken(inner, parameter.name)
        return None

    def _written_by(self, body: tuple[Instruction, ...], whole: int) -> int:
        """Bytes that a fused computation writes: of one that changes its operand in place, the change."""
        table = {i.name: i for i in body}
        root = next(i for i in body if i.root)
        results = [table[name] for name in root.operands] if root.operation == "tuple" else [root]
        total = 0
        for result in results:
            while result.operation in THROUGH and result.operands and result.operands[0] in table:
                result = table[result.operands[0]]
            changes = {"dynamic-update-slice": 1, "scatter": 2}.get(result.operation)
            change = table.get(result.operands[changes]) if changes else None
            total += change.size if change else result.size
        return min(whole, total) if whole else total


def parse(text: str) -> Program:
    """A program from its text. Raises ValueError for a text without an entry computation."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    body: list[Instruction] = []
    entry = name = ""
    for line in text.splitlines():
        header = HEADER.match(line)
        if header:
            name, body = header.group(2), []
            entry = name if header.group(1) else entry
        elif line.startswith("}"):
            computations[name] = tuple(body)
        elif " = " in line and line.startswith(" "):
            body.append(_instruction(line))
    if entry not in computations:
        raise ValueError("the text has no ENTRY computation: it is no HLO program")
    devices = PARTITIONS.search(text)
    return Program(computations, entry, int(devices.group(1)) if devices else 1)


def _instruction(line: str) -> Instruction:
    left, _, right = line.strip().partition(" = ")
    shape, rest = _balanced(right) if right.startswith("(") else right.split(" ", 1)
    operation, _, rest = rest.strip().partition("(")
    inside, attributes = _balanced("(" + rest)
    operands = tuple(part.split()[-1].lstrip("%") for part in _split(inside[1:-1]) if part.strip())
    name = left.removeprefix("ROOT ").lstrip("%")
    return Instruction(name, shape, operation, operands, attributes, left.startswith("ROOT "))


def _balanced(text: str) -> tuple[str, str]:
    """A text that begins with a bracket, cut behind the one that closes it."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    return text, ""


def _split(text: str) -> Iterator[str]:
    """The parts between commas outside of brackets; comments left out."""
    text, depth, start = re.sub(r"/\*.*?\*/", "", text), 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield text[start:i]
            start = i + 1
    yield text[start:]


def trips_of(instruction: Instruction) -> int | None:
    """How often a loop runs its body; None where that is unknown, and for what is no loop."""
    known = TRIPS.search(instruction.attributes)
    return int(known.group(1)) if known else None


def branches_of(instruction: Instruction) -> list[str]:
    """The computations that a conditional chooses from."""
    named = [listed or single for listed, single in BRANCHES.findall(instruction.attributes)]
    return [name.strip(" %") for names in named for name in names.split(",")]


def group_of(instruction: Instruction) -> tuple[int, ...]:
    """The devices of the first group of a collective; empty where all are one."""
    for pattern in (LISTED, PAIR):
        found = pattern.search(instruction.attributes)
        if found:
            return tuple(int(n) for text in found.groups() for n in text.split(","))
    iota = IOTA.search(instruction.attributes)
    if not iota:
        return ()
    shape, over, turned = (tuple(int(n) for n in text.split(",")) if text else () for text in iota.groups(""))
    return tuple(_iota(over, turned or tuple(range(len(over))))[: shape[-1]])


def _iota(shape: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """0, 1, 2 … in `shape`, its axes put into `order`, flattened."""
    strides = [math.prod(shape[axis + 1 :]) for axis in order]
    places = [0]
    for axis, stride in zip(order, strides, strict=True):
        places = [place + stride * i for place in places for i in range(shape[axis])]
    return places
