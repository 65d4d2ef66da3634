"""Compiling for GPUs that are not there: a child process in an environment of its own, and the versions that it needs.

The environment holds jax-cuda12-pjrt of jaxlib's version and NVIDIA's compiler (extra gpu-aot). Where the plugin is
installed JAX prints tracebacks on machines without a GPU, and a bad option aborts the process: so the one that compiles
is never the user's. Nothing heavy is imported here.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rzoo.compile.folders import cache_folder, files_digest
from rzoo.core import RzooError

SETTING = "RZOO_AOT_PYTHON"
PACKAGE = Path(__file__).absolute().parent.parent  # the folder rzoo, in a checkout as where it is installed
PLUGIN, COMPILER = "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"
NEEDED = ("jaxlib", "jax", "flax", "jaxtyping", PLUGIN, COMPILER)
ASK = """
import importlib.metadata as m, json, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""
INSTALL = "rzoo plan --install-aot"
TIME_LIMIT = 900  # seconds of one job


def aot_python() -> Path | None:
    """The interpreter that compiles: $RZOO_AOT_PYTHON ("none": nothing is compiled), else that of .venv-aot in the
    checkout or in rzoo's cache folder, else this one where it has the plugin; None where there is none.

    Raises RzooError where the setting names no file.
    """
    given = os.environ.get(SETTING)
    if given == "none":
        return None
    if given:
        if not Path(given).is_file():
            raise RzooError(f"{SETTING} ({given}) is no interpreter", field=SETTING, value=given, fix=INSTALL)
        return Path(given)
    for folder in (PACKAGE.parent, cache_folder()):
        found = _python_in(folder)
        if found.is_file():
            return found
    return Path(sys.executable) if any(True for _ in metadata.distributions(name=PLUGIN)) else None


def _python_in(folder: Path) -> Path:
    return folder / ".venv-aot" / "bin" / "python"


@lru_cache(maxsize=4)
def versions(python: Path) -> dict[str, str | None]:
    """Version of each package of NEEDED in an interpreter, None for one that it lacks. Raises RzooError where it can't
    run.
    """
    command = [str(python), "-c", ASK, *NEEDED]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return json.loads(ran.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise RzooError(f"{python} can't be run: {error}", field=SETTING, value=str(python), fix=INSTALL) from None


def checked_versions(python: Path) -> dict[str, str | None]:
    """The same, checked."""
    found = versions(python)
    check(python, found)
    return found


def check(python: Path | str, found: Mapping[str, str | None]) -> None:
    """Raises RzooError with the pip line that mends it where a package of NEEDED is missing, or the plugin is not of
    jaxlib's version.
    """
    jaxlib = found["jaxlib"]
    wanted = [name for name in NEEDED if found[name] is None and name != PLUGIN]
    problems = [f"{name} is missing" for name in wanted]
    if jaxlib is None or found[PLUGIN] != jaxlib:
        problems.append(f"{PLUGIN} is {found[PLUGIN] or 'missing'}, jaxlib is {jaxlib or 'missing'}")
        wanted.append(f"{PLUGIN}=={jaxlib}" if jaxlib else PLUGIN)
    if problems:
        line = f"{python} -m pip install {' '.join(sorted(wanted))}"
        raise RzooError(f"{python}: {'; '.join(problems)}", field=SETTING, value=str(python), fix=line)


def compile_for(
    job: Mapping[str, Any], python: Path | None = None, child: Sequence[str] = ("-m", "rzoo.compile.target_programs")
) -> dict[str, Any]:
    """The answer of target_programs.py to a job; child: what else the interpreter is to run with the job's file and the
    answer's. Raises RzooError where there is no environment, for what the job asks wrongly, and where the child ends
    before it answers, with the end of what it said.
    """
    python = python or aot_python()
    if python is None:
        raise RzooError("nothing here compiles for GPUs: the extra gpu-aot is missing", field=SETTING, fix=INSTALL)
    checked_versions(python)
    with tempfile.TemporaryDirectory(prefix="rzoo-") as folder:
        question, answer = Path(folder, "job.json"), Path(folder, "answer.json")
        question.write_text(json.dumps(job))
        Path(folder, "rzoo").symlink_to(PACKAGE)  # alone: what else lies beside it is of this environment
        said = _run([str(python), *child, str(question), str(answer)], folder)
        if not answer.exists():
            raise RzooError(f"the process that compiles ended early:\n{said}", field="gpu", value=job.get("gpu"))
        found = json.loads(answer.read_text())
    if "error" in found:
        raise RzooError(**found["error"])
    return found


def _run(command: list[str], path: str) -> str:
    """Runs the child with `path` on its module path; the last lines of its messages."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    environment.pop("XLA_FLAGS", None)  # of this process: a flag that the plugin lacks would abort the child
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, env=environment)
    except subprocess.TimeoutExpired:
        return f"it took more than {TIME_LIMIT} seconds"
    return "\n".join(ran.stderr.splitlines()[-12:])


def install(progress: Any = print) -> Path:
    """Makes .venv-aot, in the checkout or else in rzoo's cache folder, with what compiling needs; about 1.2 GB. Returns
    its interpreter.

    Raises RzooError where pip can't install it.
    """
    import jaxlib

    python = _python_in(PACKAGE.parent if (PACKAGE.parent / "pyproject.toml").is_file() else cache_folder())
    folder = python.parent.parent
    packages = [f"jax=={jaxlib.__version__}", f"{PLUGIN}=={jaxlib.__version__}", f"{COMPILER}>=12.9,<13"]
    progress(f"making {folder} (1.2 GB, once; some minutes)")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, *packages, "flax", "jaxtyping", "numpy"]):
        if subprocess.run(command).returncode:
            raise RzooError(f"{' '.join(command)} failed", field=SETTING, fix="see what pip says above")
    versions.cache_clear()
    checked_versions(python)
    return python


@lru_cache(maxsize=1)
def source_digest() -> str:
    """Of all source that a plan depends on."""
    folders = [PACKAGE / name for name in ("models", "sharding", "compile")]
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    return files_digest(files)
