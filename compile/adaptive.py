"""Precision that adapts: which modules of a model run in fp16 and which in bf16, by the numbers that pass through them.

The rule and the signature of `MixedPrecisionScheduler` are those of the project's brief. The norm of a gradient, which
its rule asks for, does not exist at inference: what `calibrate` saw of a module's values takes its place. Both 16-bit
types take the same bytes, fp16 has 3 more bits of precision and bf16 the range of float32: so fp16 is for modules whose
values it can hold. Any nnx.Module will do, and any handle of rzoo.load. The same function is run in all of this: its
jaxpr, equation by equation, each with its inputs in the type of the module whose call it belongs to.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr, Literal
from jaxtyping import Array

from rzoo.core import RzooError, dtype_named
from rzoo.models.registry import path_name

LARGEST = 65504.0  # of fp16
SMALLEST = 2.0**-14  # normal number of fp16
HEADROOM = 2.0  # other inputs than those of the calibration have larger values
MARK = "module:"  # in front of the names of modules among those of scopes
TOP = "top"  # what the model computes outside of its parts
CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")  # equations whose inside is walked
_naming = threading.Lock()


@dataclass(frozen=True)
class Range:
    """Of all finite values that a module computes with: the largest magnitude, and the shares of those that are not
    zero which lie below fp16's normal numbers and above its largest.
    """

    largest: float
    below: float
    above: float

    @property
    def strain(self) -> float:
        """What the scheduler's threshold is for: the share below, and 1 where some may be too large for fp16."""
        return 1.0 if self.largest * HEADROOM > LARGEST else self.below


class MixedPrecisionScheduler:
    """Chooses "fp16" or "bf16" for an operation. precision_map: what is decided; it is the brief's until `calibrate`.

    threshold: of the number that adjust_precision is given. patience: how many calls in a row must stay below half of
    it before an operation that was moved to bf16 returns; 0 is the brief's rule, which has no memory.
    overflows: how often each module had to be moved at run time.
    """

    def __init__(self, threshold: float = 1e-3, patience: int = 0):
        if not threshold > 0 or patience < 0:
            words = f"threshold ({threshold}) must be positive and patience ({patience}) at least 0"
            raise RzooError(words, field="threshold", value=threshold)
        self.threshold, self.patience = threshold, patience
        self.precision_map: dict[str, str] = {"matmul": "bf16", "activation": "fp16"}
        self.overflows = Counter[str]()
        self._calm: dict[str, int] = {}

    def adjust_precision(self, op_type: str, grad_norm: float) -> str:
        """The map's entry where it has one, else "bf16" for a number above the threshold, or that is none, and "fp16"
        below.
        """
        if op_type in self.precision_map:
            return self.precision_map[op_type]
        if not grad_norm <= self.threshold:
            self._calm[op_type] = 0
            return "bf16"
        if op_type in self._calm:
            self._calm[op_type] = self._calm[op_type] + 1 if grad_norm <= self.threshold / 2 else 0
            if self._calm[op_type] < self.patience:
                return "bf16"
            del self._calm[op_type]
        return "fp16"

    def calibrate(self, model: Any, tokens: Any) -> dict[str, Range]:
        """Replaces the map by one for the modules of `model`, by the values that `tokens` make there; returns these."""
        ranges = calibrate(model, tokens)
        self.precision_map, self._calm = {}, {}
        self.precision_map = {name: self.adjust_precision(name, seen.strain) for name, seen in ranges.items()}
        self._calm = {}
        return ranges

    def overflowed(self, op_type: str) -> None:
        """Moves an operation to bf16 for good, and counts it."""
        self.overflows[op_type] += 1
        self.precision_map[op_type] = "bf16"


def calibrate(model: Any, tokens: Any) -> dict[str, Range]:
    """Module ("layers.7.mlp") -> what values `tokens` (of another model: its input) make in it, computed in float32,
    one operation at a time.
    """
    function, params = as_function(model)
    traced = jax.make_jaxpr(function)(params, tokens)
    found: dict[str, np.ndarray] = {}

    def note(name: str, values: Sequence[Any], outputs: Sequence[Any]) -> None:
        for value in filter(_is_float, (*values, *outputs)):
            old, new = found.get(name, np.zeros(4)), np.asarray(_counted(value), float)
            found[name] = np.append(max(old[0], new[0]), old[1:] + new[1:])

    _run(traced, jax.tree.leaves((params, tokens)), TOP, lambda _, __, values: values, note)
    return {
        name: Range(float(largest), float(below / some), float(above / some))
        for name, (largest, below, above, some) in found.items()
        if some
    }


@jax.jit
def _counted(value: Any) -> Array:
    """Largest magnitude, how many lie below and above fp16's range, and how many are not zero."""
    size = jnp.abs(jnp.asarray(value, jnp.float32))
    size = jnp.where(jnp.isfinite(size), size, 0)
    below, above = (size > 0) & (size < SMALLEST), size > LARGEST
    return jnp.stack([size.max(initial=0), *(mask.sum(dtype=jnp.float32) for mask in (below, above, size > 0))])


def as_function(model: Any) -> tuple[Callable[[Any, Any], Any], dict[str, Any]]:
    """A pure function of parameters and an input, whose equations carry the names of modules, and the parameters by
    path. model: a handle, which runs without a cache, or any nnx.Module that is called with one input.
    """
    if hasattr(model, "blueprint"):
        build, params = model.blueprint.module, dict(model.params)
    else:
        graph, state = nnx.split(model)
        params = {path_name(path): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
        paths = {path_name(path): path for path, _ in nnx.to_flat_state(state)}
        kinds = dict(nnx.to_flat_state(state))
        build = lambda params: nnx.merge(  # noqa: E731
            graph, nnx.from_flat_state([(paths[name], kinds[paths[name]].replace(a)) for name, a in params.items()])
        )

    def function(params: Any, x: Any) -> Any:
        module = build(params)
        with _named(module):
            return module(x)

    return function, params


@contextmanager
def _named(module: nnx.Module) -> Iterator[None]:
    """While this holds, calls of the module's parts put their path on the equations that they trace. It wraps their
    classes, one trace at a time.
    """
    names = {id(part): path_name(path) for path, part in nnx.iter_modules(module) if path}

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(part: Any, *arguments: Any, **more: Any) -> Any:
            with jax.named_scope(MARK + names.get(id(part), TOP)):
                return call(part, *arguments, **more)

        return run

    with _naming:
        kinds = {type(part) for path, part in nnx.iter_modules(module) if path}
        calls = {kind: kind.__call__ for kind in kinds if "__call__" in vars(kind)}
        try:
            for kind, call in calls.items():
                setattr(kind, "__call__", wrapped(call))  # noqa: B010
            yield
        finally:
            for kind, call in calls.items():
                setattr(kind, "__call__", call)  # noqa: B010


def _run(
    closed: ClosedJaxpr, inputs: Sequence[Any], scope: str, before: Any, after: Any, live: Sequence[bool] | None = None
) -> list[Any]:
    """Evaluates a jaxpr: each equation on before(name, equation, inputs), then after(name, inputs, outputs).

    live: which inputs depend on numbers that the model was given; None: all of floating point. What depends on none of
    them, such as the angles of rotary positions, is computed as it is written, in float32.
    """
    jaxpr = closed.jaxpr
    known: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *inputs), strict=True))
    flags = map(_is_float, inputs) if live is None else live
    moved = {atom for atom, flag in zip(jaxpr.invars, flags, strict=True) if flag}
    for equation in jaxpr.eqns:
        name, values = _name(equation, scope), [_read(known, atom) for atom in equation.invars]
        alive = [not isinstance(atom, Literal) and atom in moved for atom in equation.invars]
        inner = _inside(equation)
        if inner is not None:
            outputs = _run(inner, values, name, before, after, alive)
        else:
            typed = before(name, equation, values) if any(alive) else values
            found = equation.primitive.bind(*typed, **equation.primitive.get_bind_params(equation.params))
            outputs = list(found) if equation.primitive.multiple_results else [found]
            if any(alive):
                after(name, values, outputs)
        known |= dict(zip(equation.outvars, outputs, strict=True))
        moved |= set(equation.outvars) if any(alive) else set()
    return [_read(known, atom) for atom in jaxpr.outvars]


def _read(known: Mapping[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else known[atom]


def _inside(equation: Any) -> ClosedJaxpr | None:
    if equation.primitive.name not in CALLS:
        return None
    found: ClosedJaxpr = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
    return found


def _name(equation: Any, scope: str) -> str:
    """The innermost module whose call an equation belongs to."""
    scopes = str(equation.source_info.name_stack).split("/")
    return next((name.removeprefix(MARK) for name in reversed(scopes) if name.startswith(MARK)), scope)


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.floating)


class AdaptiveModel:
    """A model whose modules run in the types of a scheduler's map, "fp32" for those that it does not have.

    One program is compiled for each policy (the types of all modules) and kept. Where a module in fp16 gives a value
    that is not finite from values that are, the first such module is moved to bf16 by the scheduler, and the call runs
    again: what it returns never overflowed. compiles: how many programs there are.
    """

    def __init__(self, model: Any, scheduler: MixedPrecisionScheduler):
        self.scheduler, self._programs = scheduler, dict[Any, Any]()
        self._function, self._params = as_function(model)

    @property
    def compiles(self) -> int:
        """Programs that were compiled."""
        return len(self._programs)

    def __call__(self, x: Any) -> Any:
        """The model's output for an input of the shape that it was first called with, in float32."""
        while True:
            output, overflowed = self.program(x)(self._params, x)
            first = next((name for name, found in overflowed.items() if found), None)
            if first is None:
                return output
            self.scheduler.overflowed(first)

    def program(self, x: Any) -> Any:
        """The compiled program of the scheduler's map as it stands; its memory_analysis tells its bytes."""
        policy = tuple(sorted(self.scheduler.precision_map.items()))
        key = (policy, jax.tree.map(lambda a: (jnp.shape(a), jnp.result_type(a)), x))
        if key not in self._programs:
            lowered = jax.jit(partial(in_policy, self._function, dict(policy))).lower(self._params, x)
            self._programs[key] = lowered.compile()
        return self._programs[key]


def in_policy(
    function: Callable[[Any, Any], Any], policy: Mapping[str, str], params: Any, x: Any
) -> tuple[Any, dict[str, Array]]:
    """function(params, x) with the equations of each module in the type that the policy has for it; and of each module
    in fp16 whether it overflowed. Outputs are float32.
    """
    traced, shape = jax.make_jaxpr(function, return_shape=True)(params, x)
    overflowed: dict[str, Array] = {}

    def before(name: str, equation: Any, values: Sequence[Any]) -> list[Any]:
        loops = any(isinstance(p, ClosedJaxpr) or hasattr(p, "eqns") for p in _flat(equation.params.values()))
        wanted = dtype_named(policy.get(name, "fp32"))
        types = [atom.aval.dtype if loops else wanted for atom in equation.invars]
        return [_as(v, to) if _is_float(v) else v for v, to in zip(values, types, strict=True)]

    def after(name: str, values: Sequence[Any], outputs: Sequence[Any]) -> None:
        if policy.get(name) == "fp16":
            finite = lambda found: jnp.stack([jnp.isfinite(v).all() for v in found if _is_float(v)] or [True]).all()  # noqa: E731
            overflowed[name] = overflowed.get(name, False) | (finite(values) & ~finite(outputs))

    outputs = _run(traced, jax.tree.leaves((params, x)), TOP, before, after)
    wide = [_as(v, jnp.float32) if _is_float(v) else v for v in outputs]
    return jax.tree.unflatten(jax.tree.structure(shape), wide), overflowed


def _as(value: Any, to: Any) -> Array:
    """In another type; too large a number becomes infinite without a warning."""
    with np.errstate(over="ignore"):  # literals are converted by numpy
        return jnp.asarray(value).astype(to)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, tuple | list) else (value,)


def held_in(params: Mapping[str, Any], policy: Mapping[str, str]) -> dict[str, Any]:
    """Parameters in the type of the module that they belong to, so that no program has to convert them."""
    out = {}
    for path, value in params.items():
        owners = [name for name in policy if path.startswith(f"{name}.")]
        kind = policy[max(owners, key=len)] if owners else policy.get(TOP, "fp32")
        out[path] = value.astype(dtype_named(kind)) if hasattr(value, "astype") and _is_float(value) else value
    return out
