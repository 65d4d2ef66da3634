"""Pruning SmolLM2 to 79 % and healing it: `python benchmarks/prune.py TEXT [--seeds 0 1 2] [--heal 100] [--modes]`.

TEXT: a file of paragraphs. The last sixth of them judges and is the same for all seeds; a seed draws from the others
what calibrates, and what the random twin keeps. A line of JSON for each figure as it is found: perplexities of the
parent, of greedy and uniform pruning and of a random twin of the greedy shapes, each with and without the fit of what
stays; of modes that touch 20, 40 and 60 % fewer parameters, with seconds a token of decoding; seconds of decoding of
parent and child in turns; and for the first seed, of the healed child and the healed twin. With --model r1-tiny, which
reads its own thoughts and no TEXT (-), solved depths.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

KEEP = 0.79
ROUNDS = 5


def told(**found: Any) -> None:
    """Prints a line of figures."""
    print(json.dumps(found), flush=True)


def texts(path: str, seed: int) -> tuple[str, str]:
    """(text to learn from, text to judge by) without a common paragraph."""
    import numpy as np

    paragraphs = [text for text in Path(path).read_text().split("\n\n") if text.strip()]
    first = len(paragraphs) * 5 // 6
    order = np.random.default_rng(seed).permutation(first)
    return "\n\n".join(paragraphs[i] for i in order), "\n\n".join(paragraphs[first:])


def before_healing(lm: Any, learn: Any, judge: Any, seed: int) -> dict[str, Any]:
    """Perplexities of each kind of pruning; returns the greedy child and its random twin."""
    import numpy as np

    from rzoo.models.budget import moves_of
    from rzoo.models.registry import count_parameters
    from rzoo.train.prune import calibrate, log_perplexity, losses_of, prune, spread

    start = time.perf_counter()
    data, limit = calibrate(lm, spread(learn)), int(KEEP * count_parameters(lm.config))
    losses = losses_of(lm, data, moves_of(lm.config))
    made: dict[str, Any] = {}
    for method in ("greedy", "uniform", "random"):
        for refit in (True, False):
            pruned = prune(lm, data, limit, method=method, losses=losses, refit=refit, seed=seed)
            perplexity = float(np.exp(log_perplexity(pruned.lm, judge)))
            share = count_parameters(pruned.lm.config) / count_parameters(lm.config)
            told(seed=seed, method=method, refit=refit, share=share, perplexity=perplexity)
            made |= {method: pruned.lm} if refit == (method != "random") else {}
    told(seed=seed, seconds=time.perf_counter() - start)
    return made


def in_turns(first: Any, second: Any, prompt: list[int]) -> tuple[float, float, float]:
    """Tokens a second of both, timed in turns, and the median of the ratios second / first."""
    from rzoo.train.prune_run import speed

    pairs = [(speed(first, prompt, rounds=1), speed(second, prompt, rounds=1)) for _ in range(ROUNDS)]
    return median(a for a, _ in pairs), median(b for _, b in pairs), median(b / a for a, b in pairs)


def modes(lm: Any, learn: Any, judge: Any) -> None:
    """The modes at 20, 40 and 60 % fewer touched parameters."""
    import numpy as np

    from rzoo.core import RzooError
    from rzoo.models.modes import full, touched_costs
    from rzoo.train.modes import mode_losses, mode_within
    from rzoo.train.prune import calibrate, log_perplexity, spread

    losses, costs = mode_losses(lm, calibrate(lm, spread(learn))), touched_costs(lm.config)
    for fewer in (0.2, 0.4, 0.6):
        try:
            found, sizes = mode_within(lm, losses, 1 - fewer)
        except RzooError as error:
            told(mode=fewer, refused=str(error))
            continue
        share = costs.of(sizes) / costs.of(full(lm.config))
        perplexity = float(np.exp(log_perplexity(found, judge[:4])))
        told(mode=fewer, touched=share, perplexity=perplexity, whole=float(np.exp(log_perplexity(lm, judge[:4]))))
        told(mode=fewer, tokens_per_second=in_turns(lm, found, judge[0, :16].tolist()))


def healing(lm: Any, made: dict[str, Any], learn: Any, judge: Any, steps: int) -> None:
    """The greedy child and the random twin, healed alike."""
    import numpy as np

    from rzoo.train.heal import heal
    from rzoo.train.prune import log_perplexity

    for name in ("greedy", "random"):
        start = time.perf_counter()
        child = heal(made[name], lm, learn, steps)
        seconds = time.perf_counter() - start
        told(healed=name, steps=steps, seconds=seconds, perplexity=float(np.exp(log_perplexity(child, judge))))


def thoughts(lm: Any, seed: int, count: int = 96) -> Any:
    """What a member of the lineage writes, prompts included, as rows of ids."""
    import numpy as np

    import rzoo
    from rzoo.data.chains import chain
    from rzoo.train.prune import LENGTH

    rng = np.random.default_rng((seed, 7))
    asked = [chain(rng, int(rng.integers(1, 11))).prompt for _ in range(count)]
    made = rzoo.generate(lm, asked, max_new_tokens=80)
    ids = [token for one in made for token in (*one.prompt_tokens, *one.tokens)]
    return np.asarray(ids[: len(ids) // LENGTH * LENGTH], np.int32).reshape(-1, LENGTH)


def depth(model: str, seeds: list[int], steps: int) -> None:
    """Solved depth of r1-tiny, of its pruned child and of the random twin, before and after healing on thoughts."""
    from lineage import accuracy, solved_depth

    import rzoo
    from rzoo.models.budget import moves_of
    from rzoo.models.registry import count_parameters
    from rzoo.train.heal import heal
    from rzoo.train.prune import calibrate, losses_of, prune

    lm = rzoo.load(model, dtype="float32", record=False)
    solved = lambda one: [accuracy(one, n) for n in range(1, 13)]  # noqa: E731
    told(parent=solved_depth(found := solved(lm)), accuracies=found)
    limit = int(KEEP * count_parameters(lm.config))
    for seed in seeds:
        rows = thoughts(lm, seed)
        data = calibrate(lm, rows)
        losses = losses_of(lm, data, moves_of(lm.config))
        for method in ("greedy", "random"):
            child = prune(lm, data, limit, method=method, losses=losses, refit=method == "greedy", seed=seed)
            share = count_parameters(child.lm.config) / count_parameters(lm.config)
            told(seed=seed, method=method, share=share, sizes=str(child.sizes), solved=solved_depth(solved(child.lm)))
            healed = heal(child.lm, lm, rows, steps, batch=16, peak=1e-3)
            told(seed=seed, method=method, healed=solved_depth(found := solved(healed)), accuracies=found)


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--heal", type=int, default=0)
    parser.add_argument("--modes", action="store_true")
    asked = parser.parse_args()
    if asked.model.startswith("r1-"):
        depth(asked.model, asked.seeds, asked.heal or 200)
        return

    import numpy as np

    import rzoo
    from rzoo.train.prune import log_perplexity, rows_of

    lm = rzoo.load(asked.model, dtype="float32", record=False)
    for seed in asked.seeds:
        learn, judge = (rows_of(lm, text) for text in texts(asked.text, seed))
        told(seed=seed, parent=float(np.exp(log_perplexity(lm, judge[:32]))), rows=len(learn))
        if asked.modes:
            modes(lm, learn, judge)
            return
        made = before_healing(lm, learn, judge[:32], seed)
        if seed == asked.seeds[0]:
            told(tokens_per_second=in_turns(lm, made["greedy"], judge[0, :16].tolist()))
            if asked.heal:
                healing(lm, made, learn, judge[:32], asked.heal)


if __name__ == "__main__":
    main()
