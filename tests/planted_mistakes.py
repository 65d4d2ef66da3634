"""A child of test_gpu_aot_facts.py: compile/target_programs.py with a mistake planted in it, `MISTAKE JOB ANSWER`."""

import sys
from typing import Any

import jax

from rzoo.compile import kernels, sums, target_programs
from rzoo.models import attention, step
from rzoo.models.weights import dense_product


def upcast() -> None:
    """Every quantized weight lies in memory in the wide type before it is multiplied."""

    def product(self: Any, spec: str, x: Any, numerics: Any) -> Any:
        wide = jax.lax.optimization_barrier(self.dequantize(numerics.compute))
        return dense_product(spec, x, wide, numerics)

    sums.QuantizedInSums.product = product  # type: ignore[method-assign]


def transpose() -> None:
    """Attention in dots, in front of which XLA lays the keys of the whole cache out anew, positions last."""
    kernels.GPU_FORMS["attend_decode"]["in sums"] = attention.attend  # type: ignore[index]


def undonated() -> None:
    """The cache that a step is given stays as it was."""
    static = ("blueprint", "steps", "select")
    target_programs.decode_program = lambda options: jax.jit(step.decode, static_argnames=static)  # type: ignore


if __name__ == "__main__":
    {"upcast": upcast, "transpose": transpose, "undonated": undonated}[sys.argv[1]]()
    target_programs.main(*sys.argv[2:])
