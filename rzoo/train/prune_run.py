"""What `rzoo prune` does: load, calibrate, cut, heal, write, compare; or from shapes alone, say what would come out."""

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rzoo.checkpoint.load import load
from rzoo.checkpoint.opened import open_checkpoint
from rzoo.checkpoint.safetensors_file import read_json
from rzoo.checkpoint.save import export
from rzoo.core import RzooError
from rzoo.engine.generate import generate
from rzoo.handle import LM
from rzoo.models.budget import Costs, costs_of, planned
from rzoo.models.prune import sizes_of
from rzoo.models.registry import config_from_hf, count_parameters, family_of, preset
from rzoo.train.heal import heal
from rzoo.train.loop import Say as SayStep
from rzoo.train.prune import Say, calibrate, checked_costs, log_perplexity, prune, rows_of, split_rows, spread

TIMED = 32  # tokens of the answer that is timed


@dataclass(frozen=True)
class Budget:
    """How much a pruned model may have: a share `keep` of its parent, or `most`, in one of budget.UNITS."""

    keep: float | None = None
    most: float | None = None
    unit: str = "parameters"

    def __post_init__(self) -> None:
        if (self.keep is None) == (self.most is None):
            raise RzooError("give either keep or params", field="keep", fix="such as --keep 0.79")
        if self.keep is not None and not 0 < self.keep < 1:
            raise RzooError(f"keep ({self.keep}) must be above 0 and below 1", field="keep", value=self.keep)
        if self.most is not None and not 1 <= self.most < 1e18:
            raise RzooError(f"params ({self.most:g}) must be at least 1", field="params", value=self.most)

    def limit(self, costs: Costs) -> int:
        """In the unit of the costs."""
        return int(self.keep * costs.of(sizes_of(costs.config)) if self.keep is not None else self.most or 0)


def dry_run(model: str, budget: Budget) -> dict[str, Any]:
    """What uniform pruning to a budget would make of a model: {"before": {"parameters"}, "after": {"parameters",
    "config"}}, from shapes alone. model: a preset's name, or a checkpoint or folder whose config.json is enough.

    Raises RzooError for an unknown model and for a budget that can't be reached, with the nearest that can.
    """
    config = _config(model)
    costs = costs_of(config, budget.unit)
    smaller = planned(config, budget.limit(costs), budget.unit)
    after = {"parameters": count_parameters(smaller), "config": smaller.to_hf()}
    return {"before": {"parameters": count_parameters(config)}, "after": after}


def _config(model: str) -> Any:
    path = Path(model)
    if (path / "config.json").is_file():
        return config_from_hf(read_json(path / "config.json"))
    return open_checkpoint(path).config if path.exists() else preset(model)[1].config


@dataclass(frozen=True)
class Facts:
    """What a model costs and how well it predicts. bytes: of its weights as they are held. perplexity: on text that it
    was not calibrated with. tokens_per_second: of greedy decoding, one row.
    """

    parameters: int
    bytes: int
    kv_bytes_per_token: int
    perplexity: float
    tokens_per_second: float


def facts_of(lm: LM, judge: np.ndarray) -> Facts:
    """Measures a model; judge: rows of token ids [n, t]."""
    return Facts(
        parameters=count_parameters(lm.config),
        bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params)),
        kv_bytes_per_token=kv_bytes(lm),
        perplexity=float(np.exp(log_perplexity(lm, judge))),
        tokens_per_second=speed(lm, judge[0, : judge.shape[1] // 4].tolist()),
    )


def kv_bytes(lm: LM) -> int:
    """Bytes that the cache of a row grows by with each token."""
    dtype = jnp.dtype(lm.forms.types("attention").cache)
    slots = jax.eval_shape(lambda: family_of(lm.config).empty_cache(lm.config, 1, 1, dtype)).slots
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(slots))


def speed(lm: LM, prompt: list[int], rounds: int = 3) -> float:
    """Tokens a second of greedy answers to a prompt of ids, the best of some rounds after one that compiles."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        made = generate(lm, prompt, max_new_tokens=min(TIMED, lm.config.context - len(prompt)), ignore_eos=True)
        seconds.append((time.perf_counter() - start) / max(1, len(made.tokens)))
    return 1 / min(seconds[1:])


def run(
    model: str,
    text: str,
    out: str | Path,
    budget: Budget,
    *,
    method: str = "greedy",
    steps: int = 0,
    dtype: str | None = None,
    say: Say = lambda *_: None,
    healing: Callable[[], AbstractContextManager[SayStep]] | None = None,
) -> dict[str, Any]:
    """Prunes a model to a budget and writes it to `out`, a folder in Hugging Face form: {"before", "after", "pruned"},
    Facts each, "pruned" before healing and only where there was any; "after" also holds the config.

    text: its last rows, sixteen or a quarter and at least eight, judge; the others calibrate and heal. steps: of
    healing, whose states lie in the folder `out`.healing until it is done; the same call goes on where one was stopped.
    healing: shows its progress.
    Raises RzooError before anything is written for what `prune`, `split_rows` and Budget refuse, and for a folder that
    is not empty.
    """
    out, states = Path(out), Path(f"{out}.healing")
    resumed = bool(steps) and states.is_dir() and out.is_dir()
    if not resumed and out.exists() and (not out.is_dir() or any(out.iterdir())):
        fix = "name another folder" + (", or go on with --heal" if states.is_dir() else "")
        raise RzooError(f"{out} is there and not empty", field="out", value=str(out), fix=fix)
    parent = load(model, dtype, record=False)
    learn, judge = split_rows(rows_of(parent, text))
    if resumed:
        child = load(out, dtype, record=False, quiet=True)
    else:
        limit = budget.limit(costs_of(parent.config, budget.unit, _itemsize(parent)))
        checked_costs(parent, limit, budget.unit, method)
        calibration = calibrate(parent, spread(learn), say)
        child = prune(parent, calibration, limit, unit=budget.unit, method=method, say=say).lm
        export(child, out)
    found = {"before": facts_of(parent, judge), "after": facts_of(child, judge)}
    if steps:
        child = _healed(child, parent, learn, steps, states, healing)
        export(child, out, overwrite=True)
        shutil.rmtree(states)
        found = {"before": found["before"], "pruned": found["after"], "after": facts_of(child, judge)}
    words: dict[str, Any] = {name: asdict(facts) for name, facts in found.items()}
    words["after"]["config"] = child.config.to_hf()
    return words


def _itemsize(lm: LM) -> float:
    return float(jax.tree.leaves(lm.params["embed"])[0].dtype.itemsize)


def _healed(child: LM, parent: LM, rows: np.ndarray, steps: int, states: Path, healing: Any) -> LM:
    states.mkdir(exist_ok=True)  # so that a run that is stopped before its first save goes on, too
    if healing is None:
        return heal(child, parent, rows, steps, folder=states)
    with healing() as progress:
        return heal(child, parent, rows, steps, folder=states, progress=progress)
