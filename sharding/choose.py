"""The choice of a mesh and rules where none are asked for, by bytes and traffic."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from rzoo.core import RzooError
from rzoo.models.registry import abstract_weights
from rzoo.sharding.mesh import ASKED, Sizes, spelled
from rzoo.sharding.rules import RULES, SPLITS, resolve, table

LINK = 8  # how many bytes a device reads from its memory while one comes from another (H100: 3.35 TB/s, 0.45 TB/s)


@dataclass(frozen=True)
class Choice:
    """A mesh and rules. held: bytes of weights on each device. moved: bytes that each receives for a decoded token."""

    mesh: Sizes
    rules: str
    held: int
    moved: int

    def __str__(self) -> str:
        per_token = f"{self.held / 2**20:.0f} MiB of weights a device, {self.moved / 2**10:.0f} KiB exchanged a token"
        return f"mesh {spelled(self.mesh)}, rules {self.rules}: {per_token}"


def choose(config: Any, devices: int, *, rules: str | None = None, dtype: Any = "bfloat16", free: Any = None) -> Choice:
    """The mesh of up to `devices` devices that decodes one row fastest: least bytes read and received a device.

    rules: those to choose a mesh of most devices for; None compares all. free: bytes that a device can hold; what does
    not fit is not chosen where anything does. Raises RzooError where not even one device works.
    """
    found = []
    for name in [table(rules).name] if rules else RULES:
        for sizes in factorings(table(name).mesh_axes, devices):
            try:
                resolve(config, sizes, table(name))
            except RzooError:
                continue
            found.append(_costed(config, sizes, name, dtype))
    if not found:
        raise RzooError(f"rules ({rules}) work on no mesh of up to {devices} devices", field="rules", value=rules)
    count = lambda choice: math.prod(choice.mesh.values())  # noqa: E731
    if rules:  # asked for: then on as many devices as they can use
        found = [choice for choice in found if count(choice) == max(map(count, found))]
    fits = [choice for choice in found if free is None or choice.held <= free]
    read = lambda choice: choice.held * choice.mesh.get("pipe", 1)  # stages take turns  # noqa: E731
    return min(fits or found, key=lambda c: (read(c) + LINK * c.moved, count(c)))


def factorings(axes: tuple[str, ...], devices: int) -> Iterator[Sizes]:
    """Every way to give each of `axes` two devices or more, `devices` in all at most."""
    if not axes:
        yield {}
        return
    for size in range(2, devices + 1):
        for rest in factorings(axes[1:], devices // size):
            yield {axes[0]: size, **rest}


def implied_rules(mesh: Sizes) -> str:
    """The first rules that have all axes of a mesh. Raises RzooError where there are none."""
    axes = {name for name in ASKED if mesh.get(name, 1) > 1}
    for name in RULES:
        if axes <= set(table(name).mesh_axes):
            return name
    raise RzooError(
        f"no rules have all axes of the mesh ({spelled(mesh)})",
        field="mesh",
        value=mesh,
        fix=f"rules and their axes: {', '.join(RULES)}",
    )


def _costed(config: Any, sizes: Sizes, rules: str, dtype: Any) -> Choice:
    size = jnp.dtype(dtype).itemsize
    held = moved = 0.0
    for axes, weight in abstract_weights(config).values():
        ways = {axis: n for axis, n in sizes.items() if set(axes) & set(SPLITS[axis].weights)}
        part = size * weight.size / math.prod(ways.values())
        held += part
        gathered = ways.get("fsdp", 1)
        moved += part * (gathered - 1)
    if sizes.get("tensor", 1) * sizes.get("expert", 1) > 1:
        width = abstract_weights(config)["embed"][1].shape[1]
        moved += (2 * config.layers + 1) * 2 * width * 4  # an all-reduce after each half of a layer
    return Choice(sizes, rules, int(held / sizes.get("pipe", 1)), int(moved))
