"""The format against its own library, both ways; hostile files; reads of parts."""

import json
import weakref

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings, strategies as st

from rzoo.checkpoint import safetensors_file
from rzoo.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES, read_header, read_tensor, write_tensors
from rzoo.core import RzooError

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def some_tensors():
    """One tensor of every dtype; bits are random, so NaNs and subnormals come up."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, dtype in DTYPES.items():
        count = 3 * 5 * (1 if name == "BOOL" else dtype.itemsize)
        data = rng.integers(0, 2 if name == "BOOL" else 256, count, dtype=np.uint8)
        tensors[f"of.{name}"] = data.view(dtype).reshape(3, 5)
    return tensors | {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 4), np.float16)}


def file_of(path, header, data=b"\0" * 24, length=None):
    """A file with this header (a dict, or raw bytes), saying that its header has `length` bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def test_a_file_we_write_is_read_bit_equal_by_the_formats_own_library(tmp_path):
    tensors = some_tensors()
    write_tensors(tmp_path / "a.safetensors", tensors.items())
    with safetensors.safe_open(tmp_path / "a.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("of.BF16").dtype == ml_dtypes.bfloat16
    theirs = dict(safetensors.deserialize((tmp_path / "a.safetensors").read_bytes()))
    assert theirs.keys() == tensors.keys()
    for name, array in tensors.items():
        assert theirs[name]["dtype"] == DTYPE_NAMES[array.dtype]
        assert tuple(theirs[name]["shape"]) == array.shape
        assert bytes(theirs[name]["data"]) == array.tobytes()


def test_a_file_of_the_formats_own_library_is_read_bit_equal(tmp_path):
    tensors = some_tensors()
    safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors")
    infos = read_header(tmp_path / "a.safetensors")
    assert infos.keys() == tensors.keys()
    for name, array in tensors.items():
        ours = read_tensor(infos[name])
        assert (infos[name].shape, infos[name].nbytes, ours.dtype) == (array.shape, array.nbytes, array.dtype)
        assert ours.tobytes() == array.tobytes()


def test_data_start_on_eight_bytes_and_lie_in_the_order_given(tmp_path):
    write_tensors(tmp_path / "a", [("z", np.ones(3, np.int8)), ("a", np.ones(2, np.float32))])
    infos = list(read_header(tmp_path / "a").values())
    assert [info.name for info in infos] == ["z", "a"]
    assert infos[0].offset % 8 == 0
    assert infos[1].offset == infos[0].offset + 3


def test_a_header_longer_than_the_room_kept_for_it_moves_the_data(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "CHUNK", 1000)
    tensors = {f"model.layers.{i}.self_attn.q_proj.weight": np.full(3, i, np.float32) for i in range(1000)}
    write_tensors(tmp_path / "a", tensors.items())
    theirs = safetensors.numpy.load_file(tmp_path / "a")
    infos = read_header(tmp_path / "a")
    assert theirs.keys() == tensors.keys() == infos.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(theirs[name], array)
        np.testing.assert_array_equal(read_tensor(infos[name]), array)


def test_arrays_that_lie_otherwise_in_memory_are_written_in_row_major_little_endian(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_tensors(tmp_path / "a", [("turned", array.T), ("swapped", array.astype(">f4"))])
    theirs = safetensors.numpy.load_file(tmp_path / "a")
    np.testing.assert_array_equal(theirs["turned"], array.T)
    np.testing.assert_array_equal(theirs["swapped"], array)


def test_one_array_is_held_at_a_time_while_writing(tmp_path):
    def stream():
        before = None
        for i in range(4):
            assert before is None or before() is None
            array = np.full(10, i, np.float32)
            before = weakref.ref(array)
            yield f"t{i}", array
            del array

    assert write_tensors(tmp_path / "a", stream()) == {f"t{i}": 40 for i in range(4)}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([("a", np.zeros(2, complex))], "dtype .complex128. must be one of"),
        ([("a", np.zeros(2, object))], "dtype .object. must be one of"),
        ([("a", np.zeros(2)), ("a", np.zeros(2))], "tensor 'a' is given twice"),
        ([("__metadata__", np.zeros(2))], "its name is reserved"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(tmp_path, tensors, words):
    with pytest.raises(RzooError, match=words):
        write_tensors(tmp_path / "a", tensors)


@pytest.mark.parametrize("name", list(DTYPES))
@pytest.mark.parametrize("wanted", [None, np.float32, ml_dtypes.bfloat16, "float16"])
def test_a_cast_equals_the_cast_of_the_whole_tensor(tmp_path, monkeypatch, name, wanted):
    monkeypatch.setattr(safetensors_file, "CHUNK", 24)
    array = np.arange(60).reshape(3, 4, 5).astype(DTYPES[name])
    write_tensors(tmp_path / "a", [("t", array)])
    ours = read_tensor(read_header(tmp_path / "a")["t"], dtype=wanted)
    assert ours.dtype == (array.dtype if wanted is None else np.dtype(wanted))
    assert ours.tobytes() == array.astype(ours.dtype).tobytes()


BOUND = st.none() | st.integers(-9, 9)


@settings(max_examples=100, deadline=None)
@given(
    index=st.lists(st.builds(slice, BOUND, BOUND), max_size=3).map(tuple),
    wanted=st.sampled_from([None, np.float64]),
    chunk=st.sampled_from([1, 40, 1000]),
)
def test_a_part_equals_the_part_of_the_whole_tensor(tmp_path_factory, index, wanted, chunk):
    file = tmp_path_factory.mktemp("part") / "a"
    array = np.arange(5 * 3 * 4, dtype=np.float32).reshape(5, 3, 4)
    write_tensors(file, [("before", np.ones(7, np.int8)), ("t", array)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_file, "CHUNK", chunk)
        part = read_tensor(read_header(file)["t"], index, wanted)
    np.testing.assert_array_equal(part, array[index])
    assert part.dtype == (wanted or np.float32)


def test_a_row_range_is_read_from_its_own_bytes_alone(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    write_tensors(tmp_path / "a", [("t", array)])
    info = read_header(tmp_path / "a")["t"]
    with open(tmp_path / "a", "r+b") as file:
        file.truncate(info.offset + 2 * 12)  # rows 2 and 3 are gone
    np.testing.assert_array_equal(read_tensor(info, (slice(0, 2),)), array[:2])
    np.testing.assert_array_equal(read_tensor(info, (slice(0, 2), slice(1, 2)), np.float64), array[:2, 1:2])
    with pytest.raises(RzooError, match="ended while tensor 't' was read"):
        read_tensor(info, (slice(1, 3),))


@pytest.mark.parametrize("index", [(slice(0, 4, 2),), (slice(None),) * 3])
def test_a_step_or_too_many_axes_are_refused(tmp_path, index):
    write_tensors(tmp_path / "a", [("t", np.zeros((4, 3)))])
    with pytest.raises(RzooError, match="slices without a step for up to 2 axes of t"):
        read_tensor(read_header(tmp_path / "a")["t"], index)


@pytest.mark.report("A10")
@pytest.mark.parametrize("size", [99_991, 99_992, 99_999, 100_000, 100_001])
def test_headers_around_a_round_size_are_read_whole(tmp_path, size):
    raw = json.dumps({"t": ENTRY}).encode().ljust(size - 1) + b" "
    assert read_header(file_of(tmp_path / "a", raw))["t"].offset == size + 8


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ([], "'t' needs dtype, shape and data_offsets"),
        ({"dtype": "F32", "shape": []}, "'t' needs dtype, shape and data_offsets"),
        (ENTRY | {"dtype": "F4"}, "dtype .'F4'. must be one of F64, F32"),
        (ENTRY | {"dtype": ["F32"]}, "must be one of F64, F32"),
        (ENTRY | {"shape": [2, -3]}, "shape .* must be a list of up to 64 whole numbers from 0"),
        (ENTRY | {"shape": [2, 3.0]}, "must be a list of up to 64 whole numbers"),
        (ENTRY | {"shape": [True, 6]}, "must be a list of up to 64 whole numbers"),
        (ENTRY | {"shape": [1] * 65}, "must be a list of up to 64 whole numbers"),
        (ENTRY | {"shape": 6}, "must be a list of up to 64 whole numbers"),
        (ENTRY | {"shape": [2, 4]}, "takes 32 bytes, but data_offsets hold 24"),
        (ENTRY | {"shape": [2**62, 2**62]}, "takes more than any file"),
        (ENTRY | {"shape": [10**4000, 10**4000]}, "takes more than any file"),
        (ENTRY | {"shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}, "takes more than any file"),
        (ENTRY | {"data_offsets": [0, 25]}, "must lie within the file's 24 bytes of data"),
        (ENTRY | {"data_offsets": [24, 0]}, "must lie within the file's 24 bytes of data"),
        (ENTRY | {"data_offsets": [-24, 0]}, "must lie within the file's 24 bytes of data"),
        (ENTRY | {"data_offsets": [0]}, "must lie within the file's 24 bytes of data"),
    ],
)
def test_a_broken_entry_is_refused(tmp_path, entry, words):
    with pytest.raises(RzooError, match=words):
        read_header(file_of(tmp_path / "a", {"t": entry}))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "must be a JSON object, not list"),
        (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' stands twice"),
        (b'{"__metadata__": 3}', "__metadata__ must be an object"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"t": {"shape": [' + b"9" * 5000 + b"]}}", "is not JSON"),
        ({"a": ENTRY, "b": ENTRY | {"shape": [1], "data_offsets": [20, 24]}}, "data of 'a' and 'b' overlap"),
    ],
)
def test_a_broken_header_is_refused(tmp_path, header, words):
    with pytest.raises(RzooError, match=words):
        read_header(file_of(tmp_path / "a", header))


@pytest.mark.parametrize("kept", [0, 7, 8, 20, -1])
def test_a_truncated_file_is_refused(tmp_path, kept):
    whole = file_of(tmp_path / "a", {"t": ENTRY}).read_bytes()
    (tmp_path / "a").write_bytes(whole[:kept])
    with pytest.raises(RzooError, match=r"(?s)a: .*cut off or broken: fetch or export it again"):
        read_header(tmp_path / "a")


@pytest.mark.parametrize(("header", "rest"), [({"t": ENTRY}, 3), ({}, 27)])
def test_bytes_after_the_last_tensor_are_refused_as_the_formats_own_library_does(tmp_path, header, rest):
    file = file_of(tmp_path / "a", header, bytes(27))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.numpy.load_file(file)
    with pytest.raises(RzooError, match=rf"a: {rest} bytes follow its last tensor"):
        read_header(file)


@pytest.mark.report("A09")
def test_a_header_over_the_limit_is_named_with_its_size_and_called_sound(tmp_path):
    file_of(tmp_path / "a", b"{}", length=126_000_000)
    with open(tmp_path / "a", "r+b") as file:
        file.truncate(130_000_000)  # sparse
    with pytest.raises(RzooError, match=r"(?s)has 126000000 bytes, rzoo reads up to 100000000.*may be sound"):
        read_header(tmp_path / "a")


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    (tmp_path / "a").write_text("version https://example.org/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(RzooError, match="git lfs pull"):
        read_header(tmp_path / "a")


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(RzooError, match="could not be read: No such file"):
        read_header(tmp_path / "a")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_mutated_file_gives_tensors_or_rzoos_own_error(tmp_path_factory, data):
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((3, 1), ml_dtypes.bfloat16)}
    whole = bytearray(safetensors.numpy.save(tensors))
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, header_end - 1))
        whole[place : place + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=3) | st.sampled_from([b"9", b"[", b"{", b'"', b"-", b"e9", b"null", b"0,", b":"])
        )
    file = tmp_path_factory.mktemp("mutated") / "a"
    file.write_bytes(whole)
    try:
        infos = read_header(file)
    except RzooError:
        return
    for info in infos.values():
        assert info.offset + info.nbytes <= len(whole)
        assert read_tensor(info).nbytes == info.nbytes
