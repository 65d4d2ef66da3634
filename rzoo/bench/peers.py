"""The engines that are compared: rzoo, transformers, llama.cpp, each at its best on the same weights and prompts.

Every engine times the same work. Decoding: the prompt is read first, untimed; then `new` times: take the most likely
token, run the model on it. Prefill: the prompt, with the logits of its last token only.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import time
from pathlib import Path
from typing import Any

from rzoo.bench.cases import CASES, STREAM, Case

Answer = dict[str, Any]

# Engine -> the packages it needs, the last of which gives its version.
PACKAGES = {
    "rzoo": ("rzoo",),
    "transformers": ("torch", "accelerate", "gguf", "transformers"),
    "llama.cpp": ("llama-cpp-python",),
}


def version(engine: str) -> str | None:
    """The installed version of `engine`, or None where it or a package it needs is missing."""
    try:
        return [importlib.metadata.version(package) for package in PACKAGES[engine]][-1]
    except importlib.metadata.PackageNotFoundError:
        return None


def weights_of(source: str) -> Path:
    """The GGUF file or folder that `source` names, for peers. Raises RzooError where there is none."""
    return importlib.import_module("rzoo.checkpoint.sources").locate(source).path


class Rzoo:
    """rzoo, with weights held in `dtype`, through the programs that `rzoo.generate` runs."""

    def __init__(self, source: str, threads: int, dtype: str = "float32", policy: str = "exact"):
        self.lm = importlib.import_module("rzoo").load(source, dtype=dtype, policy=policy, quiet=True)
        self.programs = importlib.import_module("rzoo.engine.session")
        for case in (*CASES, STREAM):
            self.run(case)

    def about(self) -> Answer:
        return {"cases": [*CASES, STREAM], "weight_bytes": self.weight_bytes()}

    def weight_bytes(self) -> int:
        """Bytes that a decode step reads: every weight but an embedding that is not the head, too."""
        unread = 0 if self.lm.config.tied else self.lm.params["embed"].nbytes
        return sum(value.nbytes for value in self.lm.params.values()) - unread

    def run(self, case: str) -> Answer:
        if case == STREAM:
            return self.stream(CASES["decode_b1"])
        shape = CASES[case]
        start = time.perf_counter()
        state = self.programs.prefill(self.lm, shape.ids, shape.new)
        state.logits.block_until_ready()
        if not shape.new:
            return {"seconds": time.perf_counter() - start}
        start = time.perf_counter()
        tokens = self.decode(state, shape.new)
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    def stream(self, case: Case) -> Answer:
        """The case's tokens as a user's stream gives them; the time of the first is that of the others' mean."""
        import rzoo

        pieces = rzoo.stream(self.lm, case.ids[0], max_new_tokens=case.new, ignore_eos=True)
        next(pieces)
        start = time.perf_counter()
        for _ in pieces:
            pass
        return {"seconds": (time.perf_counter() - start) * case.new / (case.new - 1)}

    def decode(self, state: Any, new: int) -> list[list[int]]:
        """`new` greedy tokens per row, [b, new], after as many forward steps."""
        rows: list[list[int]] = [[] for _ in range(state.logits.shape[0])]
        while len(rows[0]) < new:
            tokens, state = self.programs.decode(self.lm, state, new - len(rows[0]))
            for row, ids in zip(rows, tokens, strict=True):
                row += [int(i) for i in ids if i >= 0]
        state.logits.block_until_ready()
        return rows


class Transformers:
    """transformers in float32, with the fastest of its attention × cache variants for each case."""

    VARIANTS = tuple((attention, cache) for attention in ("sdpa", "eager") for cache in ("dynamic", "static"))
    TRIAL = 8  # new tokens of a trial run
    TRIALS = 2

    def __init__(self, weights: str, threads: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        folder, gguf = (weights, None) if Path(weights).is_dir() else (Path(weights).parent, Path(weights).name)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=gguf, dtype=torch.float32, local_files_only=True
        ).eval()
        self.best = {name: self._fastest(case) for name, case in CASES.items()}

    def about(self) -> Answer:
        return {"cases": list(CASES), "variants": {case: " + ".join(best) for case, best in self.best.items()}}

    def run(self, case: str) -> Answer:
        return self._timed(CASES[case], CASES[case].new, self.best[case])

    def _fastest(self, case: Case) -> tuple[str, str]:
        """The variant with the shortest of a few short runs."""
        new = min(case.new, self.TRIAL)
        times: dict[tuple[str, str], float] = {}
        for variant in self.VARIANTS * self.TRIALS:
            seconds = self._timed(case, new, variant)["seconds"]
            times[variant] = min(seconds, times.get(variant, seconds))
        return min(times, key=lambda variant: times[variant])

    def _timed(self, case: Case, new: int, variant: tuple[str, str]) -> Answer:
        import torch

        self.model.set_attn_implementation(variant[0])
        cache, ids = self._cache(variant[1], case.room), torch.tensor(case.ids)
        with torch.inference_mode():
            start = time.perf_counter()
            logits = self._last_logits(ids, cache, 0)
            if not new:
                return {"seconds": time.perf_counter() - start}
            return self._decode(logits, cache, case.prompt, new)

    def _decode(self, logits: Any, cache: Any, position: int, new: int) -> Answer:
        import torch

        start, tokens = time.perf_counter(), []
        for step in range(new):
            tokens.append(logits.argmax(-1, keepdim=True))
            logits = self._last_logits(tokens[-1], cache, position + step)
        return {"seconds": time.perf_counter() - start, "tokens": torch.cat(tokens, 1).tolist()}

    def _last_logits(self, ids: Any, cache: Any, position: int) -> Any:
        """Logits [b, v] after `ids` [b, t], the first of which stands at `position`."""
        import torch

        positions = torch.arange(position, position + ids.shape[1])[None]
        out = self.model(ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]

    def _cache(self, kind: str, room: int) -> Any:
        from transformers import DynamicCache, StaticCache

        config = self.model.config
        return StaticCache(config=config, max_cache_len=room) if kind == "static" else DynamicCache(config=config)


class LlamaCpp:
    """llama.cpp on the GGUF's own blocks (4-bit here, where the others read float32), flash attention on or off."""

    CASES = tuple(name for name, case in CASES.items() if case.batch == 1)
    TRIALS = 2

    def __init__(self, weights: str, threads: int):
        import llama_cpp

        def model(flash: bool) -> Any:
            room = max(CASES[case].room for case in self.CASES)
            limits = {
                "n_ctx": room,
                "n_batch": room,
                "n_ubatch": room,
                "n_threads": threads,
                "n_threads_batch": threads,
            }
            return llama_cpp.Llama(weights, flash_attn=flash, verbose=False, **limits)

        self.models = {f"flash attention {'on' if flash else 'off'}": model(flash) for flash in (True, False)}
        self.best = {case: self._fastest(case) for case in self.CASES}

    def about(self) -> Answer:
        return {"cases": list(self.CASES), "variants": self.best}

    def run(self, case: str) -> Answer:
        return self._timed(self.models[self.best[case]], CASES[case])

    def _fastest(self, case: str) -> str:
        times: dict[str, float] = {}
        for variant in [*self.models] * self.TRIALS:
            seconds = self._timed(self.models[variant], CASES[case])["seconds"]
            times[variant] = min(seconds, times.get(variant, seconds))
        return min(times, key=lambda variant: times[variant])

    @staticmethod
    def _timed(model: Any, case: Case) -> Answer:
        model.reset()
        start = time.perf_counter()
        model.eval(case.ids[0])
        LlamaCpp._best_token(model)  # reading the logits waits for them
        if not case.new:
            return {"seconds": time.perf_counter() - start}
        start, tokens = time.perf_counter(), []
        for _ in range(case.new):
            tokens.append(LlamaCpp._best_token(model))
            model.eval(tokens[-1:])
        LlamaCpp._best_token(model)
        return {"seconds": time.perf_counter() - start, "tokens": [tokens]}

    @staticmethod
    def _best_token(model: Any) -> int:
        import llama_cpp
        import numpy as np

        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())
