"""`rzoo report`: what the programs of a model cost and how near they come to what this machine can do.

Of each phase: floating-point operations and bytes, their ratio, fusions by kind, launches, temporary memory, time, and
the shares of the read bandwidth and of the matrix rate, both measured in the same process. Every number says by the
group that it stands in whether it is counted from shapes, read from the compiled program or measured.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from rzoo.compile.hlo import parse
from rzoo.compile.kernels import policy_forms
from rzoo.compile.record import Record
from rzoo.compile.storage import plain
from rzoo.compile.workload import HELD, Case, Work
from rzoo.core import new_figure, save_figure
from rzoo.models.registry import abstract_weights
from rzoo.models.stacking import unstack
from rzoo.models.weights import Numerics

READ_BYTES = 2**28  # of one array: more than a cache holds
SQUARE = 1024  # rows of the matrices whose product gives the matrix rate
REPEATS = 7


def report(lm: Any, batches: Sequence[int] = (1, 8), prompt: int = 128) -> dict[str, Any]:
    """Costs of decode for each of `batches` rows, and of one prompt of `prompt` tokens, in JSON's types.

    Of a tuned handle the same programs without its record stand under "untuned".
    """
    cases = [*(Case("decode", rows, 4) for rows in batches), Case("prefill", 1, prompt)]
    machine = {"read_bytes_per_second": read_rate(), "matrix_flops_per_second": matrix_rate(lm.forms.numerics)}
    found = {"model": lm.source, "policy": lm.policy, "machine": machine, "phases": _phases(lm, cases, machine)}
    if lm.record is not None:
        params = plain(unstack(lm.config, lm.params))
        forms = policy_forms(lm.policy, params["embed"].dtype)
        found["untuned"] = _phases(replace(lm, params=params, forms=forms, record=None), cases, machine)
    return found


def _phases(lm: Any, cases: Sequence[Case], machine: Mapping[str, float]) -> dict[str, Any]:
    record = lm.record or Record({})
    works = [Work(lm.blueprint, lm.params, case, record.options(case.phase, case.rows)) for case in cases]
    return {work.case.name: phase(work, machine) for work in works}


def phase(work: Work, machine: Mapping[str, float]) -> dict[str, Any]:
    """One program: what is counted, what XLA made of it, and what was measured."""
    steps = work.case.tokens if work.case.phase == "decode" else 1
    flops, size = steps * flops_of(work), steps * bytes_of(work)
    compiled = work.compiled()
    memory, costs = compiled.memory_analysis(), parse(compiled.as_text()).costs
    seconds = median(_timed(work) for _ in range(REPEATS))
    return {
        "counted": {"flops": flops, "bytes": size, "intensity": flops / size},
        "compiled": {
            "fusions": costs.fusions,
            "launches": costs.launches,
            "temporary_bytes": getattr(memory, "temp_size_in_bytes", None),
        },
        "measured": {
            "seconds": seconds,
            "tokens_per_second": work.case.rows * work.case.tokens / seconds,
            "share_of_bandwidth": size / seconds / machine["read_bytes_per_second"],
            "share_of_matrix_rate": flops / seconds / machine["matrix_flops_per_second"],
        },
    }


def flops_of(work: Work) -> float:
    """Two for each weight and token that meet, and for each query, key and channel twice; of one step of decode."""
    rows, decode = work.case.rows, work.case.phase == "decode"
    tokens = rows if decode else rows * work.case.tokens
    config = work.blueprint.config
    matrices = sum(_met(path, w.shape, config) for path, (axes, w) in abstract_weights(config).items() if len(axes) > 1)
    head = math.prod(abstract_weights(config)["embed"][1].shape)
    keys = HELD + work.case.tokens / 2 if decode else work.case.tokens / 2
    attention = _attention_numbers(work, keys)
    return 2.0 * (tokens * (matrices + attention) + rows * head)


def _met(path: str, shape: tuple[int, ...], config: Any) -> float:
    """Numbers of a weight that one token meets: of the experts the chosen ones; the head is counted apart."""
    if path in ("embed", "head") or path.startswith("mtp_module."):
        return 0.0
    experts = getattr(config, "experts", None)
    return math.prod(shape) * (experts.active / experts.count if "expert_" in path and experts else 1.0)


def _attention_numbers(work: Work, keys: float) -> float:
    """Products of one query token with `keys` cached positions, over all layers and heads."""
    config = work.blueprint.config
    slots = jax.eval_shape(lambda: work.blueprint.empty_cache(1, 1)).slots
    total = sum(keys * config.indexer.heads * math.prod(leaf.shape) for leaf in _index_keys(slots))
    for slot in slots:
        # Latents are keys and values at once.
        leaves = [leaf for leaf in jax.tree.leaves(slot) if leaf is not getattr(slot, "index_keys", None)]
        for leaf in leaves:
            total += _attended(work, keys) * math.prod(leaf.shape) * config.heads / leaf.shape[-3] * 2 / len(leaves)
    return total


def _index_keys(slots: Iterable[Any]) -> list[Any]:
    """Of the layers that have an indexer."""
    return [slot.index_keys for slot in slots if getattr(slot, "index_keys", None) is not None]


def _attended(work: Work, keys: float) -> float:
    """Of so many positions, those that attention reads: all, or what an indexer keeps."""
    indexer = getattr(work.blueprint.config, "indexer", None)
    return min(keys, float(indexer.keep)) if indexer else keys


def bytes_of(work: Work) -> float:
    """Bytes of weights that one step reads, an embedding that is no head aside, and of the cache in use."""
    params, config = work.params, work.blueprint.config
    tied = "head" not in abstract_weights(config)
    tokens = work.case.rows * (work.case.tokens if work.case.phase == "prefill" else 1)
    experts = getattr(config, "experts", None)
    read = 0.0
    for path, value in params.items():
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(value))
        if "expert_" in path and experts:
            size *= min(1.0, tokens * experts.active / experts.count)
        unread = path.startswith("mtp_module.") or (path == "embed" and not tied)
        read += 0 if unread else size
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(work.cache.slots)) / work.cache.capacity
    if work.case.phase != "decode":
        return read + held * work.case.tokens
    index = sum(leaf.nbytes for leaf in _index_keys(work.cache.slots)) / work.cache.capacity
    return read + index * HELD + (held - index) * _attended(work, float(HELD))


def read_rate(size: int = READ_BYTES) -> float:
    """Bytes per second of a matrix-vector product over an array of `size` bytes, which no cache should hold."""
    matrix = jnp.ones((size // 4 // 4096, 4096), jnp.float32)
    product, vector = jax.jit(lambda a, x: a @ x), jnp.ones(4096, jnp.float32)
    run = lambda: product(matrix, vector).block_until_ready()  # noqa: E731
    run()
    return size / min(_timed(run) for _ in range(REPEATS))


def matrix_rate(numerics: Numerics, rows: int = SQUARE) -> float:
    """Operations per second of a product of square matrices in the types of the policy."""
    square = jnp.ones((rows, rows), numerics.compute)
    product = jax.jit(lambda a: numerics.dot_accumulated("ij,jk->ik", a, a))
    run = lambda: product(square).block_until_ready()  # noqa: E731
    run()
    return 2 * rows**3 / min(_timed(run) for _ in range(REPEATS))


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def table(found: Mapping[str, Any]) -> str:
    """The report as lines for a person."""
    machine = found["machine"]
    lines = [
        f"reads {machine['read_bytes_per_second'] / 1e9:.1f} GB/s,"
        f" multiplies {machine['matrix_flops_per_second'] / 1e9:.0f} Gflop/s (measured)",
        f"{'':20}{'Gflop':>8}{'GB':>8}{'flop/B':>8}"
        f"{'launches':>10}{'temp MiB':>10}{'tok/s':>8}{'read':>7}{'matrix':>8}",
    ]
    for group in ("untuned", "phases"):
        label = "untuned " if group == "untuned" else ""
        for name, one in found.get(group, {}).items():
            counted, compiled, measured = one["counted"], one["compiled"], one["measured"]
            lines.append(
                f"{label + name:20}{counted['flops'] / 1e9:8.2f}{counted['bytes'] / 1e9:8.2f}"
                f"{counted['intensity']:8.1f}"
                f"{compiled['launches']:10}{(compiled['temporary_bytes'] or 0) / 2**20:10.1f}"
                f"{measured['tokens_per_second']:8.1f}{measured['share_of_bandwidth']:7.0%}"
                f"{measured['share_of_matrix_rate']:8.0%}"
            )
    return "\n".join(lines)


def plot(found: Mapping[str, Any], path: str | Path) -> None:
    """Draws the roofline of this machine and each phase below it. Raises RzooError without matplotlib."""
    machine = found["machine"]
    read, rate = machine["read_bytes_per_second"], machine["matrix_flops_per_second"]
    axes = new_figure(figsize=(6, 4), layout="constrained").subplots()
    at = [0.1, rate / read, 1e4]
    axes.loglog(at, [min(rate, read * x) for x in at], color="black")
    for group, mark in (("untuned", "x"), ("phases", "o")):
        for name, one in found.get(group, {}).items():
            done = one["counted"]["flops"] / one["measured"]["seconds"]
            axes.loglog(one["counted"]["intensity"], done, mark, label=f"{group} {name}".removeprefix("phases "))
    axes.set(xlabel="operations per byte", ylabel="operations per second", title=found["model"].split(" from ")[0])
    axes.legend()
    save_figure(axes.figure, path)
