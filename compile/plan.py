"""`rzoo.plan`: what a model needs and costs on GPUs, from the program compiled for them or, without it, by arithmetic.

Every figure says its basis: "compiled" (counted in the program that XLA made for this GPU) or "modelled". Answers are
kept in a folder of the user's own under a digest of the request, our source and the versions that compile; one that is
kept needs no JAX: this file imports nothing heavy.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rzoo.compile import deviceless
from rzoo.compile.folders import private_folder, write_whole
from rzoo.compile.targets import target
from rzoo.core import RzooError

COMPILED, MODELLED = "compiled", "modelled"
BYTES = "bytes per GPU"
HOW_TO_COMPILE = f"for temp, launches, bytes read and collectives as compiled: {deviceless.INSTALL}"


@dataclass(frozen=True)
class Figure:
    """One number, its unit, and where it comes from: "compiled" or "modelled"."""

    value: int | float
    unit: str
    basis: str


@dataclass(frozen=True)
class Plan:
    """What was asked, with what was chosen, and what it needs. `figures` are of the fullest device and one step: a
    token of each row in decode, a chunk of tokens of each row in prefill. collectives: kind, devices of a group, count,
    bytes and basis. over: bytes by which it does not fit, 0 where it does. nearest: changes that fit. sequences: rows
    of this context that fit beside the weights. overlaps: each asynchronous collective of the compiled program, as
    hlo_facts.Overlap.
    """

    model: str
    gpu: str
    devices: int
    mesh: Mapping[str, int]
    rules: str
    kv: str
    weights: str
    batch: int
    context: int
    phase: str
    memory: int
    usable: int
    over: int
    sequences: int
    figures: Mapping[str, Figure]
    collectives: tuple[Mapping[str, Any], ...] = ()
    overlaps: tuple[Mapping[str, Any], ...] = ()
    stages: tuple[Mapping[str, Any], ...] = ()
    nearest: tuple[Mapping[str, Any], ...] = ()
    versions: Mapping[str, str | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the fullest device holds it."""
        return self.over == 0

    def to_json(self) -> dict[str, Any]:
        """JSON's types; `from_json` reads them."""
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return listed | {"fits": self.fits}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Plan":
        """Raises KeyError or TypeError for what is no plan."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
        }
        given["figures"] = {name: Figure(**figure) for name, figure in found["figures"].items()}
        del given["fits"]
        return cls(**given)


def plan(
    model: Any,
    *,
    gpu: str = "h100",
    devices: int | None = None,
    rules: str | None = None,
    mesh: Any = None,
    kv: str = "split",
    weights: str = "bf16",
    batch: int = 1,
    context: int = 4096,
    phase: str = "decode",
    compiled: bool = True,
    stacked: bool = True,
    tuned: bool = False,
) -> Plan:
    """Memory, traffic and time of a model on GPUs that need not be there.

    model: a preset's name, a folder with a config.json, a handle, or a config. gpu: one of targets.TARGETS. devices
    None: those of the mesh, or one. rules and mesh as in load ("tensor", {"tensor": 8, "pipe": 8}); None: chosen. kv:
    "split" or "copied", where devices are more than KV heads. weights: bf16, int8, int4 or fp8. context: tokens that
    each of `batch` rows has room for. compiled False: arithmetic alone, as where the extra gpu-aot is missing. What
    can't fit is told by arithmetic and not compiled. stacked: runs of equal layers are compiled as loops, in which XLA
    copies each layer's weights out of the stack; False takes two to five times as long to compile, and reads less.
    tuned: in the forms that `rzoo tune MODEL --gpu` found for just this.
    Raises RzooError for unknown names, sizes that do not divide, and an environment with wrong versions.
    """
    request = {"model": fields_of(model), "gpu": gpu, "devices": devices, "rules": rules, "mesh": mesh, "kv": kv}
    request |= {"weights": weights, "batch": batch, "context": context, "phase": phase, "stacked": stacked}
    python = deviceless.aot_python() if compiled and target(gpu).chip else None
    versions = deviceless.checked_versions(python) if python else {}
    if tuned:
        request |= _tuned(request, versions)
    path = _path("plans", request, versions)
    kept = _read(path)
    if kept is None:
        kept = _made(request, versions, python)
        _write(path, kept)
    return replace(kept, model=str(model) if isinstance(model, str | Path) else type(model).__name__)


def fields_of(model: Any) -> Any:
    """A preset's name, or the fields of a config.json."""
    config = getattr(model, "config", model)
    if hasattr(config, "to_hf"):
        return config.to_hf()
    if not isinstance(model, str | Path):
        raise RzooError(f"model ({model!r}) is no name, folder, handle or config", field="model", value=model)
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        return str(model)
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise RzooError(f"{path} is no JSON: {error}", field="model", value=str(model)) from None


RECORDED = ("model", "gpu", "weights", "batch", "context")  # what a record of forms for a GPU is made for


def record_path(request: Mapping[str, Any], versions: Mapping[str, str | None]) -> Path | None:
    """Where the forms lie that were found for a request; None where there is no folder of the user's own."""
    return _path("targets", {name: request[name] for name in RECORDED}, versions)


def _tuned(request: Mapping[str, Any], versions: Mapping[str, str | None]) -> Mapping[str, Any]:
    """The fields of a job that a record chose. Raises RzooError where there is no record for just this request."""
    try:
        path = record_path(request, versions)
        choice = json.loads(path.read_text())["choice"] if path else None
    except (OSError, ValueError, KeyError, TypeError):
        choice = None
    one = request["devices"] in (None, 1) and not request["mesh"] and request["phase"] == "decode"
    if not one or not isinstance(choice, dict):
        options = " ".join(f"--{name} {request[name]}" for name in RECORDED[1:])
        words = "there are no forms tuned for this: they are found for one GPU, for decode, by this version"
        raise RzooError(words, field="tuned", value=True, fix=f"rzoo tune MODEL {options}")
    return {name: choice[name] for name in ("stacked", "forms", "products") if name in choice}


def _path(kind: str, request: Mapping[str, Any], versions: Mapping[str, str | None]) -> Path | None:
    folder = private_folder(kind)
    depends = json.dumps([request, versions, deviceless.source_digest()], sort_keys=True, default=str)
    return None if folder is None else folder / f"{hashlib.sha256(depends.encode()).hexdigest()[:32]}.json"


def _read(path: Path | None) -> Plan | None:
    """The plan in a file; None for a file that is not there or broken, which is made again."""
    try:
        return None if path is None else Plan.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path | None, made: Plan) -> None:
    if path is not None:
        write_whole(path, json.dumps(made.to_json()).encode())


def _made(request: Mapping[str, Any], versions: Mapping[str, str | None], python: Path | None) -> Plan:
    from rzoo.compile import modelled

    made = modelled.setting(request)
    held, temp, usable = modelled.parts(made), modelled.temp_bytes(made), int(modelled.USABLE * made.gpu.memory)
    bytes_held = max(part.weights + part.cache for part in held)
    found = fullest = None
    if python is not None and bytes_held <= usable:
        job = dict(request) | {"mesh": made.mesh, "rules": made.rules}
        del job["devices"]
        found = deviceless.compile_for(job, python)
        fullest = max(found["parts"], key=lambda part: part["peak"])
        temp = fullest["temp"]
    figures, collectives = _figures(made, held, temp, fullest)
    over = max(0, int(figures["peak"].value) - usable)
    settled = {name: getattr(made, name) for name in ("rules", "kv", "weights", "batch", "context", "phase", "devices")}
    return Plan(
        model="",
        gpu=made.gpu.name,
        mesh=made.mesh,
        **settled,
        memory=made.gpu.memory,
        usable=usable,
        over=over,
        sequences=modelled.sequences(made, held, temp),
        figures=figures,
        collectives=tuple(collectives),
        overlaps=tuple(fullest["overlaps"]) if fullest else (),
        stages=tuple(_stage(part) for part in found["parts"]) if found and len(found["parts"]) > 1 else (),
        nearest=tuple(modelled.nearest(made)) if over else (),
        versions=versions if found else {},
        notes=tuple(_notes(made, python, found, bytes_held - usable)),
    )


def _figures(
    made: Any, held: list[Any], temp: int, compiled: Mapping[str, Any] | None
) -> tuple[dict[str, Figure], list[dict[str, Any]]]:
    """The figures of the fullest part, and its collectives; compiled: of that program, None without one."""
    from rzoo.compile import modelled

    if compiled:
        basis, part = COMPILED, dict(compiled)
    else:
        fullest = max(held, key=lambda part: part.weights + part.cache)
        basis, part = MODELLED, {"weights": fullest.weights, "cache": fullest.cache, "temp": temp}
        part |= {"peak": sum(part.values()), "collectives": modelled.exchanged(made, fullest.weights)}
    figures = {name: (part[name], BYTES) for name in ("weights", "cache", "temp", "peak")}
    collectives = part["collectives"]
    figures["exchanged"] = (sum(one["bytes"] for one in collectives), "bytes per GPU and step")
    if compiled:
        figures |= {"launches": (part["launches"], "per step"), "read": (part["read"], "bytes per GPU and step")}
        figures["written"] = (part["written"], "bytes per GPU and step")
    out = {name: Figure(value, unit, basis) for name, (value, unit) in figures.items()}
    must = max(one.read + one.cache / len(held) for one in held)  # in a pipeline of one group of rows
    out["must_read"] = Figure(must, "bytes per GPU and step", MODELLED)
    times = modelled.seconds(made, must, collectives)
    out |= {f"{name}_seconds": Figure(value, "seconds per step", MODELLED) for name, value in times.items()}
    out["prompt_seconds"] = Figure(modelled.seconds_a_prompt_token(made), "seconds per token of a prompt", MODELLED)
    out["tokens_per_second"] = Figure(made.batch * made.tokens / times["total"], "all rows", MODELLED)
    return out, [{**one, "basis": basis} for one in collectives]


def _stage(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part[name] for name in ("name", "weights", "cache", "temp", "launches", "read")}


def _notes(made: Any, python: Path | None, found: Mapping[str, Any] | None, too_much: int) -> list[str]:
    notes = []
    if found is None and made.gpu.chip is None:
        notes.append(f"{made.gpu.name} is known for arithmetic alone: nothing is compiled for it")
    elif found is None and too_much > 0:
        notes.append("not compiled: weights and cache alone do not fit")
    elif found is None and python is None:
        notes.append(HOW_TO_COMPILE)
    if found and any(part["unknown_loops"] > 1 for part in found["parts"]):
        notes.append("loops whose length depends on data count once in launches, bytes and collectives")
    return notes
