"""The compiled programs of a model, whether it lies on one mesh or in a pipeline of several."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from rzoo.compile.aot import decode_chosen_program, decode_options, decode_program, prefill_program
from rzoo.models import step
from rzoo.models.step import Blueprint
from rzoo.sharding import pipeline


@dataclass(frozen=True)
class Programs:
    """The functions of models/step.py, each compiled once for a blueprint and shapes; they use up their caches."""

    forward: Callable[..., Any]
    forward_captured: Callable[..., Any]
    prefill_chunk: Callable[..., Any]
    prefill_chunk_scored: Callable[..., Any]
    decode: Callable[..., Any]
    decode_chosen: Callable[..., Any]
    read_chunk: Callable[..., Any]
    draft: Callable[..., Any] | None  # no stage of a pipeline has all that it needs
    take_rows: Callable[..., Any]
    put_row: Callable[..., Any]


_jit = partial(jax.jit, static_argnames="blueprint")
WHOLE = Programs(
    forward=_jit(step.forward),
    forward_captured=_jit(step.forward_captured),
    prefill_chunk=prefill_program(),
    prefill_chunk_scored=_jit(step.prefill_chunk_scored, donate_argnames="cache"),
    decode=decode_program(decode_options()),
    decode_chosen=decode_chosen_program(decode_options()),
    read_chunk=jax.jit(step.read_chunk, static_argnames=("blueprint", "read"), donate_argnames="cache"),
    draft=jax.jit(step.draft, static_argnames=("blueprint", "count"), donate_argnames="cache"),
    take_rows=_jit(step.take_rows),
    put_row=_jit(step.put_row, donate_argnames="cache"),
)
STAGED = Programs(
    forward=pipeline.forward,
    forward_captured=pipeline.forward_captured,
    prefill_chunk=pipeline.prefill_chunk,
    prefill_chunk_scored=pipeline.prefill_chunk_scored,
    decode=pipeline.decode,
    decode_chosen=pipeline.decode_chosen,
    read_chunk=pipeline.read_chunk,
    draft=None,
    take_rows=pipeline.take_rows,
    put_row=pipeline.put_row,
)


def programs_of(blueprint: Blueprint, record: Any = None, rows: int = 1) -> Programs:
    """The programs that run a model as it is placed, with the options of its tuning record for `rows` rows."""
    if isinstance(blueprint.forms.place, pipeline.Pipeline):
        return STAGED
    if record is None:
        return WHOLE
    prefill, decode = (record.options(phase, rows) for phase in ("prefill", "decode"))
    return replace(
        WHOLE,
        prefill_chunk=prefill_program(prefill),
        decode=decode_program(decode),
        decode_chosen=decode_chosen_program(decode),
    )


def on_host(array: Any) -> np.ndarray:
    """The whole of an array, also where other processes hold parts of it; all processes must ask."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return np.asarray(array)
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
