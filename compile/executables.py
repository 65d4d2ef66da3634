"""Programs made ahead of time for a list of shapes, and kept as jax.export artifacts in a folder of the user's own.

An artifact is the traced and lowered program without weights: a new process that reads it skips both steps, and the
compile itself comes from the persistent cache. No pickle: an artifact is a flatbuffer around StableHLO.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rzoo.compile import native
from rzoo.compile.aot import Options, decode_options
from rzoo.compile.blocks import BlockQuantized
from rzoo.compile.folders import files_digest, private_folder, write_whole
from rzoo.compile.kernels import attend_native
from rzoo.compile.record import key_of
from rzoo.compile.workload import STEPS, Case
from rzoo.models import step

Program = Callable[..., Any]


def ahead(lm: Any, cases: Sequence[Case], capacity: int = 256) -> dict[str, Program]:
    """By case, the compiled program for exactly its shapes and a cache of `capacity` tokens; it never compiles again.

    Of "prefill" a function (params, tokens [b, t], counts [b], cache) -> (logits, cache); of "decode" (params, logits,
    cache, key data, wanted [b], stops [1]) -> (tokens [b, 16], logits, cache); see models/step.py. The cache is
    donated. What the folder does not hold is traced, lowered and written there; all else is read. Needs flatbuffers.
    """
    return {case.name: _compiled(lm, case, capacity) for case in cases}


def _compiled(lm: Any, case: Case, capacity: int) -> Program:
    function, given = _program(lm, case, capacity)
    leaves, tree = jax.tree.flatten(given)
    cache = given[-1] if case.phase == "prefill" else given[2]
    first = len(jax.tree.leaves(given[: 3 if case.phase == "prefill" else 2]))
    donated = tuple(range(first, first + len(jax.tree.leaves(cache))))
    exported = _kept(
        _path_of(lm, case, capacity), lambda: jax.jit(_flat(function, tree), donate_argnums=donated), leaves
    )
    options: Options = decode_options() if case.phase == "decode" else ()
    options = options if lm.record is None else lm.record.options(case.phase, case.rows)
    lowered = jax.jit(exported.call, donate_argnums=donated).lower(*leaves)
    compiled, of_cache = lowered.compile(compiler_options=dict(options)), jax.tree.structure(cache)

    def run(*arguments: Any) -> Any:
        found = compiled(*jax.tree.leaves(arguments))
        rest = len(found) - len(jax.tree.leaves(cache))
        return (*found[:rest], jax.tree.unflatten(of_cache, found[rest:]))

    return run


def _program(lm: Any, case: Case, capacity: int) -> tuple[Program, tuple[Any, ...]]:
    """The function of models/step.py, and the shapes of its arguments."""
    of, rows = jax.ShapeDtypeStruct, case.rows
    params = jax.tree.map(lambda a: of(a.shape, a.dtype), lm.params)
    cache, counts = jax.eval_shape(lambda: lm.blueprint.empty_cache(rows, capacity)), of((rows,), jnp.int32)
    if case.phase == "prefill":
        return partial(step.prefill_chunk, lm.blueprint), (params, of((rows, case.tokens), jnp.int32), counts, cache)

    def decode(params, logits, cache, key, wanted, stops):
        key = jax.random.wrap_key_data(key)
        return step.decode(lm.blueprint, params, logits, cache, key, wanted, stops, steps=STEPS)

    logits = of((rows, lm.config.vocab_size), jnp.float32)
    return decode, (params, logits, cache, of((2,), jnp.uint32), counts, of((1,), jnp.int32))


def _flat(function: Program, tree: Any) -> Program:
    """The same over leaves alone: artifacts know no classes of ours."""
    return lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))


def _kept(path: Path | None, make: Callable[[], Any], leaves: Sequence[Any]) -> Any:
    """The artifact at `path`; where there is none, or a broken one, made and written there."""
    from jax import export

    own = [export.DisabledSafetyCheck.custom_call(name) for name in native.KERNELS]
    made = lambda: export.export(make(), disabled_checks=own)(*leaves)  # noqa: E731
    try:
        return export.deserialize(bytearray(path.read_bytes())) if path is not None else made()
    except OSError:
        exported = made()
        assert path is not None
        write_whole(path, exported.serialize())
        return exported


def _path_of(lm: Any, case: Case, capacity: int) -> Path | None:
    """Named by all that the program depends on, so that another program never has this name."""
    folder = private_folder("executables")
    choice = lm.record.choice.to_json() if lm.record is not None else {}
    depends = [key_of(lm), choice, vars(case), capacity, repr(lm.forms.numerics), _models_digest(), jax.__version__]
    depends.append(_calls_kernels(lm))
    name = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:32]
    return None if folder is None else folder / f"{name}.jax"


def _calls_kernels(lm: Any) -> bool:
    """Whether programs call native kernels. These are then registered: an artifact asks for them by name alone."""
    in_blocks = any(isinstance(value, BlockQuantized) for value in lm.params.values())
    return (in_blocks or lm.forms.attend_decode is attend_native) and native.unavailable() is None


@lru_cache(maxsize=1)
def _models_digest() -> str:
    return files_digest(sorted(Path(step.__file__).parent.glob("*.py")))
