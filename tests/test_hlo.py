"""Reading scheduled programs: trip counts, slices of operands, writes in place, groups of devices."""

import pytest

from rzoo.compile import hlo

# A loop of three runs over a stack of weights [3, 4, 8]: a fusion slices out one, a product reads it, the sum over 4 of
# 8 devices follows; then a fusion that writes one row of a cache in place, and a loop of unknown length.
TEXT = """
HloModule jit_f, is_scheduled=true, num_partitions=8

%sliced (param_0.1: bf16[3,4,8], param_1.1: s32[]) -> bf16[4,8] {
  %param_0.1 = bf16[3,4,8]{2,1,0} parameter(0)
  %param_1.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %slice.1 = bf16[1,4,8]{2,1,0} dynamic-slice(%param_0.1, %param_1.1, %zero.1, %zero.1), dynamic_slice_sizes={1,4,8}
  ROOT %bitcast.1 = bf16[4,8]{1,0} bitcast(%slice.1)
}

%changed (param_0.2: bf16[16,8], param_1.2: bf16[1,8], param_2.2: s32[]) -> bf16[16,8] {
  %param_0.2 = bf16[16,8]{1,0} parameter(0)
  %param_1.2 = bf16[1,8]{1,0} parameter(1)
  %param_2.2 = s32[] parameter(2)
  ROOT %update.1 = bf16[16,8]{1,0} dynamic-update-slice(%param_0.2, %param_1.2, %param_2.2, %param_2.2)
}

%body (arg: (s32[], bf16[3,4,8], f32[4])) -> (s32[], bf16[3,4,8], f32[4]) {
  %arg = (s32[], bf16[3,4,8]{2,1,0}, /*index=2*/f32[4]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg), index=0
  %stack.1 = bf16[3,4,8]{2,1,0} get-tuple-element(%arg), index=1
  %x.1 = f32[4]{0} get-tuple-element(%arg), index=2
  %weight.1 = bf16[4,8]{1,0} fusion(%stack.1, %i.1), kind=kLoop, calls=%sliced
  %product.1 = f32[4]{0} custom-call(%weight.1, %x.1), custom_call_target="__cublas$gemm"
  %sum.1 = f32[4]{0} all-reduce-start(%product.1), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  %sum.2 = f32[4]{0} all-reduce-done(%sum.1)
  ROOT %out.1 = (s32[], bf16[3,4,8]{2,1,0}, f32[4]{0}) tuple(%i.1, %stack.1, %sum.2)
}

%again (arg.2: (s32[])) -> (s32[]) {
  %arg.2 = (s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%arg.2), index=0
  %next.2 = s32[] add(%i.2, %i.2)
  ROOT %out.2 = (s32[]) tuple(%next.2)
}

ENTRY %main (stack: bf16[3,4,8], x: f32[4], cache: bf16[16,8], row: bf16[1,8], i: s32[]) -> bf16[16,8] {
  %stack = bf16[3,4,8]{2,1,0} parameter(0)
  %x = f32[4]{0} parameter(1)
  %cache = bf16[16,8]{1,0} parameter(2)
  %row = bf16[1,8]{1,0} parameter(3)
  %i = s32[] parameter(4)
  %first = (s32[], bf16[3,4,8]{2,1,0}, f32[4]{0}) tuple(%i, %stack, %x)
  %loop = (s32[], bf16[3,4,8]{2,1,0}, f32[4]{0}) while(%first), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %one = (s32[]) tuple(%i)
  %open = (s32[]) while(%one), condition=%c, body=%again
  ROOT %kept = bf16[16,8]{1,0} fusion(%cache, %row, %i), kind=kInput, calls=%changed
}
"""
COSTS = hlo.parse(TEXT).costs
WEIGHT, VECTOR, INDEX, ROW = 64, 16, 4, 16  # bytes


def test_a_loop_counts_as_often_as_it_runs_and_one_of_unknown_length_once():
    assert COSTS.launches == 3 * 3 + 1 + 1  # tuples, parameters and what only waits start nothing
    assert COSTS.unknown_loops == 1
    assert COSTS.kinds == {
        "fusion kLoop": 3, "custom-call __cublas$gemm": 3, "all-reduce": 3, "add": 1, "fusion kInput": 1
    }  # fmt: skip


def test_a_slice_of_an_operand_is_what_is_read_and_a_change_in_place_what_is_written():
    body = (WEIGHT + INDEX) + (WEIGHT + VECTOR) + VECTOR
    assert COSTS.read == 3 * body + 2 * INDEX + (ROW + INDEX)
    assert COSTS.written == 3 * (WEIGHT + VECTOR) + INDEX + ROW


def test_collectives_are_counted_with_their_bytes_and_the_devices_of_a_group():
    assert dict(COSTS.collectives) == {("all-reduce", (0, 2, 4, 6)): [3, 3 * VECTOR]}


@pytest.mark.parametrize(
    ("attributes", "devices"),
    [
        ("replica_groups={{0,1},{2,3}}", (0, 1)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,2,2]T(1,2,0)", (0, 4)),
        ("source_target_pairs={{0,8},{1,9}}", (0, 8)),
        ("replica_groups={}", ()),
    ],
)
def test_the_first_group_is_read_from_every_notation(attributes, devices):
    assert hlo.group_of(hlo.Instruction("a", "f32[]", "all-reduce", (), attributes, False)) == devices


@pytest.mark.parametrize(
    ("shape", "size"),
    [("bf16[2,3]{1,0}", 12), ("s4[5]", 3), ("pred[]", 1), ("(f8e4m3fn[4], /*index=1*/f32[2]{0})", 12), ("token[]", 0)],
)
def test_bytes_of_a_shape(shape, size):
    assert hlo.bytes_in(shape) == size


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("HloModule empty")
