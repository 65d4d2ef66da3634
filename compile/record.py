"""Tuning records: what was chosen for one model on one machine, readable JSON, and how a handle takes it on.

A record is applied only where its whole key is that of the handle: model, policy, types that weights are held in, mesh,
device, jaxlib, and the digest of the code of our forms. It lies in the user's cache folder and holds no code.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

import jax
import jaxlib

from rzoo.compile import kernels, storage, sums
from rzoo.compile.aot import Options, cpu_fact, decode_options
from rzoo.compile.folders import files_digest, private_folder, write_whole
from rzoo.compile.storage import lay_out, plain
from rzoo.core import RzooError, new_figure, save_figure
from rzoo.models import attention, latent, moe, weights
from rzoo.models.stacking import stack, unstack

CODE = (kernels, storage, sums, attention, latent, moe, weights)


@dataclass(frozen=True)
class Choice:
    """What is chosen, by names alone. The empty one is the program of no record.

    joined: first weights of joined groups. layouts: weight -> layout. forms: field of Forms -> form. options: case such
    as "decode 8" -> compiler options. Weights are named as in storage.lay_out.
    """

    joined: tuple[str, ...] = ()
    layouts: tuple[tuple[str, str], ...] = ()
    forms: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, Options], ...] = ()

    def with_entry(self, part: str, *entries: tuple[str, Any]) -> "Choice":
        """With entries of layouts, forms or options added or replaced."""
        changed: Any = {part: tuple(sorted({**dict(getattr(self, part)), **dict(entries)}.items()))}
        return replace(self, **changed)

    def to_json(self) -> dict[str, Any]:
        """JSON's types; inverse of from_json."""
        options = {case: dict(options) for case, options in self.options}
        return {
            "joined": list(self.joined),
            "layouts": dict(self.layouts),
            "forms": dict(self.forms),
            "options": options,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Choice":
        """Raises KeyError, TypeError or AttributeError for what is no choice."""
        pairs = lambda found: tuple(sorted(found.items()))  # noqa: E731
        options = {case: pairs(found) for case, found in value["options"].items()}
        return cls(tuple(value["joined"]), pairs(value["layouts"]), pairs(value["forms"]), pairs(options))


@dataclass(frozen=True, eq=False)
class Record:
    """A choice, what it holds for, and all that was tried on the way: one entry a candidate."""

    key: dict[str, Any]
    choice: Choice = Choice()
    candidates: tuple[dict[str, Any], ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)

    def options(self, phase: str, rows: int) -> Options:
        """Compiler options of a phase ("prefill", "decode") for `rows` rows: those of the smallest tuned batch that
        holds them, or of the largest; for a phase that was not tuned, those of no record.
        """
        default = decode_options() if phase == "decode" else ()
        tuned = {int(case.split()[1]): found for case, found in self.choice.options if case.startswith(phase + " ")}
        if not tuned:
            return default
        batch = min((b for b in tuned if b >= rows), default=max(tuned))
        return tuple(sorted({**dict(default), **dict(tuned[batch])}.items()))


def apply(record: Record, lm: Any) -> Any:
    """`lm` with the record's storage and forms; what it does not name stays. Pure: `lm` is as before.

    Raises RzooError for a record that names a form or layout which is not there.
    """
    choice = record.choice
    forms = replace(lm.forms, **form_fields(choice))
    unknown = {layout for _, layout in choice.layouts} - set(storage.LAYOUTS)
    if unknown:
        known = ", ".join(storage.LAYOUTS)
        raise RzooError(f"layout ({min(unknown)}) is unknown; known: {known}", field="layouts", value=min(unknown))
    params = lm.params
    if choice.joined or choice.layouts:
        params = lay_out(lm.config, plain(unstack(lm.config, params)), choice.joined, dict(choice.layouts))
    if forms.stacked:
        params = stack(lm.config, params)
    return replace(lm, params=params, forms=forms, record=record)


def form_fields(choice: Choice) -> dict[str, Any]:
    """Field of Forms -> the form that a choice names. Raises RzooError with close names for an unknown one."""
    return {name: kernels.form_named(name, form) for name, form in choice.forms}


def key_of(lm: Any) -> dict[str, Any]:
    """What a record of this handle is valid for, of JSON's types."""
    held = Counter(weights.held_as(value) for value in plain(unstack(lm.config, lm.params)).values())
    return {
        "model": _digest(repr(lm.config).encode()),
        "policy": lm.policy,
        "bound": {name: limit for name, limit in vars(lm.bound).items() if limit is not None},
        "leaves": dict(sorted(held.items())),
        "mesh": None if lm.mesh is None else str(lm.mesh),
        "device": device_name(),
        "jaxlib": jaxlib.__version__,
        "code": code_digest(),
    }


def device_name() -> str:
    """What programs run on: a GPU's kind, or the CPU's model, count of cores and vector width."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    vectors = [width for width in ("avx512f", "avx2", "neon", "asimd") if width in cpu_fact("flags").split()]
    family = f"family {cpu_fact('cpu family')} model {cpu_fact('model	')}"
    return f"cpu {cpu_fact('model name')} {family} {' '.join(vectors[:1])} {os.cpu_count()} cores".replace("  ", " ")


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Of the source of all that a record can name: a changed form is another form."""
    return files_digest(Path(str(module.__file__)) for module in CODE)[:16]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def path_of(key: Mapping[str, Any], *, make: bool = False) -> Path | None:
    """Where the record of a key lies; None where there is no folder of the user's own."""
    folder = private_folder("records", make=make)
    name = f"{key['model']}-{_digest(json.dumps(key, sort_keys=True).encode())}.json"
    return None if folder is None else folder / name


def write(record: Record) -> Path | None:
    """Writes the record beside its final name and renames it; returns the path, None without a folder."""
    path = path_of(record.key, make=True)
    if path is not None:
        write_whole(path, json.dumps(to_json(record), indent=1).encode())
    return path


def to_json(record: Record) -> dict[str, Any]:
    """JSON's types; what `read` reads."""
    found = {"key": record.key, "choice": record.choice.to_json(), "summary": record.summary}
    return _finite({**found, "candidates": list(record.candidates)})


def _finite(value: Any) -> Any:
    """JSON has no infinity: it becomes a text."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def draw(record: Record, path: str | Path) -> None:
    """Draws each candidate's ratio to its incumbent with its bounds, one panel a case. Raises RzooError without
    matplotlib.
    """
    timed = [entry for entry in record.candidates if entry.get("times")]
    cases = sorted({case for entry in timed for case in entry["times"]})
    picture = new_figure(figsize=(4 * max(1, len(cases)), 1 + 0.2 * len(timed)), layout="constrained")
    for axes, case in zip(picture.subplots(1, max(1, len(cases)), squeeze=False)[0], cases, strict=False):
        shown = [(entry["name"], entry["times"][case]) for entry in timed if case in entry["times"]]
        for name, found in shown:
            axes.plot([found["low"], found["high"]], [name, name], color="grey")
            axes.plot(found["ratio"], name, "o", color={"win": "green"}.get(found["word"], "black"))
        axes.axvline(1.0, linewidth=0.5)
        axes.set(title=case, xlabel="incumbent / candidate")
    save_figure(picture, path)


def read(path: Path) -> Record:
    """The record in a file. Raises RzooError where it is none."""
    try:
        found = json.loads(path.read_text())
        return Record(found["key"], Choice.from_json(found["choice"]), tuple(found["candidates"]), found["summary"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fix = "delete it and tune again"
        raise RzooError(f"{path} is no tuning record: {error!r}", field="record", value=str(path), fix=fix) from None


def recorded(lm: Any) -> tuple[Any, str | None]:
    """The handle with the record that was made for exactly it, and a line on what was applied, or on why what there is
    was not.
    """
    key = key_of(lm)
    path = path_of(key)
    if path is None:
        return lm, None
    try:
        if path.exists():
            record = read(path)
            if record.key == key:
                return apply(record, lm), f"tuned by {path}: {record.summary.get('words', '')}"
        others = sorted(path.parent.glob(f"{key['model']}-*.json"))
        differs = {name for other in others for name in _differences(read(other).key, key)}
    except RzooError as error:
        return lm, f"a tuning record is ignored: {error.message}"
    if not others:
        return lm, None
    return lm, f"{len(others)} tuning record(s) of this model ignored: other {', '.join(sorted(differs))}"


def _differences(found: Mapping[str, Any], key: Mapping[str, Any]) -> set[str]:
    return {name for name in key if found.get(name) != key[name]}
