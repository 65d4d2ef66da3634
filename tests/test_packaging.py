"""Layout G of the packages: what is built, what a bare checkout sees, what an installed wheel holds."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import rzoo

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("models", "sharding", "compile", "evals")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

IMPORT_EVERYTHING = """
import pkgutil, sys, models, evals, rzoo
assert models.MINE and evals.MINE
for module in pkgutil.walk_packages(rzoo.__path__, "rzoo."):
    if module.name != "rzoo.__main__":
        __import__(module.name)
        print(sys.modules[module.name].__file__)
"""


def run_python(code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run `code` in a new interpreter whose first import folder is `cwd`."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environ, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the sources, so that nothing left in build/ slips into it."""
    pytest.importorskip("setuptools", minversion="77", reason="needs setuptools 77: pip install -e '.[dev]'")
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in ("rzoo", *LINKED):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    built = run_python(f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})", copy)
    assert built.returncode == 0, built.stderr
    return next(out.glob("*.whl"))


def test_every_package_folder_is_built():
    folders = [Path(folder) for folder, _, files in os.walk(ROOT / "rzoo", followlinks=True) if "__init__.py" in files]
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert {f"rzoo.{name}" for name in LINKED} < packages
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages


def test_the_four_folders_are_mapped_into_the_package():
    mapped = {"rzoo": "rzoo"} | {f"rzoo.{name}": name for name in LINKED}
    assert PROJECT["tool"]["setuptools"]["package-dir"] == mapped


@pytest.mark.parametrize("name", LINKED)
def test_git_keeps_a_relative_link_to_the_source_folder(name):
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout: git clone the repository")
    listed = subprocess.run(["git", "ls-files", "-s", f"rzoo/{name}"], cwd=ROOT, capture_output=True, text=True)
    assert listed.stdout.startswith("120000 ")
    assert os.readlink(ROOT / "rzoo" / name) == f"../{name}"


@pytest.mark.parametrize("name", LINKED)
def test_importing_a_source_folder_by_itself_names_the_package_to_import(name):
    refused = run_python(f"import {name}", ROOT)
    assert refused.returncode == 1
    assert f"ImportError: write `import rzoo.{name}`" in refused.stderr


def test_a_wheel_holds_only_rzoo(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    version = PROJECT["project"]["version"]
    assert {name.split("/")[0] for name in names} == {"rzoo", f"rzoo-{version}.dist-info"}
    assert {f"rzoo/{name}/__init__.py" for name in LINKED} < set(names)


def test_an_installed_wheel_imports_beside_a_researchers_own_models_and_evals(wheel, tmp_path):
    site, work = tmp_path / "site", tmp_path / "work"
    zipfile.ZipFile(wheel).extractall(site)
    for name in ("models", "evals"):
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").write_text("MINE = True\n")
    imported = run_python(IMPORT_EVERYTHING, work, PYTHONPATH=str(site))
    assert imported.returncode == 0, imported.stderr
    files = imported.stdout.split()
    assert len(files) > len(LINKED)
    assert all(Path(file).is_relative_to(site / "rzoo") for file in files)


def test_the_version_is_the_same_in_the_project_file_and_in_the_package():
    declared = PROJECT["project"]["version"]
    assert getattr(rzoo, "__version__", declared) == declared
