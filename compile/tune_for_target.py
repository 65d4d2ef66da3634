"""`rzoo tune MODEL --gpu h100`: forms chosen by what the programs compiled for it read, write and launch.

One change at a time, in the order in which changes are known to matter: unrolled layers, attention, experts, products
in sums. A change is kept where it lowers the modelled time of a decode step by MARGIN or more. Nothing runs and nothing
is measured: every figure is modelled from a compiled program. A record of it is kept for `rzoo plan --tuned`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rzoo.compile import deviceless
from rzoo.compile.folders import write_whole
from rzoo.compile.plan import fields_of, record_path
from rzoo.compile.plan_words import size, time
from rzoo.compile.targets import Target
from rzoo.core import RzooError

LAUNCH_SECONDS = 1.5e-6  # what a kernel costs beside its bytes where a command buffer launches it; modelled
MARGIN = 0.01
# Field of Forms -> forms that are tried. Those in blocks of keys and in tiles loop as often as the data asks: what
# their programs cost can't be read from them. For cuDNN's, JAX asks the library itself before it compiles.
TRIED: Mapping[str, tuple[str, ...]] = {
    "attend_decode": ("in sums",),
    "experts_cached": ("one by one up to 8", "ragged", "in sums"),
}
FIGURES = ("read", "written", "launches", "temp", "peak")
Changes = Mapping[str, Any]  # fields of target_programs.Job


def step_seconds(gpu: Target, part: Mapping[str, Any]) -> float:
    """Modelled seconds of one run of a program that target_programs.read tells of: its bytes and its launches."""
    return (part["read"] + part["written"]) / gpu.bandwidth + part["launches"] * LAUNCH_SECONDS


def tune_for_target(
    model: Any,
    gpu: str = "h100",
    *,
    weights: str = "bf16",
    batch: int = 1,
    context: int = 4096,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The record of a search for one GPU that need not be there, in JSON's types: key, choice (fields of
    target_programs.Job), candidates with their figures, summary. progress gets a line for each candidate.

    The arguments are plan's. Raises RzooError where the extra gpu-aot is missing, for a model that one such GPU does
    not hold, and for whatever a plan is refused for.
    """
    from rzoo.compile import modelled

    asked = {"model": fields_of(model), "gpu": gpu, "weights": weights, "batch": batch, "context": context}
    job: dict[str, Any] = asked | {"kv": "split", "phase": "decode"}
    made = modelled.setting(job | {"devices": None, "rules": None, "mesh": None})
    made.gpu.description  # noqa: B018  (refuses a device that nothing is compiled for)
    (held,), usable = modelled.parts(made), int(modelled.USABLE * made.gpu.memory)
    if held.weights + held.cache > usable:
        words = f"{size(held.weights)} of weights and {size(held.cache)} of cache do not fit one {made.gpu.name}"
        raise RzooError(words, field="gpu", value=gpu, fix="smaller weights, such as int8, or a larger GPU")
    search = Search(made, job | {"mesh": {}, "rules": "single"}, usable, progress)
    for name, changes in candidates(made.config, search):
        search.consider(name, changes)
    return _kept(asked, search)


class Search:
    """The incumbent, what it costs, and what became of the candidates so far."""

    def __init__(self, made: Any, job: Changes, usable: int, progress: Callable[[str], None]):
        self.made, self.job, self.usable, self.progress = made, job, usable, progress
        self.choice: dict[str, Any] = {"stacked": True, "forms": {}, "products": "dots"}
        self.entries: list[dict[str, Any]] = []
        self.seconds = self.first = self.considered("as planned", self.choice)["seconds"]

    def consider(self, name: str, changes: Changes) -> None:
        """Compiles one candidate and keeps it where it is better."""
        entry = self.considered(name, {**self.choice, **changes})
        if entry["result"] == "kept":
            self.choice, self.seconds = {**self.choice, **changes}, entry["seconds"]

    def considered(self, name: str, choice: Changes) -> dict[str, Any]:
        """A candidate's entry, noted and told. Raises RzooError where the first can't be compiled."""
        entry: dict[str, Any] = {"name": name, "basis": "modelled"}
        try:
            (part,) = deviceless.compile_for({**self.job, **choice})["parts"]
        except RzooError as error:  # a form that the compiler refuses
            if not self.entries:
                raise
            entry |= {"result": "failed", "why": reason(error.message)}
        else:
            entry |= {figure: part[figure] for figure in FIGURES} | {"seconds": step_seconds(self.made.gpu, part)}
            entry["result"] = self.decided(entry, part)
        self.entries.append(entry)
        self.progress(words(entry))
        return entry

    def decided(self, entry: Changes, part: Changes) -> str:
        """What becomes of a candidate."""
        open_end = part["unknown_loops"] > 1  # beside the loop over steps
        if not self.entries:
            return "first, and more: its loops are as long as the data asks" if open_end else "first"
        if open_end:
            return "not comparable: its loops are as long as the data asks"
        if entry["peak"] > self.usable:
            return "does not fit"
        return "kept" if entry["seconds"] <= (1 - MARGIN) * self.seconds else "no gain"


def candidates(config: Any, search: Search) -> Iterator[tuple[str, Changes]]:
    """Single changes of what is chosen by then, in order."""
    from rzoo.compile.kernels import candidate_forms
    from rzoo.compile.target_programs import target_forms
    from rzoo.models.stacking import long_runs

    if long_runs(config):
        yield "unrolled", {"stacked": False}
    used = candidate_forms(config, target_forms().numerics, "gpu")
    for field in (name for name in TRIED if name in used):
        for form in TRIED[field]:
            # In a loop over layers, the choice of an expert would copy all of its layer's out of the stack.
            apart = {"stacked": False} if form == "in sums" else {}
            yield f"{field}: {form}", {"forms": {**search.choice["forms"], field: form}, **apart}
    yield "products in sums", {"products": "sums", "stacked": False}


def reason(message: str) -> str:
    """The line of a traceback that says what went wrong."""
    lines = message.strip().splitlines()
    return next((line for line in reversed(lines) if "Error" in line), lines[-1])[:400]


def words(entry: Changes) -> str:
    """A candidate in a line."""
    if "seconds" not in entry:
        return f"{entry['name']}: {entry['result']}: {entry['why']}"
    bytes_moved = f"{size(entry['read'])} read, {size(entry['written'])} written"
    figures = f"{bytes_moved}, {entry['launches']} launches, {size(entry['temp'])} temp"
    return f"{entry['name']}: {entry['result']}: {time(entry['seconds'])} a step (modelled: {figures})"


def _kept(asked: Changes, search: Search) -> dict[str, Any]:
    """The record, written where `rzoo plan --tuned` finds it."""
    python = deviceless.aot_python()
    versions = deviceless.checked_versions(python) if python else {}
    gain = search.first / search.seconds
    said = f"{time(search.first)} to {time(search.seconds)} a step, {gain:.2f}x (modelled)"
    summary = {"first_seconds": search.first, "seconds": search.seconds, "basis": "modelled", "words": said}
    record = {
        "key": {**asked, "versions": versions},
        "choice": search.choice,
        "candidates": search.entries,
        "summary": summary,
    }
    path = record_path(asked, versions)
    if path is not None:
        write_whole(path, json.dumps(record, indent=1).encode())
    search.progress(f"{said}; record: {path or 'not kept, there is no folder of the user alone'}")
    return record
