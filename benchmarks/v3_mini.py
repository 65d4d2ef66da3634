"""A small DeepSeek-V3 with random weights, rzoo beside transformers: `python benchmarks/v3_mini.py [--rounds 5]`.

One folder, written by `rzoo.export`, is loaded by both, float32, each in a process of its own; they take turns. The
peer runs with the fastest of its experts backends x attention forms, tried for each case. Prints speeds in tokens/s,
the ratios' medians over rounds and their spread, (max - min) / median, and whether the same tokens were chosen.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from rzoo.bench.turns import Child

# case -> (rows, tokens of each prompt, new tokens; where there are none the prompt is timed)
CASES = {"decode_b1": (1, 37, 48), "decode_b8": (8, 37, 32), "prefill512": (1, 512, 0)}
VOCABULARY = 32000


def prompts(case: str) -> list[list[int]]:
    """Random token ids, the same in every process."""
    import numpy as np

    rows, length, _ = CASES[case]
    return np.random.default_rng(0).integers(0, VOCABULARY, (rows, length)).tolist()


def write_model(folder: Path) -> None:
    """The random model as a checkpoint folder."""
    import rzoo
    from rzoo.handle import LM
    from rzoo.models.deepseek import DeepSeekConfig, ExpertsConfig
    from rzoo.models.moe import SigmoidRouting
    from rzoo.models.registry import initialize

    config = DeepSeekConfig(
        vocab_size=VOCABULARY,
        width=512,
        ffn_width=1408,
        layers=12,
        heads=8,
        q_rank=256,
        kv_rank=128,
        nope_width=64,
        rope_width=32,
        value_width=64,
        experts=ExpertsConfig(
            count=32,
            active=4,
            width=256,
            shared=1,
            dense_layers=1,
            routing=SigmoidRouting(groups=4, kept_groups=2, scale=2.5),
        ),
        context=4096,
    )
    rzoo.export(LM(config, initialize(config)), folder)


class Rzoo:
    """rzoo, through the programs that `rzoo.generate` runs."""

    def __init__(self, folder: str, threads: int):
        import rzoo

        self.lm = rzoo.load(folder, dtype="float32", quiet=True)
        for case in CASES:
            self.run(case)

    def about(self) -> dict[str, Any]:
        return {}

    def run(self, case: str) -> dict[str, Any]:
        import jax
        import numpy as np

        from rzoo.engine.session import DECODE_STEPS, decode, prefill

        new, pieces = CASES[case][2], []
        start = time.perf_counter()
        state = prefill(self.lm, prompts(case), room=new)
        jax.block_until_ready(state.logits)
        if new:
            start = time.perf_counter()
        for _ in range(new // DECODE_STEPS):
            tokens, state = decode(self.lm, state, DECODE_STEPS)
            pieces.append(tokens)
        jax.block_until_ready(state.logits)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": np.concatenate(pieces, axis=1).tolist() if pieces else None}


class Transformers:
    """DeepseekV3ForCausalLM at its best."""

    VARIANTS = tuple(product(("grouped_mm", "batched_mm", "eager"), ("sdpa", "eager")))

    def __init__(self, folder: str, threads: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        load = transformers.DeepseekV3ForCausalLM.from_pretrained
        self.model = load(folder, dtype=torch.float32, local_files_only=True).eval()
        self.best: dict[str, tuple[str, str]] = {}
        for case in CASES:
            trial = lambda variant, case=case: min(self._timed(case, 4, variant)["seconds"] for _ in range(2))  # noqa: E731
            self.best[case] = min(self.VARIANTS, key=trial)

    def about(self) -> dict[str, Any]:
        return {case: " + ".join(best) for case, best in self.best.items()}

    def run(self, case: str) -> dict[str, Any]:
        return self._timed(case, CASES[case][2], self.best[case])

    def _timed(self, case: str, most: int, variant: tuple[str, str]) -> dict[str, Any]:
        import torch
        from transformers import DynamicCache

        self.model.set_experts_implementation(variant[0])
        self.model.set_attn_implementation(variant[1])
        new, tokens, cache = min(most, CASES[case][2]), [], DynamicCache(config=self.model.config)

        def step(ids: Any) -> Any:
            return self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

        with torch.inference_mode():
            start = time.perf_counter()
            logits = step(torch.tensor(prompts(case)))
            if new:
                start = time.perf_counter()
            for _ in range(new):
                tokens.append(logits.argmax(-1, keepdim=True))
                logits = step(tokens[-1])
            seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": torch.cat(tokens, 1).tolist() if tokens else None}


def compare(rounds: int, threads: int) -> dict[str, Any]:
    """Both engines in turns: {case: {engine: median tokens/s, ratio, spread, tokens_equal}}, variants and load."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {case: {"rzoo": [], "transformers": []} for case in CASES}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "v3-mini"
        write_model(folder)
        load = [os.getloadavg()]
        start = lambda name: Child(f"v3_mini:{name}", threads=threads, folder=str(folder))  # noqa: E731
        with start("Rzoo") as ours, start("Transformers") as theirs:
            ours.ready(600)
            variants = theirs.ready(600)
            for number in range(rounds):
                order = [("rzoo", ours), ("transformers", theirs)][:: -1 if number % 2 else 1]
                for case, (name, child) in product(CASES, order):
                    runs[case][name].append(child.run(case, 300))
        load.append(os.getloadavg())
    return {case: figures(case, answers) for case, answers in runs.items()} | {"variants": variants, "load": load}


def figures(case: str, answers: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Speeds and the ratio of one case from the answers by round."""
    rows, length, new = CASES[case]
    speeds = {name: [rows * (new or length) / a["seconds"] for a in given] for name, given in answers.items()}
    ratios = [ours / theirs for ours, theirs in zip(speeds["rzoo"], speeds["transformers"], strict=True)]
    same = all(a["tokens"] == b["tokens"] for a, b in zip(*answers.values(), strict=True))
    found: dict[str, Any] = {name: round(median(values), 1) for name, values in speeds.items()}
    spread = (max(ratios) - min(ratios)) / median(ratios)
    return found | {"ratio": round(median(ratios), 2), "spread": round(spread, 2), "tokens_equal": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print(json.dumps(compare(args.rounds, args.threads), indent=2))


if __name__ == "__main__":
    main()
