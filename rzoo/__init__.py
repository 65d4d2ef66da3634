"""rzoo: open reasoning models in JAX, exact, readable and fast.

    lm = rzoo.load("smollm2")              # a preset, a folder, a .gguf file, a hub id
    logits = lm(ids)                       # [b, t] -> float32 [b, t, v]
    rzoo.generate(lm, "What is the capital of France?").text
    lm = rzoo.tune(lm)                     # the fastest programs for this machine within the policy
    rzoo.plan("ultra-253b", gpu="h100", devices=64)   # memory and traffic per GPU, compiled without one
    rzoo.save(lm, "steps/")                # restored by load on any mesh: load("steps/", mesh={"tensor": 4})

Nothing heavy is imported until one of these names is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rzoo.catalog import presets as presets
    from rzoo.checkpoint.load import load as load
    from rzoo.checkpoint.save import export as export
    from rzoo.checkpoint.training import save as save
    from rzoo.compile.autotune import tune as tune
    from rzoo.compile.plan import Plan as Plan, plan as plan
    from rzoo.compile.quantize import quantize as quantize
    from rzoo.core import RzooError as RzooError
    from rzoo.engine.generate import generate as generate, stream as stream
    from rzoo.engine.prompts import prompt_ids as prompt_ids
    from rzoo.engine.rows import Completion as Completion
    from rzoo.engine.score import Score as Score, score as score
    from rzoo.engine.session import Session as Session
    from rzoo.evals.evaluate import evaluate as evaluate
    from rzoo.handle import LM as LM

__version__ = "0.1.0"

# Public name -> module that defines it.
_PUBLIC = {
    "LM": "rzoo.handle",
    "Completion": "rzoo.engine.rows",
    "Plan": "rzoo.compile.plan",
    "RzooError": "rzoo.core",
    "Score": "rzoo.engine.score",
    "Session": "rzoo.engine.session",
    "evaluate": "rzoo.evals.evaluate",
    "export": "rzoo.checkpoint.save",
    "generate": "rzoo.engine.generate",
    "load": "rzoo.checkpoint.load",
    "plan": "rzoo.compile.plan",
    "presets": "rzoo.catalog",
    "prompt_ids": "rzoo.engine.prompts",
    "quantize": "rzoo.compile.quantize",
    "save": "rzoo.checkpoint.training",
    "score": "rzoo.engine.score",
    "stream": "rzoo.engine.generate",
    "tune": "rzoo.compile.autotune",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rzoo' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
