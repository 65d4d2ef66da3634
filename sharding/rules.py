"""Which logical axis lies on which mesh axis: tables, what they ask of a model's sizes, and the choice among them.

A table is a list of (letter, mesh axis or None) as Flax takes it: `with nnx.logical_axis_rules(table("fsdp").weights)`
nnx.get_named_sharding gives the placement of every weight of a module.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rzoo.core import RzooError
from rzoo.models.registry import abstract_weights
from rzoo.sharding.mesh import ASKED, Sizes, spelled

LETTERS = "btskgcdvfzehprlnmixj"
SPOKEN = {
    "h": "query heads",
    "k": "key/value heads",
    "f": "feed-forward width",
    "v": "vocabulary",
    "d": "width",
    "e": "experts",
}


@dataclass(frozen=True)
class Split:
    """The letters that one mesh axis splits. Where weights have one that activations lack, it is gathered for use."""

    weights: str
    activations: str


SPLITS = {
    "data": Split("", "b"),
    "fsdp": Split("d", "b"),
    "expert": Split("e", "e"),
    "tensor": Split("hkfv", "hkfv"),
    "pipe": Split("", ""),
}
RULES = ("single", "tensor", "fsdp", "expert", "tensor×data", "tensor×fsdp", "expert×tensor", "tensor×pipe")

Axes = str | tuple[str, ...] | None
Table = tuple[tuple[str, Axes], ...]


@dataclass(frozen=True)
class Rules:
    """weights: where parameters lie. activations: where everything computed lies, the cache and weights in use too."""

    name: str
    weights: Table
    activations: Table

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The axes that a mesh for these rules has."""
        return tuple(name for name in ASKED if name in self.name.split("×"))


def table(name: str) -> Rules:
    """The rules called `name`, with x or × between the axes. Raises RzooError that lists all for another name."""
    spelling = {rule.replace("×", "x"): rule for rule in RULES}
    full = spelling.get(str(name).lower().replace("×", "x"))
    if full is None:
        raise RzooError(f"rules ({name}) are unknown; known: {', '.join(RULES)}", field="rules", value=name)
    axes = [axis for axis in ASKED if axis in full.split("×")]
    return Rules(full, _table({a: SPLITS[a].weights for a in axes}), _table({a: SPLITS[a].activations for a in axes}))


def _table(letters: Mapping[str, str]) -> Table:
    """Every letter with the mesh axis that splits it."""
    return tuple((c, next((axis for axis, split in letters.items() if c in split), None)) for c in LETTERS)


def with_group(rules: Rules, kv: str) -> Rules:
    """The rules for a mesh whose tensor axis was cut into `tensor` x `group`, as it has more devices than KV heads.

    KV heads lie on `tensor` alone. kv "split": positions of the cache lie on `group`; "copied": each has all of them.
    """
    whole = {"h": ("tensor", "group"), "f": ("tensor", "group"), "v": ("tensor", "group")}
    cached = {"s": "group"} if kv == "split" else {}
    change = lambda old, new: tuple((c, new.get(c, axis)) for c, axis in old)  # noqa: E731
    return Rules(rules.name, change(rules.weights, whole), change(rules.activations, whole | cached))


def resolve(config: Any, sizes: Sizes, rules: Rules, kv: str = "split") -> tuple[Sizes, Rules]:
    """Sizes of the mesh and rules as this model runs on them, checked.

    Raises one RzooError with all that does not divide and the nearest degrees that do, and one for a mesh axis that
    would split nothing.
    """
    if kv not in ("split", "copied"):
        raise RzooError(f"kv ({kv}) must be split or copied", field="kv", value=kv)
    idle = [axis for axis, size in sizes.items() if size > 1 and axis not in rules.mesh_axes]
    if idle:
        raise RzooError(
            f"rules ({rules.name}) leave the mesh axis {idle[0]} ({sizes[idle[0]]}) idle",
            field="rules",
            value=rules.name,
            fix=f"take a mesh of {' and '.join(rules.mesh_axes) or 'one device'} alone, or other rules",
        )
    full = {axis: sizes.get(axis, 1) for axis in rules.mesh_axes}
    _check_divides(config, full, rules)
    _check_used(config, full, rules)
    degree = full.get("tensor", 1)
    per_kv = math.gcd(degree, *axis_sizes(config).get("k", ()))
    if per_kv == degree:
        return full, rules
    return full | {"tensor": per_kv, "group": degree // per_kv}, with_group(rules, kv)


def axis_sizes(config: Any) -> dict[str, dict[int, str]]:
    """Letter -> each size that it has in a model, with a weight that has it."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for path, (axes, weight) in abstract_weights(config).items():
        for letter, size in zip(axes, weight.shape, strict=True):
            found[letter].setdefault(size, path)
    return found


def _degrees(config: Any, rules: Rules, axis: str) -> dict[str, dict[int, str]]:
    """Letter -> sizes that a mesh axis must divide. KV heads need not: they are shared out in groups."""
    letters = [letter for letter, on in rules.weights if on == axis and letter != "k"]
    sizes = axis_sizes(config)
    return {letter: sizes[letter] for letter in letters if letter in sizes}


def _check_divides(config: Any, sizes: Sizes, rules: Rules) -> None:
    lines, fixes = [], []
    for axis, degree in sizes.items():
        found = _degrees(config, rules, axis)
        wrong = [(c, n, path) for c, of in found.items() for n, path in of.items() if n % degree]
        for letter, size, path in wrong:
            shape = list(abstract_weights(config)[path][1].shape)
            lines.append(f"{path} {shape}: {SPOKEN[letter]} ({size}) over {axis} ({degree})")
        if wrong:
            fixes.append(f"{axis}={nearest_degree([n for of in found.values() for n in of], degree)}")
    layers = config.layers
    if sizes.get("pipe", 1) > layers:
        lines.append(f"{layers} layers over pipe ({sizes['pipe']})")
        fixes.append(f"pipe={layers}")
    if lines:
        raise RzooError(
            "\n  ".join([f"mesh ({spelled(sizes)}) does not divide the model under rules {rules.name}:", *lines]),
            field="mesh",
            value=sizes,
            fix=f"nearest that works: {', '.join(fixes)}",
        )


def nearest_degree(sizes: list[int], degree: int) -> int:
    """The degree closest to the asked one that divides all sizes; the lower of two."""
    common = math.gcd(*sizes)
    return min((n for n in range(1, common + 1) if common % n == 0), key=lambda n: (abs(n - degree), n))


def _check_used(config: Any, sizes: Sizes, rules: Rules) -> None:
    """An axis that splits neither a weight nor the batch would only make copies."""
    for axis, degree in sizes.items():
        if degree > 1 and axis != "pipe" and "b" not in SPLITS[axis].activations and not _degrees(config, rules, axis):
            raise RzooError(
                f"the mesh axis {axis} ({degree}) splits nothing of this model under rules {rules.name}: it has no"
                f" {' and no '.join(SPOKEN[c] for c in SPLITS[axis].weights)}",
                field="mesh",
                value=axis,
                fix=f"leave {axis} out",
            )
