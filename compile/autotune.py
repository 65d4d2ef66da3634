"""`rzoo.tune`: searches for the fastest programs of a model on this machine within its policy, and proves each win.

One change at a time, first what is known to matter most: weights in columns, forms, joined weights, other layouts,
stacking, compiler options. A candidate is accepted where it wins in one case beyond the measured noise (measure.py) and
loses in none, and only if it passes both gates (gates.py). Whatever happens to a candidate is in the record.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from rzoo.compile import gates, kernels, storage
from rzoo.compile.aot import Options
from rzoo.compile.measure import MARGIN, Comparison, compare
from rzoo.compile.record import Choice, Record, apply, key_of, path_of, read, write
from rzoo.compile.storage import can_be_laid, group_of, of_every_layer, plain
from rzoo.compile.trial import failure
from rzoo.compile.workload import Case, Work
from rzoo.core import RzooError
from rzoo.models.registry import abstract_weights
from rzoo.models.stacking import long_runs, unstack
from rzoo.sharding.pipeline import Pipeline

TRIAL_SECONDS = 120.0
COLUMNS = "transposed"
# XLA:CPU's options that keep the bits' meaning: how operations are fused, and what code is made of them.
CPU_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("xla_cpu_experimental_ynn_fusion_type", ""),
    ("xla_cpu_prefer_vector_width", 256),
    ("xla_cpu_prefer_vector_width", 512),
    ("xla_cpu_use_fusion_emitters", False),
    ("xla_cpu_use_xnnpack", False),
)
GPU_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("xla_gpu_enable_triton_gemm", False),
    ("xla_gpu_enable_command_buffer", ""),
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A change of the incumbent's choice; cases: the phases, or the names of cases, that it can change."""

    name: str
    change: Callable[[Choice], Choice]
    cases: tuple[str, ...] = ("decode", "prefill")
    options: Options = ()


def tune(
    lm: Any,
    budget: float | int = 120,
    *,
    batches: Sequence[int] = (1, 8),
    resume: bool = False,
    progress: Say = lambda line: None,
) -> Any:
    """The handle on the fastest programs found within about `budget` seconds; its record is kept for later loads.

    batches: how many rows decode is tuned for. resume: go on from the record of an earlier, perhaps killed, run. The
    policy of the handle bounds what may be lost, and exact loses nothing. Weights that are laid out anew are held
    beside the old ones while both are in use. Raises RzooError for a budget or batch that is no positive number.
    """
    _check(budget, batches)
    if isinstance(lm.forms.place, Pipeline):
        fix = "tune it on a mesh without pipe"
        raise RzooError("a pipeline of several programs is not tuned", field="mesh", value="pipe", fix=fix)
    base = replace(lm, params=plain(unstack(lm.config, lm.params)), forms=replace(lm.forms, stacked=False), record=None)
    cases = [*(Case("decode", b, 4) for b in sorted(set(batches))), Case("prefill", 1, 128)]
    search = Search(base, cases, time.monotonic() + budget, progress)
    if resume:
        search.take_up()
    for candidate in candidates(base, cases):
        if time.monotonic() > search.deadline:
            progress(f"budget of {budget:g} s used; candidates from {candidate.name} on were not tried")
            break
        search.consider(candidate)
    return search.finished()


def _check(budget: float | int, batches: Sequence[int]) -> None:
    if not budget > 0:
        raise RzooError(f"budget ({budget}) must be a positive number of seconds", field="budget", value=budget)
    if not batches or min(batches) < 1:
        raise RzooError(f"batches ({list(batches)}) must be at least 1 each", field="batches", value=list(batches))


def candidates(lm: Any, cases: Sequence[Case]) -> Iterator[Candidate]:
    """All single changes worth trying, in order; on a mesh, whose forms are made for it, compiler options alone."""
    if lm.mesh is None:
        yield from _of_one_device(lm)
    offered = CPU_OPTIONS if jax.default_backend() == "cpu" else GPU_OPTIONS
    yield from (_of_option(case.name, option) for case in cases for option in offered)


def _of_one_device(lm: Any) -> Iterator[Candidate]:
    """Weights in columns (up to 1.4x at 8 rows on Zen 5), forms, other layouts, then stacking."""
    yield from _of_layout(lm, COLUMNS)
    found = kernels.candidate_forms(lm.config, lm.forms.numerics, jax.default_backend())
    stacking = found.pop("stacked")
    for name, forms in found.items():
        phases = tuple(phase for phase in ("decode", "prefill") if name.endswith(phase)) or ("decode", "prefill")
        yield from (_of_form(name, form, phases) for form in forms if forms[form] is not getattr(lm.forms, name))
    yield from _of_joined(lm)
    for layout in (name for name in storage.LAYOUTS if name not in ("rows", COLUMNS)):
        yield from _of_layout(lm, layout)
    if long_runs(lm.config):
        yield from (_of_form("stacked", form, ("decode", "prefill")) for form, on in stacking.items() if on)


def _of_form(name: str, form: str, cases: tuple[str, ...]) -> Candidate:
    return Candidate(f"{name}: {form}", lambda c: c.with_entry("forms", (name, form)), cases)


def _of_option(case: str, option: tuple[str, Any]) -> Candidate:
    def change(choice: Choice) -> Choice:
        options = tuple(sorted({**dict(dict(choice.options).get(case, ())), option[0]: option[1]}.items()))
        return choice.with_entry("options", (case, options))

    return Candidate(f"{case}: {option[0]}={option[1]!r}", change, (case,), (option,))


def _dense(lm: Any) -> list[str]:
    return [path for path in abstract_weights(lm.config) if isinstance(lm.params[path], jax.Array)]


def _of_joined(lm: Any) -> Iterator[Candidate]:
    """Groups of weights with the same input as one matrix."""
    for name in dict.fromkeys(of_every_layer(path) for path in _dense(lm) if group_of(path, lm.params)):
        yield Candidate(f"joined: {name}", partial(_with_joined, name=name))


def _of_layout(lm: Any, layout: str) -> Iterator[Candidate]:
    """One layout for each kind of module."""
    laid = dict.fromkeys(of_every_layer(path) for path in _dense(lm) if can_be_laid(lm.config, path, layout))
    modules: dict[str, list[str]] = {}
    for name in laid:
        modules.setdefault(name.rpartition(".")[0].rpartition(".")[2] or name, []).append(name)
    for module, names in modules.items():
        entries = tuple((name, layout) for name in names)
        yield Candidate(f"{layout}: {module}", partial(_with_layouts, entries=entries))


def _with_joined(choice: Choice, name: str) -> Choice:
    return replace(choice, joined=tuple(sorted({*choice.joined, name})))


def _with_layouts(choice: Choice, entries: tuple[tuple[str, str], ...]) -> Choice:
    return choice.with_entry("layouts", *entries)


@dataclass
class Search:
    """The incumbent and what became of the candidates so far."""

    base: Any
    cases: Sequence[Case]
    deadline: float
    progress: Say
    record: Record = field(init=False)

    def __post_init__(self) -> None:
        self.record = Record(key_of(self.base))
        self.ids = gates.sample_ids(self.base)
        self.seen = gates.activations(self.base, self.ids[:1, :8])
        self.expected = gates.float32_logits(self.base, self.ids)
        self.lm, self.work = apply(self.record, self.base), {}
        self.first = self.work_of(self.lm, self.cases)
        self.work = dict(self.first)

    def take_up(self) -> None:
        """Go on from the record that an earlier run left, where there is one."""
        path = path_of(self.record.key)
        if path is not None and path.exists():
            found = read(path)
            if found.key == self.record.key:
                self.record, self.lm = found, apply(found, self.base)
                self.work = self.work_of(self.lm, self.cases)
                self.progress(f"going on after {len(found.candidates)} candidates of {path}")

    def work_of(self, lm: Any, cases: Sequence[Case]) -> dict[str, Work]:
        """The cases' programs for a handle, compiled and run once. Raises FloatingPointError for logits like NaN."""
        found = {}
        for case in cases:
            work = Work(lm.blueprint, lm.params, case, lm.record.options(case.phase, case.rows))
            if not np.isfinite(np.asarray(work())).all():
                raise FloatingPointError(f"{case.name} gives logits that are not finite")
            found[case.name] = work
        return found

    def consider(self, candidate: Candidate) -> None:
        """Try one, note what became of it, and make it the incumbent if it wins."""
        choice = candidate.change(self.record.choice)
        entry: dict[str, Any] = {"name": candidate.name, "beside": self.record.choice.to_json()}
        tried = {known["name"] for known in self.record.candidates}
        if choice == self.record.choice or candidate.name in tried:
            return
        try:
            entry |= self.tried(candidate, choice)
        except Exception as error:  # whatever a form, the compiler or the memory says, the search goes on
            entry |= {"result": "failed", "why": f"{type(error).__name__}: {error}"[:400]}
        self.record = replace(self.record, candidates=(*self.record.candidates, entry))
        write(replace(self.record, summary=self.summary()))
        self.progress(f"{candidate.name}: {entry['result']} {_words(entry)}")

    def tried(self, candidate: Candidate, choice: Choice) -> dict[str, Any]:
        """What is to be noted of a candidate: result, and why, error, times."""
        cases = [c for c in self.cases if c.name in candidate.cases or c.phase in candidate.cases]
        if candidate.options:
            options = replace(self.record, choice=choice).options(cases[0].phase, cases[0].rows)
            why = failure(self.base, choice, cases[0], options, TRIAL_SECONDS)
            if why:
                return {"result": "failed", "why": why}
        lm = apply(replace(self.record, choice=choice), self.base)
        gate = self.gate_of_forms(candidate, choice, lm)
        if gate.get("why"):
            return {"result": "refused by gate (a)", **gate}
        work = self.work_of(lm, cases)
        times = {name: compare(mine, self.work[name]) for name, mine in work.items()}
        result = decided(list(times.values()))
        noted = {**gate, "times": {name: vars(found) for name, found in times.items()}}
        if result == "win":
            found = self.gate_of_programs(lm, cases)
            noted["program"] = found
            if why := gates.beyond(self.base.bound, found):
                return {"result": "refused by gate (b)", "why": why, **noted}
            self.lm, self.work = lm, {**self.rebuilt(lm, cases), **work}
            self.record = replace(self.record, choice=choice)
        return {"result": result, **noted}

    def rebuilt(self, lm: Any, done: Sequence[Case]) -> dict[str, Work]:
        """The other cases' programs over the new incumbent's weights."""
        return self.work_of(lm, [case for case in self.cases if case not in done])

    def gate_of_forms(self, candidate: Candidate, choice: Choice, lm: Any) -> dict[str, Any]:
        """Gate (a): the error of what changed, and why it is refused if it is."""
        allowed = gates.allowed_error(self.base.forms.numerics)
        found, where = gates.weights_error(self.base, lm.params, self.seen)
        for name, form in set(choice.forms) - set(self.record.choice.forms):
            own = gates.form_error(name, kernels.form_named(name, form), self.seen)
            found, where = max((found, where), (own, name))
        noted: dict[str, Any] = {"error": found}
        return noted if found <= allowed else {**noted, "why": f"{where} differs by {found:.2g}, more than {allowed:g}"}

    def gate_of_programs(self, lm: Any, cases: Sequence[Case]) -> dict[str, float]:
        """Gate (b): the largest distances from float32 over the options of the cases."""
        ways = {lm.record.options(case.phase, case.rows) for case in cases}
        found = [gates.distances(gates.logits_of(lm, self.ids, way), self.expected) for way in ways]
        return {name: max(f[name] for f in found) for name in found[0]}

    def summary(self) -> dict[str, Any]:
        """The gain that each accepted step showed, as a product over them, by case."""
        gains = dict.fromkeys((case.name for case in self.cases), 1.0)
        for entry in self.record.candidates:
            for name, found in entry.get("times", {}).items() if entry["result"] == "win" else ():
                gains[name] *= found["ratio"] if found["word"] != "even" else 1.0
        return {"gains": gains, "words": ", ".join(f"{name} {gain:.2f}x" for name, gain in gains.items())}

    def finished(self) -> Any:
        """The tuned handle; untuned and tuned are measured against each other once more."""
        checked = {
            name: vars(compare(self.work[name], first))
            for name, first in self.first.items()
            if self.record.choice != Choice()
        }
        words = ", ".join(f"{name} {found['ratio']:.2f}x ({found['word']})" for name, found in checked.items())
        self.record = replace(self.record, summary={"checked": checked, "words": words or "no win"})
        path = write(self.record)
        self.progress(f"{words or 'no win'}; record: {path or 'not kept, there is no folder of the user alone'}")
        return replace(self.lm, record=self.record)


def decided(times: Sequence[Comparison]) -> str:
    """ "win": beyond the noise in one case at least, and no worse than MARGIN beyond even in the others."""
    words = {found.word for found in times}
    if "win" in words and all(found.ratio > 1 - MARGIN for found in times):
        return "win"
    return "loss" if words & {"win", "loss"} else "no win"


def _words(entry: dict[str, Any]) -> str:
    times = entry.get("times", {})
    said = [f"{name} {found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]" for name, found in times.items()]
    return ", ".join([*said, *([entry["why"]] if "why" in entry else [])])
