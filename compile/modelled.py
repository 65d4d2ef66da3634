"""What a model needs on a machine by arithmetic alone: shapes, the rules' splits and a table of hardware numbers.

The figures that a compiled program replaces (plan.py), those that no program tells (the roofline), and the search for
plans that fit.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh

from rzoo.compile import shapes
from rzoo.compile.target_programs import CHUNK, config_of, target_forms
from rzoo.compile.targets import TARGETS, Target, target
from rzoo.core import RzooError
from rzoo.models.registry import abstract_weights
from rzoo.models.step import Blueprint
from rzoo.sharding import pipeline
from rzoo.sharding.choose import choose
from rzoo.sharding.mesh import AXES, Sizes, checked_sizes, parse_mesh, spelled
from rzoo.sharding.place import NewCache, forms_in_stages
from rzoo.sharding.placement import Placement
from rzoo.sharding.rules import RULES, resolve, table

USABLE = 0.95  # of a device's memory: the rest is the driver's, the communication library's and lost between buffers


@dataclass(frozen=True)
class Setting:
    """One plan to make: a config on devices of a kind, with everything chosen."""

    config: Any
    gpu: Target
    mesh: Sizes
    rules: str
    kv: str
    weights: str
    batch: int
    context: int
    phase: str

    @property
    def devices(self) -> int:
        """How many."""
        return math.prod(self.mesh.values())

    @property
    def tokens(self) -> int:
        """Tokens of a row in one step."""
        return 1 if self.phase == "decode" else min(CHUNK, self.context)


def setting(request: Mapping[str, Any]) -> Setting:
    """The setting of a request (plan.py), mesh and rules chosen where it names none. Raises RzooError for all that does
    not work.
    """
    config, device = config_of(request["model"]), target(request["gpu"])
    weights = shapes.checked_kind(request["weights"])
    _check_sizes(config, request)
    mesh, rules = _mesh(config, device, request, weights)
    kept = {name: request[name] for name in ("kv", "batch", "context", "phase")}
    made = Setting(config, device, mesh, rules, weights=weights, **kept)
    place_of(made)  # raises what does not divide
    return made


def _check_sizes(config: Any, request: Mapping[str, Any]) -> None:
    for name in ("devices", "batch", "context"):
        value = request[name]
        if name == "devices" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RzooError(f"{name} ({value}) must be an integer of at least 1", field=name, value=value)
    if request["context"] > config.context:
        words = f"context ({request['context']}) is more than the {config.context} tokens that the model was made for"
        raise RzooError(words, field="context", value=request["context"])
    if request["phase"] not in ("decode", "prefill"):
        phase = request["phase"]
        raise RzooError(f"phase ({phase}) must be decode or prefill", field="phase", value=phase)


def _mesh(config: Any, device: Target, request: Mapping[str, Any], weights: str) -> tuple[Sizes, str]:
    devices, rules, mesh = request["devices"] or 1, request["rules"], request["mesh"]
    if mesh is not None:
        sizes = parse_mesh(mesh) if isinstance(mesh, str) else checked_sizes(mesh)
        if request["devices"] not in (None, math.prod(sizes.values())):
            raise RzooError(f"mesh ({spelled(sizes)}) is not of {devices} devices", field="devices", value=devices)
        return sizes, table(rules).name if rules else _rules_of(sizes)
    if devices == 1:
        return {}, "single"
    if rules and len(table(rules).mesh_axes) == 1:
        return {table(rules).mesh_axes[0]: devices}, table(rules).name
    if rules and table(rules).name == "single":
        raise RzooError(f"rules (single) leave {devices - 1} of {devices} devices idle", field="rules", value=rules)
    chosen = choose(config, devices, rules=rules, dtype=shapes.code_type(weights), free=int(USABLE * device.memory))
    return chosen.mesh, chosen.rules


def _rules_of(sizes: Sizes) -> str:
    """The rules whose axes are just those of a mesh."""
    axes = {name for name, size in sizes.items() if size > 1}
    found = next((name for name in RULES if set(table(name).mesh_axes) == axes), None)
    if found is None:
        raise RzooError(f"no rules have just the axes {', '.join(axes)}", field="mesh", value=sizes)
    return found


def place_of(made: Setting) -> Any:
    """The Placement or Pipeline of a setting, over devices that need not be there; None for one device.

    Raises RzooError for what does not divide.
    """
    if made.devices == 1:
        return None
    sizes, rules = resolve(made.config, made.mesh, table(made.rules), made.kv)
    names = [name for name in AXES if name in sizes]
    whole = AbstractMesh(tuple(sizes[name] for name in names), tuple(names))
    if "pipe" not in sizes:
        return Placement(whole, rules)
    stage = AbstractMesh(whole.axis_sizes[1:], whole.axis_names[1:])
    return forms_in_stages(made.config, whole, [stage] * sizes["pipe"], rules, target_forms()).place


@dataclass(frozen=True)
class Part:
    """Bytes on each device of a stage, or of the whole: weights, those of them that one step reads, cache."""

    weights: int
    read: float
    cache: int


def parts(made: Setting) -> list[Part]:
    """What each stage's devices hold; one entry where there are no stages. Raises RzooError for blocks that are cut."""
    config, place = made.config, place_of(made)
    params = shapes.weight_shapes(config, made.weights)
    forms = target_forms()
    make = Blueprint(config, forms).cache_maker(made.context)
    if place is None:
        return [_part(made, params, jax.eval_shape(lambda: make(made.batch)))]
    if not isinstance(place, pipeline.Pipeline):
        return [_part(made, shapes.placed(params, config, place), NewCache(place, forms).shapes(make, made.batch))]
    params = shapes.placed(shapes.with_copy(params, config, pipeline.COPY), config, place)
    groups = pipeline.NewPipelineCache(place, forms).shapes(make, made.batch).slots
    by_stage = enumerate(shapes.by_stage(params, place))
    return [_part(made, own, [group[number] for group in groups]) for number, own in by_stage]


def _part(made: Setting, params: Any, cache: Any) -> Part:
    read = _read(made, params) * made.mesh.get("fsdp", 1)  # gathered for use
    return Part(shapes.device_bytes(params), read, shapes.device_bytes(cache))


def _read(made: Setting, params: Any) -> float:
    """Bytes of weights that one step reads: an embedding that is no head but for its rows, of experts the chosen."""
    experts, tied = getattr(made.config, "experts", None), "head" not in abstract_weights(made.config)
    total = 0.0
    for path, value in params.items():
        share = 1.0 if path != "embed" or tied else 0.0
        if "expert_" in path and experts:  # each of them unless no token of the step chose it
            share = 1 - (1 - experts.active / experts.count) ** (made.batch * made.tokens)
        total += share * shapes.device_bytes(value)
    return total


def temp_bytes(made: Setting) -> int:
    """A guess at what a step needs beside weights and cache: logits twice, a few activations of each token."""
    rows = made.batch * made.tokens
    return 8 * made.batch * made.config.vocab_size + 32 * rows * made.config.width


def flops(made: Setting) -> float:
    """Of one step on all devices: two for each weight that a token meets, and for keys and values."""
    experts = getattr(made.config, "experts", None)
    met, head = 0.0, abstract_weights(made.config)["embed"][1].size
    for path, (axes, weight) in abstract_weights(made.config).items():
        if len(axes) > 1 and path not in ("embed", "head"):
            met += weight.size * (experts.active / experts.count if "expert_" in path and experts else 1)
    return 2.0 * made.batch * (made.tokens * met + head)


def exchanged(made: Setting, held: int) -> list[dict[str, Any]]:
    """Collectives of one step as the rules imply them, in the form of target_programs.facts. held: bytes of weights on
    a device.
    """
    found = []
    reduced = math.prod(made.mesh.get(axis, 1) for axis in ("tensor", "expert"))
    if reduced > 1:
        rows = made.batch // math.prod(made.mesh.get(axis, 1) for axis in ("data", "fsdp")) or 1
        size = rows * made.tokens * made.config.width * 4
        count = sum(_halves(made.config).values())
        found.append({"kind": "all-reduce", "devices": list(range(reduced)), "count": count, "bytes": size * count})
    gathered = made.mesh.get("fsdp", 1)
    if gathered > 1:
        count, devices = len(abstract_weights(made.config)), [i * reduced for i in range(gathered)]
        found.append({"kind": "all-gather", "devices": devices, "count": count, "bytes": held * gathered})
    return found


def _halves(config: Any) -> dict[str, int]:
    """How many layers have attention, and how many a feed-forward part, by a weight that each has."""
    halves = {path.rpartition(".")[0] for path in abstract_weights(config) if path.startswith("layers.")}
    return {name: sum(half.endswith(f".{name}") for half in halves) for name in ("attention", "mlp")}


def seconds(made: Setting, read: float, collectives: list[dict[str, Any]]) -> dict[str, float]:
    """The roofline of one step by the hardware's data sheet: memory, arithmetic, exchange, and their sum, in which
    memory and arithmetic overlap. read: bytes on the device that reads most. Stages of a pipeline work on as many
    groups of rows at once; a step is over when each group was in each stage: read and collectives are of one group.
    """
    stages = made.mesh.get("pipe", 1)
    memory = stages * read / made.gpu.bandwidth
    arithmetic = flops(made) / made.devices / made.gpu.rate("bf16")
    exchange = stages * sum(_time(made.gpu, found) for found in collectives)
    if stages > 1:  # what one stage gives the next, in bfloat16
        exchange += made.batch * made.tokens * made.config.width * 2 / made.gpu.network
    total = max(memory, arithmetic) + exchange
    return {"memory": memory, "arithmetic": arithmetic, "exchange": exchange, "total": total}


def _time(gpu: Target, found: Mapping[str, Any]) -> float:
    """Seconds of collectives in a ring over the slowest link that they cross; without latency."""
    group = found["devices"]
    n = max(2, len(group))
    within = max(group, default=0) // gpu.node == min(group, default=0) // gpu.node
    rate = gpu.link if within else gpu.network
    passes = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(found["kind"], (n - 1) / n)
    return passes * found["bytes"] / rate if rate else math.inf


def needed(made: Setting) -> int:
    """Bytes on the fullest device."""
    return max(part.weights + part.cache for part in parts(made)) + temp_bytes(made)


def sequences(made: Setting, held: list[Part], temp: int) -> int:
    """How many rows of `context` tokens fit beside the weights."""
    free = [USABLE * made.gpu.memory - part.weights - temp for part in held]
    each = [part.cache / made.batch for part in held]
    return max(0, min(int(room // size) for room, size in zip(free, each, strict=True) if size > 0))


def nearest(made: Setting) -> list[dict[str, Any]]:
    """The plans that fit and differ least: one for each thing that can change, by arithmetic."""
    found = []
    for changes in (_kinds(made), _more_devices(made), _smaller(made, "batch"), _smaller(made, "context"), _gpus(made)):
        for changed in changes:
            try:
                bytes_needed = needed(changed)
            except RzooError:
                continue
            if bytes_needed <= USABLE * changed.gpu.memory:
                found.append(_said(made, changed, bytes_needed))
                break
    return found


def _kinds(made: Setting) -> Iterator[Setting]:
    for kind in ("fp8", "int8", "int4"):
        smaller = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4}
        if smaller[kind] < smaller[made.weights] and (kind != "fp8" or "fp8" in dict(made.gpu.rates)):
            yield replace(made, weights=kind)


def _more_devices(made: Setting) -> Iterator[Setting]:
    count = made.devices
    while made.gpu.link and count < 512:
        count *= 2
        axis = next(iter(made.mesh), "tensor")
        mesh = dict(made.mesh) | {axis: made.mesh.get(axis, 1) * count // made.devices}
        yield replace(made, mesh=mesh, rules="tensor" if made.devices == 1 else made.rules)


def _smaller(made: Setting, name: str) -> Iterator[Setting]:
    value = getattr(made, name) // 2
    while value >= (1 if name == "batch" else 256):
        yield replace(made, **{name: value})
        value //= 2


def _gpus(made: Setting) -> Iterator[Setting]:
    larger = [gpu for gpu in TARGETS.values() if gpu.memory > made.gpu.memory]
    for gpu in sorted(larger, key=lambda gpu: gpu.memory):
        yield replace(made, gpu=gpu)


def _said(made: Setting, changed: Setting, bytes_needed: int) -> dict[str, Any]:
    fields = ("weights", "batch", "context", "rules", "mesh")
    changes: dict[str, Any] = {f: getattr(changed, f) for f in fields if getattr(changed, f) != getattr(made, f)}
    if changed.gpu is not made.gpu:
        changes["gpu"] = changed.gpu.name
    if changed.devices != made.devices:
        changes["devices"] = changed.devices
    return {"change": changes, "bytes": bytes_needed, "basis": "modelled"}


def seconds_a_prompt_token(made: Setting) -> float:
    """Seconds in which all devices together read one token of a prompt, by the rate of their matrix units alone."""
    prompt = replace(made, phase="prefill", batch=1)
    return flops(prompt) / prompt.tokens / made.devices / made.gpu.rate("bf16")
