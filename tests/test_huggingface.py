"""Checkpoint folders: which files count, what is refused, and that a failed write leaves nothing behind."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from rzoo.checkpoint.huggingface import INDEX, open_folder, write_folder
from rzoo.core import RzooError

GOLDENS = Path(__file__).parents[1] / "../shared/checkpoints"
A, B, C = (np.full((2, 3), value, np.float32) for value in (1, 2, 3))


def save(folder, files, weight_map=None, config='{"model_type": "llama"}'):
    """A checkpoint folder of {file name: {tensor name: array}}."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    for name, tensors in files.items():
        safetensors.numpy.save_file(tensors, folder / name)
    if weight_map is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def held(folder):
    """Every file under `folder` with its content."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_single_file_folder_opens_and_other_safetensors_beside_it_do_not_count(tmp_path):
    folder = save(tmp_path / "m", {"model.safetensors": {"a": A}, "reference.safetensors": {"logits": B}})
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    opened = open_folder(folder)
    assert (opened.config, opened.generation_config) == ({"model_type": "llama"}, {"temperature": 0.6})
    assert (list(opened.tensors), opened.warnings) == (["a"], ())
    assert opened.tensors["a"].dtype == "F32"
    np.testing.assert_array_equal(opened.read("a", np.float16), A.astype(np.float16))
    np.testing.assert_array_equal(opened.read_slice("a", (slice(1, 2), slice(0, 2))), A[1:2, :2])
    with pytest.raises(RzooError, match=r"(?s)has no tensor 'b'.*It has 1: 'a'"):
        opened.read("b")


@pytest.mark.report("A15")
def test_shards_have_the_names_that_the_index_gives_them(tmp_path):
    files = {"part.1-of-7.special.safetensors": {"a": A}, "weights-x": {"b": B}}
    opened = open_folder(save(tmp_path / "m", files, {"a": "part.1-of-7.special.safetensors", "b": "weights-x"}))
    np.testing.assert_array_equal(opened.read("b"), B)
    assert (opened.generation_config, opened.warnings) == ({}, ())


@pytest.mark.report("A12")
def test_absent_shards_are_named_before_any_other_is_read(tmp_path):
    folder = save(tmp_path / "m", {}, {"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"})
    (folder / "one.safetensors").write_bytes(b"not read")
    words = "partly downloaded: 2 of the 3 files .* are absent: 'three.safetensors', 'two.safetensors'"
    with pytest.raises(RzooError, match=words):
        open_folder(folder)


@pytest.mark.report("A13")
def test_a_stale_index_beside_a_complete_set_is_a_warning(tmp_path):
    files = {"model-00001-of-00002.safetensors": {"a": A}, "model-00002-of-00002.safetensors": {"b": B}}
    stale = {name: f"model-0000{i}-of-00003.safetensors" for i, name in enumerate("abc", 1)}
    opened = open_folder(save(tmp_path / "m", files, stale))
    np.testing.assert_array_equal(opened.read("b"), B)
    assert opened.warnings == (
        "stale index: no file that model.safetensors.index.json lists is there; read model-00001-of-00002.safetensors,"
        " model-00002-of-00002.safetensors instead, without 'c' of the index",
    )


@pytest.mark.report("A13")
def test_a_stale_index_beside_a_single_file_is_a_warning(tmp_path):
    opened = open_folder(
        save(tmp_path / "m", {"model.safetensors": {"a": A}}, {"a": "model-00001-of-00002.safetensors"})
    )
    assert list(opened.tensors) == ["a"]
    assert "read model.safetensors instead" in opened.warnings[0]


@pytest.mark.report("A13")
def test_a_stale_index_beside_an_incomplete_set_is_refused(tmp_path):
    folder = save(tmp_path / "m", {"model-00001-of-00002.safetensors": {"a": A}}, {"a": "old.safetensors"})
    with pytest.raises(RzooError, match="partly downloaded: 1 of 2 files are absent"):
        open_folder(folder)


def test_files_without_an_index_are_all_read(tmp_path):
    opened = open_folder(save(tmp_path / "m", {"x.safetensors": {"a": A}, "y.safetensors": {"b": B}}))
    assert list(opened.tensors) == ["a", "b"]


def test_files_without_an_index_that_hold_one_name_twice_are_refused(tmp_path):
    folder = save(tmp_path / "m", {"x.safetensors": {"a": A}, "y.safetensors": {"a": B}})
    with pytest.raises(RzooError, match=r"tensor 'a' is in x.safetensors and in y.safetensors"):
        open_folder(folder)


def test_numbered_files_without_an_index_must_be_complete(tmp_path):
    files = {"model-00001-of-00003.safetensors": {"a": A}, "model-00003-of-00003.safetensors": {"b": B}}
    words = r"partly downloaded: 1 of 3 files are absent from the set 'model-\*-of-00003.safetensors'"
    with pytest.raises(RzooError, match=words):
        open_folder(save(tmp_path / "m", files))


def test_tensors_that_their_shard_lacks_are_named(tmp_path):
    folder = save(tmp_path / "m", {"x.safetensors": {"a": A}}, {"a": "x.safetensors", "lm_head": "x.safetensors"})
    with pytest.raises(RzooError, match=r"their files lack: 'lm_head' .*in 'x.safetensors'"):
        open_folder(folder)


def test_what_the_index_does_not_list_is_ignored_with_a_warning(tmp_path):
    files = {"x.safetensors": {"a": A, "extra": C}, "y.safetensors": {"a": C, "b": B}, "model.safetensors": {"a": C}}
    opened = open_folder(save(tmp_path / "m", files, {"a": "x.safetensors", "b": "y.safetensors"}))
    np.testing.assert_array_equal(opened.read("a"), A)
    assert list(opened.tensors) == ["a", "b"]
    assert "ignored 1 tensors that model.safetensors.index.json does not list: 'extra'" in opened.warnings
    assert any(warning.startswith("ignored model.safetensors") for warning in opened.warnings)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "../x.safetensors"}, "must be a name inside the folder"),
        ({"a": "sub/../../x.safetensors"}, "must be a name inside the folder"),
        ({"a": "/x.safetensors"}, "must be a name inside the folder"),
        ({"a": "..\\x.safetensors"}, "must be a name inside the folder"),
        ({"a": "C:x.safetensors"}, "must be a name inside the folder"),
        ({"a": "x\0.safetensors"}, "must be a name inside the folder"),
        ({"a": ""}, "must be a name inside the folder"),
        ({"a": 3}, "must be a name inside the folder"),
        ({"a": "pytorch_model.bin"}, "(?s)'pytorch_model.bin' is a pickle, and rzoo never unpickles.*save_pretrained"),
        ({}, "weight_map must be an object"),
        (["a"], "weight_map must be an object"),
        ({"a": "x" * 5000}, "absent: 'xxx"),
        ({"a": "\ud800"}, "absent: '.ud800'"),
    ],
)
def test_a_broken_or_hostile_index_is_refused(tmp_path, weight_map, words):
    with pytest.raises(RzooError, match=words):
        open_folder(save(tmp_path / "m", {}, weight_map))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "config.json is not JSON"),
        ("[1]", "config.json must be a JSON object, not list"),
        ('{"a": 1, "a": 2}', "config.json: the key 'a' stands twice"),
        ('{"a":' * 100_000, "config.json is nested too deep"),
    ],
)
def test_a_broken_config_is_refused(tmp_path, config, words):
    with pytest.raises(RzooError, match=words):
        open_folder(save(tmp_path / "m", {"model.safetensors": {"a": A}}, config=config))


def test_folders_that_are_no_checkpoint_are_refused(tmp_path):
    with pytest.raises(RzooError, match="m does not exist"):
        open_folder(tmp_path / "m")
    (tmp_path / "m").mkdir()
    with pytest.raises(RzooError, match=r"(?s)m is empty.*Put config.json"):
        open_folder(tmp_path / "m")
    (tmp_path / "m" / "model.gguf").touch()
    with pytest.raises(RzooError, match=r"model.gguf is a file, not a checkpoint folder"):
        open_folder(tmp_path / "m" / "model.gguf")
    with pytest.raises(RzooError, match=r"m has no config.json"):
        open_folder(tmp_path / "m")
    save(tmp_path / "m", {})
    with pytest.raises(RzooError, match=r"has no \*.safetensors, only config.json, model.gguf"):
        open_folder(tmp_path / "m")


def test_pickles_are_refused_with_the_way_to_convert_them(tmp_path):
    folder = save(tmp_path / "m", {})
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(
        RzooError, match=r"(?s)only as pickles \(pytorch_model.bin\), and rzoo never unpickles.*Convert"
    ):
        open_folder(folder)


def test_what_is_written_in_shards_is_read_by_the_formats_own_library_and_by_us(tmp_path):
    tensors = {f"t{i}": np.arange(i * 10, i * 10 + 10).astype(ml_dtypes.bfloat16) for i in range(5)}
    write_folder(
        tmp_path / "m",
        {"model_type": "llama"},
        iter(tensors.items()),
        generation_config={"top_p": 0.95},
        extra_files={"tokenizer.json": b"{}"},
        max_shard_bytes=45,
    )
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path / "m")) == [
        "config.json",
        "generation_config.json",
        *shards,
        INDEX,
        "tokenizer.json",
    ]
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 100}
    opened = open_folder(tmp_path / "m")
    assert (opened.config, opened.generation_config, opened.warnings) == ({"model_type": "llama"}, {"top_p": 0.95}, ())
    for name, array in tensors.items():
        with safetensors.safe_open(tmp_path / "m" / index["weight_map"][name], "numpy") as file:
            assert file.get_tensor(name).tobytes() == array.tobytes() == opened.read(name).tobytes()


def test_one_shard_needs_no_index_and_a_tensor_over_the_limit_has_its_own(tmp_path):
    write_folder(tmp_path / "one", {}, [("a", A), ("b", B)])
    assert sorted(os.listdir(tmp_path / "one")) == ["config.json", "model.safetensors"]
    write_folder(tmp_path / "two", {}, [("a", A), ("b", B)], max_shard_bytes=1)
    assert open_folder(tmp_path / "two").tensors["b"].file.name == "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, RzooError])
@pytest.mark.parametrize("before", ["nothing", "an empty folder", "a checkpoint"])
def test_a_write_that_fails_midway_leaves_all_as_it_was(tmp_path, error, before):
    def stream():
        yield "a", B
        yield "b", B
        raise error("midway")

    if before == "an empty folder":
        (tmp_path / "m").mkdir()
    if before == "a checkpoint":
        write_folder(tmp_path / "m", {}, [("a", A)])
    was = held(tmp_path), sorted(os.listdir(tmp_path))
    with pytest.raises(error, match="midway"):
        write_folder(tmp_path / "m", {}, stream(), max_shard_bytes=30, overwrite=True)
    assert (held(tmp_path), sorted(os.listdir(tmp_path))) == was


def test_a_killed_write_leaves_the_old_checkpoint_and_a_hidden_folder(tmp_path):
    write_folder(tmp_path / "m", {}, [("a", A)])
    was = held(tmp_path / "m")
    program = f"""
import os, signal, numpy as np
from rzoo.checkpoint.huggingface import write_folder
def stream():
    yield "a", np.zeros(9)
    os.kill(os.getpid(), signal.SIGKILL)
write_folder({str(tmp_path / "m")!r}, {{}}, stream(), overwrite=True)
"""
    root = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": str(root)}
    assert subprocess.run([sys.executable, "-c", program], env=env, check=False).returncode == -signal.SIGKILL
    assert held(tmp_path / "m") == was
    assert [name[:11] for name in os.listdir(tmp_path) if name != "m"] == [".m.partial-"]
    write_folder(tmp_path / "m", {}, [("b", B)], overwrite=True)
    assert list(open_folder(tmp_path / "m").tensors) == ["b"]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path):
    """The limit on a file's size stands in for the disk: both fail in the same call of write."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(RzooError, match=r"(?s)could not be written: File too large.*Free space"):
            write_folder(tmp_path / "m", {}, [("a", np.zeros(1 << 20))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == []


def test_overwriting_replaces_a_checkpoint_as_a_whole_even_while_it_is_the_source(tmp_path):
    write_folder(tmp_path / "m", {}, [("a", A), ("b", B)], max_shard_bytes=24, extra_files={"old.txt": b"old"})
    source = open_folder(tmp_path / "m")
    write_folder(tmp_path / "m", {}, ((name, source.read(name)) for name in source.tensors), overwrite=True)
    assert os.listdir(tmp_path) == ["m"]
    assert sorted(os.listdir(tmp_path / "m")) == ["config.json", "model.safetensors"]
    np.testing.assert_array_equal(open_folder(tmp_path / "m").read("b"), B)


def test_a_target_that_holds_other_things_is_refused(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.tex").touch()
    with pytest.raises(RzooError, match=r"(?s)m is not empty.*overwrite=True"):
        write_folder(tmp_path / "m", {}, [("a", A)])
    with pytest.raises(RzooError, match="m is not empty and no checkpoint"):
        write_folder(tmp_path / "m", {}, [("a", A)], overwrite=True)
    with pytest.raises(RzooError, match=r"thesis.tex is not a folder"):
        write_folder(tmp_path / "m" / "thesis.tex", {}, [("a", A)], overwrite=True)
    assert os.listdir(tmp_path) == ["m"]


def test_a_target_filled_by_another_program_meanwhile_is_not_replaced(tmp_path):
    def stream():
        yield "a", A
        save(tmp_path / "m", {"model.safetensors": {"theirs": B}})

    with pytest.raises(RzooError, match="could not be written: Directory not empty"):
        write_folder(tmp_path / "m", {}, stream())
    assert list(open_folder(tmp_path / "m").tensors) == ["theirs"]
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"config": {"a": {1}}}, "config cannot be written as JSON"),
        ({"generation_config": {"a": b""}}, "generation_config cannot be written as JSON"),
        ({"tensors": []}, "there are no tensors to write"),
        ({"tensors": [("a", A), ("b", B), ("a", C)], "max_shard_bytes": 24}, "tensor 'a' is given twice"),
        ({"extra_files": {"../x": b""}}, "extra file .'../x'. must be a plain file name"),
        ({"extra_files": {"config.json": b""}}, "must be a plain file name, of no file that is written anyway"),
        ({"extra_files": {"model.safetensors": b""}}, "must be a plain file name"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, arguments, words):
    with pytest.raises(RzooError, match=words):
        write_folder(tmp_path / "m", **({"config": {}, "tensors": [("a", A)]} | arguments))
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not GOLDENS.is_dir(), reason="the reference checkpoints are not beside this checkout")
@pytest.mark.parametrize(
    "name", ["deepseek_v3", "deepseek_v32", "llama_llama3rope", "llama_tied", "nemotron_nas", "qwen2"]
)
def test_the_reference_checkpoints_are_read_bit_equal(name):
    opened = open_folder(GOLDENS / name)
    theirs = safetensors.numpy.load_file(GOLDENS / name / "model.safetensors")
    assert "model_type" in opened.config
    assert opened.warnings == ()
    assert opened.tensors.keys() == theirs.keys()
    for tensor, array in theirs.items():
        ours = opened.read(tensor)
        assert (ours.dtype, ours.shape, ours.tobytes()) == (array.dtype, array.shape, array.tobytes())
