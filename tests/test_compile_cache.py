"""The persistent compile cache: the user's own choice stands, and the folder is private."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from rzoo.compile.folders import cache_folder, private_folder
from rzoo.core import RzooError
from tests.goldens import GOLDEN

ROOT = Path(__file__).parent.parent
RUN = """
import sys, jax, rzoo
if len(sys.argv) > 2: jax.config.update("jax_compilation_cache_dir", sys.argv[2])
lm = rzoo.load(sys.argv[1], quiet=True)
lm([[1, 2, 3]])
print(jax.config.values["jax_compilation_cache_dir"])
"""


def run(cache: Path, *chosen: str) -> str:
    """The cache folder in force after a load, in a new process whose rzoo cache is `cache`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    env |= {"PYTHONPATH": str(ROOT), "RZOO_CACHE": str(cache)}
    command = [sys.executable, "-c", RUN, str(GOLDEN / "llama_tied"), *chosen]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_programs_are_kept_in_a_private_folder(tmp_path):
    folder = Path(run(tmp_path / "cache"))
    assert folder == tmp_path / "cache" / "xla"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert any(folder.iterdir())


def test_the_users_folder_stands(tmp_path):
    assert run(tmp_path / "cache", str(tmp_path / "mine")) == str(tmp_path / "mine")
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_others_can_write_is_not_used(tmp_path):
    (tmp_path / "cache" / "xla").mkdir(parents=True)
    (tmp_path / "cache" / "xla").chmod(0o777)
    assert run(tmp_path / "cache") == "None"


@pytest.mark.report("F06")
def test_a_second_process_finds_every_program_that_the_first_kept(tmp_path):
    kept = lambda: {file.name for file in (tmp_path / "cache" / "xla").glob("*-cache")}  # noqa: E731
    run(tmp_path / "cache")
    first = kept()
    run(tmp_path / "cache")
    assert first
    assert kept() == first


@pytest.mark.report("F08")
def test_a_url_for_compiled_programs_leaves_records_local_and_is_refused_for_both(tmp_path, monkeypatch):
    before = jax.config.values["jax_compilation_cache_dir"]
    monkeypatch.setenv("RZOO_CACHE", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
    try:
        assert private_folder("records") == tmp_path / "records"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    monkeypatch.setenv("RZOO_CACHE", "s3://bucket/rzoo")
    with pytest.raises(RzooError, match=r"RZOO_CACHE \(s3://bucket/rzoo\) is a URL"):
        cache_folder()
