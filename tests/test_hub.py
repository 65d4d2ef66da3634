"""Hub ids offline: their form, the ways out, and a copy in the local cache."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from rzoo.checkpoint.hub import fetch, looks_like_hub_id
from rzoo.checkpoint.huggingface import write_folder
from rzoo.core import RzooError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fetched(tmp_path, before="", **environment):
    """What a new process prints on fetching org/name with an own cache, offline unless told; `before` runs first."""
    program = f"""
{before}
from rzoo.checkpoint.hub import fetch
from rzoo.core import RzooError
try:
    print("folder", fetch("org/name"))
except RzooError as error:
    print("refused", error)
"""
    env = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "HF_HOME": str(tmp_path),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1",
    }
    env |= environment
    return subprocess.run([sys.executable, "-c", program], env=env, check=True, capture_output=True, text=True).stdout


def cached(tmp_path):
    """Where huggingface_hub looks for its copy of org/name."""
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


@contextmanager
def a_hub_that_answers(status, error_code):
    """The address of a server on this machine that refuses every request as the hub does, and what it was asked."""
    asked = []

    class Refusal(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(status)
            self.send_header("X-Error-Code", error_code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("text", ["org/name", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "a/b", "A_1/b.c_d-e"])
def test_hub_ids_are_recognised(text):
    assert looks_like_hub_id(text)


NO_IDS = ["", "name", "/org/name", "./name", "../name", "~/name", "a/b/c", "org/", "org/na me", "org/a--b", "org/a..b"]
NO_IDS += ["org/name.git", "folder/model.gguf", "org/name\n", "org\\name", "C:/name", "örg/name", "org/" + "n" * 100]


@pytest.mark.parametrize("text", NO_IDS)
def test_paths_and_other_words_are_no_hub_ids(text):
    assert not looks_like_hub_id(text)
    with pytest.raises(RzooError, match="must have the form org/name"):
        fetch(text)


def test_without_the_package_the_extra_and_the_other_way_out_are_named(tmp_path):
    said = fetched(tmp_path, before="import sys; sys.modules['huggingface_hub'] = None")
    assert said.startswith("refused org/name needs the package huggingface_hub")
    assert "pip install rzoo[hub], or bring the folder and pass its path." in said


def test_out_of_reach_the_cause_and_the_way_out_are_named(tmp_path):
    pytest.importorskip("huggingface_hub")
    said = fetched(tmp_path)
    assert said.startswith("refused org/name is not in the local cache and could not be fetched")
    assert "could not be fetched (HF_HUB_OFFLINE is set)" in said
    assert "HF_HUB_OFFLINE, or bring the folder and pass its path." in said
    unreachable = fetched(tmp_path, HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9")
    cause = unreachable.partition("could not be fetched (")[2].splitlines()[0]
    assert "Error: " in cause and len(cause) <= 123


@pytest.mark.parametrize(
    ("status", "error_code", "words"),
    [
        (403, "GatedRepo", "refused org/name is gated: its owner must grant access first"),
        (401, "RepoNotFound", "refused org/name does not exist, or is private"),
        (404, "RevisionNotFound", "refused org/name does not have that revision"),
        (418, "", "refused org/name is not in the local cache and could not be fetched"),
    ],
)
def test_what_the_hub_refuses_is_told_with_the_way_out(tmp_path, status, error_code, words):
    pytest.importorskip("huggingface_hub")
    with a_hub_that_answers(status, error_code) as (address, _):
        said = fetched(tmp_path, HF_HUB_OFFLINE="0", HF_ENDPOINT=address)
    assert said.startswith(words)
    assert "or bring the folder and pass its path." in said


@pytest.mark.parametrize("complete", [True, False])
def test_the_hub_is_asked_only_where_the_local_copy_is_incomplete(tmp_path, complete):
    pytest.importorskip("huggingface_hub")
    write_folder(cached(tmp_path), {}, [("a", np.zeros(3)), ("b", np.zeros(3))], max_shard_bytes=1)
    if not complete:
        (cached(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with a_hub_that_answers(401, "RepoNotFound") as (address, asked):
        said = fetched(tmp_path, HF_HUB_OFFLINE="0", HF_ENDPOINT=address)
    assert bool(asked) is not complete
    if complete:
        assert said.split() == ["folder", str(cached(tmp_path))]


def test_a_copy_in_the_local_cache_is_found_without_network(tmp_path):
    pytest.importorskip("huggingface_hub")
    write_folder(cached(tmp_path), {}, [("a", np.zeros(3))])
    assert fetched(tmp_path).split() == ["folder", str(cached(tmp_path))]
