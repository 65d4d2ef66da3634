"""What fits where: bytes from shapes, and the memory at hand."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from rzoo.models.registry import abstract_weights

GIB = 2**30


def weight_bytes(config: Any, dtype: Any) -> int:
    """Bytes of all weights of a model in `dtype`."""
    size = jnp.dtype(dtype).itemsize
    return sum(math.prod(shape.shape) * size for _, shape in abstract_weights(config).values())


def largest_weight_bytes(config: Any, dtype: Any) -> int:
    """Bytes of the largest single weight: what a load needs beside the weights that it has placed."""
    size = jnp.dtype(dtype).itemsize
    return max(math.prod(shape.shape) * size for _, shape in abstract_weights(config).values())


def free_memory() -> int | None:
    """Bytes that the default device can still take; None where nothing tells."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return free_host_memory()


def free_host_memory() -> int | None:
    """Bytes of main memory that a process can take: the lower of what the system has and what its group may use."""
    bounds = []
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        bounds.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            bounds.append(int(limit.read()) - int(current.read()))
    except (OSError, ValueError):
        pass  # no control group, or "max"
    return min(bounds) if bounds else None


def in_gib(count: int) -> str:
    """Bytes as text, in GiB or MiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
