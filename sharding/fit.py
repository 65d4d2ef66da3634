"""What fits where: bytes from shapes, and the memory at hand."""

import math
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from rzoo.core import RzooError
from rzoo.models.registry import abstract_weights
from rzoo.models.step import Blueprint

GIB = 2**30


def weight_bytes(config: Any, dtype: Any) -> int:
    """Bytes of all weights of a model in `dtype`."""
    size = jnp.dtype(dtype).itemsize
    return sum(math.prod(shape.shape) * size for _, shape in abstract_weights(config).values())


def largest_weight_bytes(config: Any, dtype: Any) -> int:
    """Bytes of the largest single weight: what a load needs beside the weights that it has placed."""
    size = jnp.dtype(dtype).itemsize
    return max(math.prod(shape.shape) * size for _, shape in abstract_weights(config).values())


def check_cache_fits(blueprint: Blueprint, batch: int, capacity: int) -> None:
    """Raises RzooError, before anything is compiled, where a cache for `batch` rows does not fit beside the weights."""
    free, needed = free_memory(), cache_bytes(blueprint, batch, capacity)
    if free is not None and needed > free:
        raise RzooError(
            f"a cache for {batch} rows of {capacity} tokens needs {in_gib(needed)}; {in_gib(free)} of memory are free",
            field="max_new_tokens",
            value=capacity,
            fix="give fewer or shorter prompts, or load the model on a larger mesh",
        )


def cache_bytes(blueprint: Blueprint, batch: int, capacity: int) -> int:
    """Bytes of a cache in the memory that free_memory counts: of one device, or of the host whose devices share it."""
    make, form = blueprint.cache_maker(capacity), blueprint.forms.new_cache
    cache = form.shapes(make, batch) if hasattr(form, "shapes") else jax.eval_shape(lambda: make(batch))
    on_cpu = jax.default_backend() == "cpu"
    total = 0
    for array in jax.tree.leaves(cache):
        sharding = array.sharding
        parts = len(sharding.addressable_devices) if sharding is not None and on_cpu else 1
        shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
        total += parts * math.prod(shape) * array.dtype.itemsize
    return total


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


def device_bytes(config: Any, dtype: Any, place: Any) -> int:
    """Bytes of weights in `dtype` on the device that holds most; place: a Placement or a Pipeline."""
    size, held = jnp.dtype(dtype).itemsize, Counter[Any]()
    for path, (axes, weight) in abstract_weights(config).items():
        placement = place.of(path)
        held[placement] += size * math.prod(placement.weight(weight, axes).shard_shape(weight.shape))
    return max(held.values())


def copies(config: Any, dtype: Any, place: Any) -> dict[str, int]:
    """Weights that several devices hold whole or in equal parts: name with * for the layer -> bytes of one, times the
    devices beside the first that hold it.
    """
    size, found = jnp.dtype(dtype).itemsize, Counter[str]()
    for path, (axes, weight) in abstract_weights(config).items():
        sharding = place.of(path).weight(weight, axes)
        part = size * math.prod(sharding.shard_shape(weight.shape))
        extra = part * sharding.mesh.devices.size - size * weight.size
        if extra:
            found[re.sub(r"\.\d+\.", ".*.", path)] += extra
    return dict(found.most_common())
