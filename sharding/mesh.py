"""Meshes: devices in named axes, as many as were asked for and not as many as there are."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rzoo.core import RzooError, closest

# From the outermost to the innermost: what exchanges most lies on neighbouring devices. `group` is made by rules.py.
AXES = ("pipe", "data", "fsdp", "expert", "tensor", "group")
ASKED = AXES[:-1]

Sizes = dict[str, int]  # mesh axis -> number of devices along it


def parse_mesh(text: str) -> Sizes:
    """The sizes in "tensor=4,data=2". Raises RzooError for anything else."""
    sizes: Sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not (name.strip() and size.strip().isdigit()) or name.strip() in sizes:
            raise RzooError(
                f"mesh ({text}) must be sizes of different axes such as tensor=4,data=2", field="mesh", value=text
            )
        sizes[name.strip()] = int(size)
    return checked_sizes(sizes)


def checked_sizes(sizes: Mapping[str, int]) -> Sizes:
    """The same sizes in the order of AXES. Raises RzooError for an unknown axis or a size that is none."""
    for name, size in sizes.items():
        if name not in ASKED:
            raise RzooError(f"mesh axis ({name}) is unknown; {closest(name, list(ASKED))}", field="mesh", value=name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise RzooError(f"mesh axis {name} ({size}) must be an integer of at least 1", field="mesh", value=size)
    return {name: sizes[name] for name in ASKED if name in sizes}


def make_mesh(sizes: Sizes, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over the first devices of the machine, or over all devices of all processes.

    devices: others than the machine's, such as GPUs that programs are compiled for. Raises RzooError where there are
    fewer, and where several processes would leave some out.
    """
    names = [name for name in AXES if name in sizes]
    count, devices = math.prod(sizes.values()), jax.devices() if devices is None else devices
    if count > len(devices):
        fix = f"on CPUs, start with XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        raise RzooError(
            f"mesh ({spelled(sizes)}) needs {count} devices, this machine has {len(devices)} ({devices[0].platform})",
            field="mesh",
            value=sizes,
            fix=fix if devices[0].platform == "cpu" else f"ask for at most {len(devices)} devices",
        )
    if jax.process_count() > 1 and count < len(devices):
        raise RzooError(
            f"mesh ({spelled(sizes)}) has {count} devices, but {jax.process_count()} processes bring {len(devices)}",
            field="mesh",
            value=sizes,
            fix="ask for all of them, or start fewer processes",
        )
    return Mesh(np.asarray(devices[:count]).reshape([sizes[name] for name in names]), names)


def sizes_of(mesh: Any) -> Sizes:
    """Mesh axis -> number of devices."""
    return dict(mesh.shape)


def spelled(sizes: Mapping[str, int]) -> str:
    """The sizes as --mesh takes them."""
    return ",".join(f"{name}={size}" for name, size in sizes.items()) or "one device"
