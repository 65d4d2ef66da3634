"""What a tuner times: the programs of generation, on shapes that generation uses."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rzoo.compile.aot import Options, decode_program, prefill_program
from rzoo.models.registry import Params
from rzoo.models.step import Blueprint

CAPACITY = 256
STEPS = 16  # of the decode program, as generation compiles it
HELD = 64  # tokens in the cache before decoding


@dataclass(frozen=True)
class Case:
    """phase "prefill": one chunk of `tokens` for each of `rows` prompts. "decode": `tokens` steps of each row."""

    phase: str
    rows: int
    tokens: int

    @property
    def name(self) -> str:
        """As in records: "decode 8"."""
        return f"{self.phase} {self.rows}"


class Work:
    """One program with its arguments; a call runs it once and waits. The cache is donated and taken back each time."""

    def __init__(self, blueprint: Blueprint, params: Params, case: Case, options: Options):
        self.blueprint, self.params, self.case, self.options = blueprint, params, case, options
        self.cache = blueprint.empty_cache(case.rows, CAPACITY)
        self.logits = jnp.zeros((case.rows, blueprint.config.vocab_size), jnp.float32)
        rng = np.random.default_rng(0)
        self.ids = rng.integers(0, blueprint.config.vocab_size, (case.rows, case.tokens)).astype(np.int32)
        self.start = jnp.full(case.rows, HELD if case.phase == "decode" else 0, jnp.int32)

    def __call__(self) -> jax.Array:
        """The logits, when they are there."""
        program, arguments, static = self._call()
        out = program(*arguments, **static)
        logits, self.cache = out[-2], out[-1]
        return logits.block_until_ready()

    def compiled(self) -> Any:
        """The same program as an object that tells its HLO, costs and memory."""
        program, arguments, static = self._call()
        return program.lower(*arguments, **static).compile()

    def _call(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Program, arguments and static ones."""
        counts = np.full(self.case.rows, self.case.tokens, np.int32)
        cache = self.cache.with_lengths(self.start + 0)
        if self.case.phase == "prefill":
            return prefill_program(self.options), (self.blueprint, self.params, self.ids, counts, cache), {}
        rest = (self.logits, cache, jax.random.key(0), counts, jnp.asarray([-1], jnp.int32))
        return decode_program(self.options), (self.blueprint, self.params, *rest), {"steps": STEPS}
