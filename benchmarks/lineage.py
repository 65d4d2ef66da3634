"""What thinking, gating and balance are worth: r1-tiny beside v3-tiny, over seeds, as one table, one picture, one JSON.

python benchmarks/lineage.py [--seeds 3] [--out lineage] [--steps N]

Trains what is not trained yet (each run is resumed after Ctrl-C), then measures. Intervals: the lowest and the highest
of the seeds, beside their median. FLOPs of attention are those that XLA counts in one layer for one query.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rzoo
from rzoo.core import new_figure, save_figure
from rzoo.data.chains import chain
from rzoo.evals.compare import SOLVED, solved_depth
from rzoo.evals.estimates import repetition_rate
from rzoo.models.dynamic import attend_gathered, index_scores
from rzoo.models.latent import attend_absorbed
from rzoo.models.registry import abstract_weights
from rzoo.models.weights import Numerics
from rzoo.train.lineage import CONFIG, RECIPES, Recipe, batch, learn, untrained
from rzoo.train.loop import Bar, curve, fit

DEEPER = 4  # chains longer by so many than any of the training are asked, too
ASKED = 50  # chains of each depth
TARGET = 2.3  # the brief's ratio
GUESSES = 4
EARLY = 200  # steps of a run without the bias update
KEYS = 256  # positions that attention is counted for
TEMPERATURES = (0.0, 0.1, 0.6)


def accuracy(lm: Any, depth: int, seed: int = 1_000_003) -> float:
    """Share of ASKED chains of a depth that a model answers rightly."""
    rng = np.random.default_rng((seed, depth))
    asked = [chain(rng, depth) for _ in range(ASKED)]
    answers = rzoo.generate(lm, [one.prompt for one in asked], max_new_tokens=6 * depth + 8)
    return float(np.mean([found.text == one.answer for found, one in zip(answers, asked, strict=True)]))


def repetition(lm: Any, temperature: float) -> float:
    """Share of eight-byte pieces of the answers to the longest chains that stood in the same answer before."""
    rng = np.random.default_rng(1_000_003)
    asked = [chain(rng, RECIPES["r1-tiny"].depths).prompt for _ in range(ASKED)]
    answers = rzoo.generate(lm, asked, max_new_tokens=80, temperature=temperature, seed=1)
    return float(np.mean([repetition_rate(answer.tokens, 8) for answer in answers]))


def drafts(lm: Any) -> dict[str, float]:
    """What the module for a second token gains on the longest chains, alone and one after another: tokens a pass with
    GUESSES guesses, share of single guesses that are taken, speed over decoding without guesses.
    """
    rng = np.random.default_rng(1_000_004)
    asked = [chain(rng, RECIPES["r1-tiny"].depths).prompt for _ in range(8)]

    def answers(**options: Any) -> tuple[list[Any], float]:
        rzoo.generate(lm, asked[0], max_new_tokens=80, **options)  # compiles
        start = time.perf_counter()
        found = [rzoo.generate(lm, prompt, max_new_tokens=80, **options) for prompt in asked]
        return found, time.perf_counter() - start

    (free, slow), (single, _) = answers(), answers(draft="mtp", draft_tokens=1)
    several, fast = answers(draft="mtp", draft_tokens=GUESSES)
    assert [a.tokens for a in free] == [a.tokens for a in single] == [a.tokens for a in several]
    mean = lambda found: float(np.mean([a.tokens_per_pass for a in found]))  # noqa: E731
    return {"accepted": mean(single) - 1, "tokens": mean(several), "speed": slow / fast}


def dense(lm: Any) -> Any:
    """The handle with attention to all positions."""
    return replace(lm, config=replace(lm.config, indexer=replace(lm.config.indexer, keep=lm.config.context)))


def attention_flops(lm: Any, keys: int) -> dict[str, float]:
    """FLOPs of one layer's attention to `keys` latents: of all, of those that the indexer keeps, and of choosing."""
    attention, numerics, index = lm.module().layers[1].attention, Numerics(), lm.config.indexer
    zeros = lambda *shape: jnp.zeros(shape, jnp.float32)  # noqa: E731
    q = zeros(1, 1, CONFIG.heads, CONFIG.nope_width + CONFIG.rope_width)
    latents, starts = zeros(1, 1, keys, CONFIG.kv_rank + CONFIG.rope_width), jnp.asarray([keys - 1])
    ups, chosen = (attention.key_up, attention.value_up), jnp.zeros((1, 1, index.keep), jnp.int32)
    of_index = zeros(1, 1, index.heads, index.width), zeros(1, 1, keys, index.width), zeros(1, 1, index.heads)
    programs = {
        "dense": lambda: attend_absorbed(q, latents, *ups, starts, 1.0, numerics),
        "gathered": lambda: attend_gathered(q, latents, *ups, chosen, starts, 1.0, numerics),
        "choosing": lambda: index_scores(*of_index, numerics),
    }
    return {name: float(jax.jit(run).lower().compile().cost_analysis()["flops"]) for name, run in programs.items()}


def load_of(lm: Any, recipe: Recipe) -> float:
    """Tokens of the busiest expert over the mean, in the worst layer, on a batch that no training saw."""
    unseen = batch(recipe, 1_000_003, 0)
    real = np.asarray(unseen.tokens)[np.asarray(unseen.weights).sum(axis=1).argsort()[-16:]]
    loads = [np.asarray(load) for load in lm(real, capture="load")[1]["load"]]
    return float(max(load.max() / load.mean() for load in loads))


def active_share() -> float:
    """Parameters that a token is multiplied with, over those of a dense model of the same total; exact, from shapes."""
    experts = CONFIG.experts
    assert experts is not None
    sizes = {path: (axes, int(np.prod(shape.shape))) for path, (axes, shape) in abstract_weights(CONFIG).items()}
    routed = sum(size for axes, size in sizes.values() if "e" in axes and len(axes) > 2)
    total = sum(size for _, size in sizes.values())
    return (total - routed * (1 - experts.active / experts.count)) / total


def measured(name: str, folder: Path, seed: int, steps: int | None) -> dict[str, Any]:
    """A member of the lineage, trained where it is not yet, and what it can do."""
    recipe = RECIPES[name]
    lm = learn(name, folder / f"{name}-{seed}", steps=steps, seed=seed, progress=True)
    accuracies = [accuracy(lm, depth) for depth in range(1, recipe.depths + DEEPER + 1)]
    print(f"{name} {seed}: {accuracies}", file=sys.stderr, flush=True)
    found: dict[str, Any] = {"accuracies": accuracies, "solved": solved_depth(accuracies), "load": load_of(lm, recipe)}
    if recipe.thinks:
        found["repetition"] = {str(t): repetition(lm, t) for t in TEMPERATURES}
        found["drafts"] = drafts(lm)
        found["dense"] = accuracy(dense(lm), recipe.depths)
        found["flops"] = attention_flops(lm, KEYS)
    return found


def early_load(folder: Path) -> float:
    """Load of the busiest expert over the mean, in the batches of the second hundred steps of a run."""
    return float(np.mean(curve(folder)["load"][EARLY // 2 : EARLY]))


def unbalanced(folder: Path, seed: int) -> float:
    """The same of an r1-tiny whose selection biases never move."""
    recipe, own = RECIPES["r1-tiny"], folder / f"unbalanced-{seed}"
    options = {"optimizer": recipe.optimizer(), "objective": replace(recipe.objective(), bias_rate=0.0), "folder": own}
    with Bar("unbalanced", EARLY, shown=True) as bar:
        fit(untrained("r1-tiny", seed), partial(batch, recipe, seed), EARLY, progress=bar.update, **options)
    return early_load(own)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range of the seeds."""
    return {"median": float(np.median(values)), "low": float(min(values)), "high": float(max(values))}


def summary(runs: Mapping[str, Sequence[Mapping[str, Any]]], loads: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """All figures of the table."""
    thinking, answers = ([run["solved"] for run in runs[name]] for name in ("r1-tiny", "v3-tiny"))
    ratios = [a / max(b, 1) for a, b in zip(thinking, answers, strict=True)]
    r1 = runs["r1-tiny"]
    gathered = [run["flops"]["gathered"] / run["flops"]["dense"] for run in r1]
    whole = [(run["flops"]["gathered"] + run["flops"]["choosing"]) / run["flops"]["dense"] for run in r1]
    longest = RECIPES["r1-tiny"].depths - 1
    return {
        f"FLOPs of attention to {KEYS} keys, gathered / dense": spread(gathered),
        "the same with those of choosing": spread(whole),
        "single guesses of the second-token module taken": spread([run["drafts"]["accepted"] for run in r1]),
        f"tokens a pass with {GUESSES} guesses": spread([run["drafts"]["tokens"] for run in r1]),
        "speed with them / without": spread([run["drafts"]["speed"] for run in r1]),
        "points lost by gathering": spread([100 * (run["dense"] - run["accuracies"][longest]) for run in r1]),
        **{f"repetition at temperature {t}": spread([run["repetition"][str(t)] for run in r1]) for t in TEMPERATURES},
        "solved depth, thinking": spread(thinking),
        "solved depth, answers alone": spread(answers),
        f"ratio (brief: {TARGET})": spread(ratios),
        "busiest expert / mean, at the end": spread([run["load"] for run in r1]),
        f"busiest expert / mean, steps {EARLY // 2} to {EARLY}, with the bias update": spread(loads["with"]),
        "the same without it": spread(loads["without"]),
        "active share of the parameters": spread([active_share()]),
    }


def draw(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Accuracy over depth, each seed a line. Raises RzooError without matplotlib."""
    picture = new_figure(figsize=(7, 4), layout="constrained")
    axes = picture.subplots()
    for name, color in (("r1-tiny", "tab:blue"), ("v3-tiny", "tab:orange")):
        for i, run in enumerate(runs[name]):
            depths = range(1, len(run["accuracies"]) + 1)
            axes.plot(depths, run["accuracies"], color=color, label=name if i == 0 else None)
    axes.axvline(RECIPES["r1-tiny"].depths, linestyle=":", color="gray", label="longest of the training")
    axes.axhline(SOLVED, linewidth=0.5, color="gray")
    axes.set_xlabel("operations in the chain")
    axes.set_ylabel("share answered rightly")
    axes.legend()
    save_figure(picture, path)


def main() -> None:
    """Trains, measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, default=Path("lineage"))
    asked = parser.parse_args()
    seeds = range(asked.seeds)
    by_seed = [{name: measured(name, asked.out, seed, asked.steps) for name in RECIPES} for seed in seeds]
    runs = {name: [found[name] for found in by_seed] for name in RECIPES}
    loads = {"with": [early_load(asked.out / f"r1-tiny-{seed}") for seed in seeds]}
    found = summary(runs, loads | {"without": [unbalanced(asked.out, seed) for seed in seeds]})
    (asked.out / "lineage.json").write_text(json.dumps({"figures": found, "runs": runs}, indent=2))
    print("| figure | median of the seeds | lowest | highest |\n|---|---|---|---|")
    for name, values in found.items():
        print(f"| {name} | {values['median']:.3g} | {values['low']:.3g} | {values['high']:.3g} |")
    draw(runs, asked.out / "lineage.png")


if __name__ == "__main__":
    main()
