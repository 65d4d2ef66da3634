"""The child process that compiles for a GPU which is not there: `python -m rzoo.compile.target_programs JOB ANSWER`.

It needs jax-cuda12-pjrt and must run with JAX_PLATFORMS=cpu (deviceless.py sees to both). A job is a JSON object, see
`Job`; the answer, too, or {"error": …}. The programs are those of models/step.py from shapes alone: nothing is
allocated and no kernel runs.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rzoo.compile import hlo, shapes
from rzoo.compile.aot import decode_program, prefill_program
from rzoo.compile.hlo_facts import overlaps
from rzoo.compile.kernels import form_named, policy_forms
from rzoo.compile.sums import products_in_sums
from rzoo.compile.targets import target
from rzoo.core import RzooError
from rzoo.models.attention import attend
from rzoo.models.forms import Forms
from rzoo.models.latent import attend_absorbed
from rzoo.models.registry import config_from_hf, preset
from rzoo.models.step import Blueprint
from rzoo.sharding import pipeline
from rzoo.sharding.collectives import AttendInShares
from rzoo.sharding.place import forms_for

CHUNK = 512  # tokens of a row in one call of prefill_chunk


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to compile. model: a preset's name or the fields of a config.json. mesh: axis -> devices; empty: one device.
    kv: "split" or "copied" where devices are more than KV heads. phase: "decode" or "prefill". context: tokens that the
    cache has room for. weights: one of shapes.KINDS or a scheme. stacked: runs of equal layers as loops. forms: field
    of Forms -> name of a form (kernels.py). products: "dots", or "sums" (sums.py) on one device and unstacked. hlo:
    where the scheduled program is written, None for nowhere. options: XLA's.
    """

    model: Any
    gpu: str
    mesh: Mapping[str, int]
    rules: str
    kv: str = "split"
    phase: str = "decode"
    batch: int
    context: int
    weights: str = "bf16"
    stacked: bool = True
    forms: Mapping[str, str] = field(default_factory=dict)
    products: str = "dots"
    hlo: str | None = None
    options: Mapping[str, Any] | None = None


def config_of(model: Any) -> Any:
    """The config of a preset's name or of a config.json's fields; RzooError for others."""
    return preset(model)[1].config if isinstance(model, str) else config_from_hf(model)


def target_forms() -> Forms:
    """What programs for GPUs run on before anything is tuned: all keys of a step at once, in the types of "fast"."""
    return replace(policy_forms("fast", "bfloat16"), attend_decode=attend, latent_attend_decode=attend_absorbed)


def run(job: Job) -> dict[str, Any]:
    """Compiles a job; of a pipeline every stage. Raises RzooError for a job that can't be."""
    from jax.experimental import topologies

    config, count = config_of(job.model), math.prod(job.mesh.values())
    per_node = math.gcd(count, target(job.gpu).node)
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=target(job.gpu).description, topology=f"1x{count // per_node}x{per_node}"
    ).devices
    start = time.perf_counter()
    parts = [_compiled(lowered, job, name) for name, lowered in programs(job, config, devices)]
    return {
        "parts": parts,
        "seconds": time.perf_counter() - start,
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "jaxlib": __import__("jaxlib").__version__,
    }


@dataclass(frozen=True)
class Lowered:
    """A program to compile, and bytes on each device: of its weights, of its cache, and of caches that it does not get
    and that lie there all the same.
    """

    program: Any
    weights: int
    cache: int
    elsewhere: int = 0


def programs(job: Job, config: Any, devices: Any) -> Iterator[tuple[str, Lowered]]:
    """Each program that the job asks for, with a name; devices: as many as its mesh has, there or not."""
    forms: Any = replace(target_forms(), **{field: form_named(field, name) for field, name in job.forms.items()})
    params = shapes.weight_shapes(config, shapes.checked_kind(job.weights))
    if math.prod(job.mesh.values()) == 1:
        forms = replace(forms, stacked=job.stacked)
        blueprint, one = Blueprint(config, forms), jax.sharding.SingleDeviceSharding(devices[0])
        cache = shapes.on_one(jax.eval_shape(lambda: blueprint.empty_cache(job.batch, job.context)), one)
        if job.products == "sums":
            params = jax.eval_shape(lambda p: products_in_sums(config, p), params)
        params = shapes.on_one(params, one)
        yield "model", _lowered(job, blueprint, params, cache, lambda axes, shape: one)
        return
    forms = forms_for(config, dict(job.mesh), job.rules, forms, kv=job.kv, devices=devices)
    if isinstance(forms.place, pipeline.Pipeline):
        yield from _stages(job, config, forms, params)
        return
    if isinstance(forms.attend_decode, AttendInShares):
        forms = replace(forms, attend_decode=replace(forms.attend_decode, size=job.context))
    forms, place = replace(forms, stacked=job.stacked), forms.place
    blueprint = Blueprint(config, forms)
    cache = forms.new_cache.shapes(blueprint.cache_maker(job.context), job.batch)
    on = lambda axes, shape: place.shardings(place.spec(axes, shape))  # noqa: E731
    yield "model", _lowered(job, blueprint, shapes.placed(params, config, place), cache, on)


def _lowered(job: Job, blueprint: Blueprint, params: Any, cache: Any, on: Any) -> Lowered:
    if job.stacked:
        params = shapes.stacked(params, blueprint.config)
    held = shapes.device_bytes(params), shapes.device_bytes(cache)
    of = lambda axes, shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=on(axes, shape))  # noqa: E731
    counts = of("b", (job.batch,), jnp.int32)
    if job.phase == "prefill":
        tokens = of("bt", (job.batch, min(CHUNK, job.context)), jnp.int32)
        return Lowered(prefill_program().lower(blueprint, params, tokens, counts, cache), *held)
    logits = of("bv", (job.batch, blueprint.config.vocab_size), jnp.float32)
    key, stops = jax.eval_shape(lambda: jax.random.key(0)), of("_", (1,), jnp.int32)
    lowered = decode_program(()).lower(blueprint, params, logits, cache, key, counts, stops, steps=16)
    return Lowered(lowered, *held)


def _stages(job: Job, config: Any, forms: Forms, params: Any) -> Iterator[tuple[str, Lowered]]:
    """The programs of each stage for one group of rows; the caches of all groups lie on the devices together."""
    place: Any = forms.place
    params = shapes.placed(shapes.with_copy(params, config, pipeline.COPY), config, place)
    blueprint = Blueprint(config, forms)
    groups = forms.new_cache.shapes(blueprint.cache_maker(job.context), job.batch).slots  # type: ignore[attr-defined]
    t = 1 if job.phase == "decode" else min(CHUNK, job.context)
    for number, (stage, own) in enumerate(zip(place.stages, shapes.by_stage(params, place), strict=True)):
        rows, on = groups[0][number].lengths.shape[0], stage.placement
        shape = (rows, t) if stage.first == 0 else (rows, t, config.width)
        sharding = on.shardings(on.spec("btd"[: len(shape)], shape))
        x = jax.ShapeDtypeStruct(shape, jnp.int32 if stage.first == 0 else jnp.bfloat16, sharding=sharding)
        ends = (stage.first, stage.stop)
        lowered = pipeline.through_stage.lower(Blueprint(config, stage.forms), own, x, groups[0][number], layers=ends)
        caches = [shapes.device_bytes(group[number]) for group in groups]
        held = shapes.device_bytes(own), sum(caches), sum(caches[1:])
        yield f"stage {number}: layers {stage.first}-{stage.stop - 1}", Lowered(lowered, *held)


def _compiled(lowered: Lowered, job: Job, name: str) -> dict[str, Any]:
    compiled = lowered.program.compile(compiler_options=dict(job.options or {}))
    if job.hlo is not None:
        Path(job.hlo).write_text(compiled.as_text())
    return read(compiled, lowered, name)


def read(compiled: Any, lowered: Lowered, name: str) -> dict[str, Any]:
    """What a compiled program is made of, in JSON's types."""
    memory, weights, cache = compiled.memory_analysis(), lowered.weights, lowered.cache
    given = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + lowered.elsewhere
    return {
        "name": name,
        "weights": weights,
        "cache": cache,
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        # A stage also holds what its program does not take, such as the head that runs after the last one.
        "peak": max(given, weights + cache) + memory.temp_size_in_bytes,
        **facts(compiled.as_text()),
    }


def facts(text: str) -> dict[str, Any]:
    """What a scheduled program does in one run, in JSON's types: see hlo.Costs and hlo_facts.Overlap."""
    program = hlo.parse(text)
    costs = program.costs
    exchanged = [
        {"kind": kind, "devices": list(group), "count": count, "bytes": size}
        for (kind, group), (count, size) in sorted(costs.collectives.items())
    ]
    return {
        "launches": costs.launches,
        "read": costs.read,
        "written": costs.written,
        "kinds": dict(sorted(costs.kinds.items())),
        "collectives": exchanged,
        "unknown_loops": costs.unknown_loops,
        "overlaps": [vars(found) for found in overlaps(program)],
    }


def main(job: str, answer: str) -> None:
    """Reads a job's file and writes its answer."""
    try:
        found = run(Job(**json.loads(Path(job).read_text())))
    except RzooError as error:
        found = {"error": {"message": error.message, "field": error.field, "fix": error.fix}}
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
