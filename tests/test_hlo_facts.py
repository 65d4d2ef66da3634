"""Facts of scheduled programs: on programs compiled here with a mistake planted in each, and on notation by hand."""

import jax
import jax.numpy as jnp
import pytest

from rzoo.compile import hlo
from rzoo.compile.hlo_facts import facts, overlaps, step_of

CACHE = jnp.zeros((8, 256, 64), jnp.float32)
ROW = jnp.ones((8, 1, 64), jnp.float32)
SIZE = CACHE.nbytes


def compiled(function, *arguments, **options) -> str:
    """The text of a program of this machine."""
    return str(jax.jit(function, **options).lower(*arguments).compile().as_text())


def written(cache, row, at):
    """A step that changes one row of its cache and reads all of it."""
    cache = jax.lax.dynamic_update_slice_in_dim(cache, row, at, axis=1)
    return cache.sum(axis=1), cache


@pytest.fixture(scope="module")
def clean():
    """The facts of `written` with its cache donated."""
    return facts(compiled(written, CACHE, ROW, 3, donate_argnums=0), SIZE)


def test_a_cache_that_is_changed_in_place_is_neither_moved_nor_held_twice(clean):
    assert clean.moved == clean.widened == ()
    assert clean.aliased == SIZE
    assert SIZE <= clean.read < 1.05 * SIZE
    assert clean.written < 0.05 * SIZE


def test_a_cache_that_is_not_donated_shows(clean):
    found = facts(compiled(written, CACHE, ROW, 3), SIZE)
    assert found.aliased == 0
    assert sum(one.bytes for one in found.moved) == SIZE  # the copy that is changed


def test_a_transposed_cache_shows(clean):
    found = facts(compiled(lambda cache: cache.transpose(1, 0, 2), CACHE), SIZE)
    assert [(one.bytes, one.times) for one in found.moved] == [(SIZE, 1)]
    assert facts(compiled(lambda cache: cache.transpose(1, 0, 2), CACHE), SIZE + 1).moved == ()


def test_a_weight_that_is_widened_in_memory_shows_and_one_that_is_summed_as_it_is_read_does_not():
    codes, x = jnp.ones((512, 256), jnp.int8), jnp.ones(256, jnp.float32)
    dot = facts(compiled(lambda w, x: w.astype(jnp.float32) @ x, codes, x), codes.nbytes)
    assert [one.bytes for one in dot.widened] == [4 * codes.nbytes]
    summed = facts(compiled(lambda w, x: (w.astype(jnp.float32) * x).sum(axis=1), codes, x), codes.nbytes)
    assert summed.widened == ()


def test_a_step_is_the_body_of_the_loop_of_unknown_length():
    step = lambda carry: (carry[0] + 1, jnp.sin(carry[1] @ carry[1]))  # noqa: E731
    loop = lambda n, a: jax.lax.while_loop(lambda carry: carry[0] < n, step, (0, a))  # noqa: E731
    program = hlo.parse(compiled(loop, 5, jnp.ones((64, 64))))
    assert step_of(program) != program.entry
    assert step_of(hlo.parse(compiled(jnp.sin, jnp.ones(4)))).startswith("main")


# An all-reduce with a fusion between its start and its end, within a loop of four runs that copies what it is given.
TEXT = """
HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), {1}: (0, {}, must-alias) }

%halved (param: s8[8,16]) -> bf16[8,16] {
  %param = s8[8,16]{1,0} parameter(0)
  ROOT %convert = bf16[8,16]{1,0} convert(%param)
}

%body (arg: (f32[64], s8[8,16])) -> (f32[64], s8[8,16]) {
  %arg = (f32[64]{0}, s8[8,16]{1,0}) parameter(0)
  %x = f32[64]{0} get-tuple-element(%arg), index=0
  %w = s8[8,16]{1,0} get-tuple-element(%arg), index=1
  %start = f32[64]{0} all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add
  %wide = bf16[8,16]{1,0} fusion(%w), kind=kLoop, calls=%halved
  %done = f32[64]{0} all-reduce-done(%start)
  %kept = f32[64]{0} copy(%done)
  ROOT %out = (f32[64]{0}, s8[8,16]{1,0}) tuple(%kept, %w)
}

ENTRY %main (a: f32[64], b: s8[8,16]) -> (f32[64], s8[8,16]) {
  %a = f32[64]{0} parameter(0)
  %b = s8[8,16]{1,0} parameter(1)
  %first = (f32[64]{0}, s8[8,16]{1,0}) tuple(%a, %b)
  ROOT %loop = (f32[64]{0}, s8[8,16]{1,0}) while(%first), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"4"}}
}
"""


def test_facts_of_a_loop_count_as_often_as_it_runs():
    found = facts(TEXT, 128)
    assert [(one.name, one.bytes, one.times) for one in found.moved] == [("kept", 256, 4)]
    assert [(one.name, one.bytes, one.times) for one in found.widened] == [("wide", 256, 4)]
    assert found.aliased == 64 * 4 + 8 * 16
    assert found.launches == 4 * 3


def test_what_runs_beside_a_collective_is_told():
    (one,) = overlaps(hlo.parse(TEXT))
    assert (one.kind, one.name, one.bytes, one.launches, one.read) == ("all-reduce", "start", 256, 1, 128)
