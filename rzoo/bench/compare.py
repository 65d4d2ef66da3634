"""`bench`: engines take turns on the same work in one run, and their speeds become ratios.

A machine that others use changes speed from minute to minute, so no speed here stands alone: in each round every engine
has its turn, a ratio is taken within the round, and what is reported is the median over rounds with its spread.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rzoo.bench.cases import CASES, STREAM
from rzoo.bench.peers import version, weights_of
from rzoo.bench.turns import Child, ChildFailed

ENGINES = {
    "rzoo": "rzoo.bench.peers:Rzoo",
    "transformers": "rzoo.bench.peers:Transformers",
    "llama.cpp": "rzoo.bench.peers:LlamaCpp",
}
# Engine -> how long its OpenMP threads look for work before they sleep (turns.environment). llama.cpp meets at hundreds
# of barriers per token: asleep at each it ran at 53 tok/s where this short wait gave 194.
SPIN = {"llama.cpp": 20_000}
BANDWIDTH, READ = "bandwidth", "read"
TURNS = ("decode_b1", STREAM, READ, "decode_b8", "decode_b32", "prefill512")

# Ratio -> (case, peer): how many times the peer's tokens per second rzoo reaches.
RATIOS = {
    "decode_b1_vs_transformers_f32": ("decode_b1", "transformers"),
    "decode_b1_vs_llama_cpp": ("decode_b1", "llama.cpp"),
    "decode_b8_vs_transformers_f32": ("decode_b8", "transformers"),
    "decode_b32_vs_transformers_f32": ("decode_b32", "transformers"),
    "prefill512_vs_transformers_f32": ("prefill512", "transformers"),
}
# Ratio -> (case, other case), of rzoo alone.
OWN_RATIOS = {
    "stream_b1_vs_decode_b1": (STREAM, "decode_b1"),
    "decode_b8_vs_decode_b1": ("decode_b8", "decode_b1"),
    "decode_b32_vs_decode_b1": ("decode_b32", "decode_b1"),
}
SHARE = "decode_b1_share_of_bandwidth"

READ_MEGABYTES = 512  # more than any cache holds, about what a 135M model reads per token
START_SECONDS = 600.0  # load, compile, try the variants
ANSWER_SECONDS = 120.0

Results = Mapping[str, Mapping[str, list[dict[str, Any]]]]


def bench(
    source: str = "smollm2",
    *,
    engines: Sequence[str] = tuple(ENGINES),
    dtype: str = "float32",
    policy: str = "exact",
    threads: int = 2,
    rounds: int = 5,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compare `engines` on the model `source`, each in a process of its own with `threads` cores, over `rounds` rounds;
    rzoo loads it with `dtype` and `policy`.

    Returns, in JSON's types: `ratios` (None where a side is missing), `medians` by engine and case (tokens/s; the
    bandwidth's in bytes/s), `spread` of both ((max - min) / median), `peers` (name -> version or None), `variants`
    (what each peer was fastest with), `failures` (engine -> why it gave nothing), `tokens_equal` (case -> whether rzoo
    and transformers chose the same tokens), `load`. `progress` gets a line after each step.
    Raises RzooError for an engine it does not know or a count below 1.
    """
    _check(engines, threads, rounds)
    weights_of(source)
    before = _loadavg()
    with Crew() as crew:
        for name in engines:
            crew.hire(name, *_job(name, source, dtype, policy), threads, progress)
        crew.hire(BANDWIDTH, "rzoo.bench.bandwidth:Bandwidth", {"megabytes": READ_MEGABYTES}, threads, progress)
        for number in range(rounds):
            crew.play(number, rounds, progress)
    return summary(crew.abouts, crew.results) | {
        "source": source,
        "dtype": dtype,
        "policy": policy,
        "rounds": rounds,
        "threads": threads,
        "peers": {name: version(name) for name in ENGINES if name != "rzoo"},
        "failures": crew.failures,
        "load": {"loadavg_before": before, "loadavg_after": _loadavg(), "cores": os.cpu_count()},
    }


def _check(engines: Sequence[str], threads: int, rounds: int) -> None:
    from rzoo.core import RzooError, closest

    for name in engines:
        if name not in ENGINES:
            fix = closest(name, [*ENGINES])
            raise RzooError(f"engines: no engine is called {name!r}", field="engines", value=name, fix=fix)
    for field_name, count in (("threads", threads), ("rounds", rounds)):
        if count < 1:
            raise RzooError(f"{field_name} ({count}) must be at least 1", field=field_name, value=count)


def _job(name: str, source: str, dtype: str, policy: str) -> tuple[str, dict[str, Any] | str]:
    """The engine's target and settings, or in their place why it cannot run."""
    if name == "rzoo":
        return ENGINES[name], {"source": source, "dtype": dtype, "policy": policy}
    if version(name) is None:
        return ENGINES[name], "not installed"
    weights = weights_of(source)
    if name == "llama.cpp" and weights.suffix != ".gguf":
        return ENGINES[name], f"has no file that it can read for {source}"
    return ENGINES[name], {"weights": str(weights)}


@dataclass
class Crew:
    """The children of one run, and what they said; all are gone when the `with` block ends, however it ends."""

    abouts: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    _children: dict[str, Child] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def hire(self, name: str, target: str, job: dict[str, Any] | str, threads: int, progress: Callable) -> None:
        """Start the engine `target` and wait until it is warm; a `job` that is a text says why it cannot start."""
        if isinstance(job, str):
            return self._fail(name, job, progress)
        progress(f"{name}: loading")
        child = self._stack.enter_context(Child(target, threads=threads, spin=SPIN.get(name, 0), **job))
        try:
            self.abouts[name] = child.ready(START_SECONDS)
        except ChildFailed as failure:
            return self._fail(name, str(failure), progress)
        self._children[name], self.results[name] = child, defaultdict(list)

    def play(self, number: int, rounds: int, progress: Callable[[str], None]) -> None:
        """One round: every engine has one turn at each of its cases; every other round in the opposite order."""
        order = list(self._children)[:: -1 if number % 2 else 1]
        for name, case in ((name, case) for case in TURNS for name in order if case in self.abouts[name]["cases"]):
            if name in self.failures:
                continue
            try:
                answer = self._children[name].run(case, ANSWER_SECONDS)
            except ChildFailed as failure:
                self._fail(name, str(failure), progress)
                continue
            self.results[name][case].append(answer)
            progress(f"round {number + 1}/{rounds}: {name} {case} {_words(case, speed(case, answer))}")

    def _fail(self, name: str, why: str, progress: Callable[[str], None]) -> None:
        """Remember why; what a failed engine measured before counts for nothing."""
        self.failures[name] = why
        self.results.pop(name, None)
        progress(f"{name}: {why}")


def speed(case: str, answer: Mapping[str, Any]) -> float:
    """Tokens per second of a case, bytes per second of a read."""
    counted = answer["bytes"] if case == READ else CASES["decode_b1" if case == STREAM else case].tokens
    return float(counted / answer["seconds"])


def summary(abouts: Mapping[str, Mapping[str, Any]], results: Results) -> dict[str, Any]:
    """Ratios, medians, spreads and equality of tokens from what the engines said: results[engine][case] by round."""
    speeds = {
        name: {case: [speed(case, answer) for answer in answers] for case, answers in cases.items()}
        for name, cases in results.items()
    }
    ratios = {ratio: _by_round(speeds, "rzoo", case, peer, case) for ratio, (case, peer) in RATIOS.items()}
    ratios |= {ratio: _by_round(speeds, "rzoo", a, "rzoo", b) for ratio, (a, b) in OWN_RATIOS.items()}
    weight_bytes = abouts.get("rzoo", {}).get("weight_bytes", 0)
    ratios[SHARE] = [weight_bytes * share for share in _by_round(speeds, "rzoo", "decode_b1", BANDWIDTH, READ)]
    return {
        "ratios": _each(_median, ratios),
        "medians": {name: _each(_median, cases) for name, cases in speeds.items()},
        "spread": {name: _each(_spread, cases) for name, cases in {"ratios": ratios, **speeds}.items()},
        "variants": {name: about["variants"] for name, about in abouts.items() if "variants" in about},
        "tokens_equal": {case: _tokens_equal(results, case) for case in CASES if CASES[case].new},
    }


def _by_round(speeds: Mapping[str, Any], name: str, case: str, other: str, other_case: str) -> list[float]:
    """Speed of `name` over that of `other`, round by round; empty where either has none."""
    mine, theirs = (speeds.get(who, {}).get(what, []) for who, what in ((name, case), (other, other_case)))
    return [a / b for a, b in zip(mine, theirs, strict=False)]


def _each(of: Callable[[list[float]], float | None], lists: Mapping[str, list[float]]) -> dict[str, float | None]:
    return {name: of(values) for name, values in lists.items()}


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _spread(values: list[float]) -> float | None:
    return (max(values) - min(values)) / median(values) if values else None


def _tokens_equal(results: Results, case: str) -> bool | None:
    """Whether rzoo and transformers chose the same tokens in every round; None where one of them chose none."""
    runs = [[answer["tokens"] for answer in results.get(name, {}).get(case, [])] for name in ("rzoo", "transformers")]
    if not all(runs):
        return None
    first, *others = runs[0] + runs[1]
    return all(tokens == first for tokens in others)


def _loadavg() -> list[float] | None:
    """The system's load over 1, 5 and 15 minutes, where it keeps one."""
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None


def _words(case: str, value: float) -> str:
    return f"{value / 1e9:.1f} GB/s" if case == READ else f"{value:.1f} tok/s"


def table(result: Mapping[str, Any]) -> str:
    """What `bench` returned as lines for a person: speeds by engine, ratios, what is missing and why."""
    lines = []
    for name, cases in result["medians"].items():
        about = result["variants"].get(name, {})
        for case, value in cases.items():
            spread = f"± {result['spread'][name][case] / 2:.0%}"
            lines.append(f"{name:13} {case:11} {_words(case, value):>12} {spread:>6}  {about.get(case, '')}".rstrip())
    for ratio, value in result["ratios"].items():
        lines.append(f"{ratio:37} {'-' if value is None else f'{value:.2f}':>6}")
    lines += [f"{name}: {why}" for name, why in result["failures"].items()]
    lines += [
        f"{case}: tokens differ from transformers" for case, same in result["tokens_equal"].items() if same is False
    ]
    return "\n".join(lines)


def plot(result: Mapping[str, Any], path: str | Path) -> None:
    """Draw what `bench` returned to the file `path`: one group of bars per case, one bar per engine, in tokens/s.

    The line on each bar is the spread over rounds. Raises RzooError without matplotlib.
    """
    from rzoo.core import new_figure, save_figure

    picture = new_figure(figsize=(9, 3), layout="constrained")
    for axes, case in zip(picture.subplots(1, len(CASES)), CASES, strict=True):
        speeds = {name: cases[case] for name, cases in result["medians"].items() if case in cases}
        errors = [value * result["spread"][name][case] / 2 for name, value in speeds.items()]
        axes.bar(list(speeds), list(speeds.values()), yerr=errors, capsize=4)
        axes.set(title=case, ylabel="tokens/s")
    save_figure(picture, path)
