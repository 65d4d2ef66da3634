"""Hub ids offline: their form, the ways out, and a copy in the local cache."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rzoo.checkpoint.hub import fetch, looks_like_hub_id
from rzoo.checkpoint.huggingface import write_folder
from rzoo.core import RzooError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fetched(tmp_path, before=""):
    """What a new process prints on fetching org/name with an own cache and no network; `before` runs first."""
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
    }
    return subprocess.run([sys.executable, "-c", program], env=env, check=True, capture_output=True, text=True).stdout


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
    assert "HF_HUB_OFFLINE, or bring the folder and pass its path." in said


def test_a_copy_in_the_local_cache_is_found_without_network(tmp_path):
    pytest.importorskip("huggingface_hub")
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    write_folder(repository / "snapshots" / COMMIT, {}, [("a", np.zeros(3))])
    assert fetched(tmp_path).split() == ["folder", str(repository / "snapshots" / COMMIT)]
