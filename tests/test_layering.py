"""Imports point down: each package of rzoo imports only from those before it in LAYERS."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("models", "sharding", "compile", "evals")

# "rzoo" is the package's front door, rzoo/__init__.py: it hands out names of any layer, and imports them when asked.
LAYERS = (
    *(
        "core",
        "models",
        "sharding",
        "compile",
        "vocabulary",
        "tokenizer",
        "template",
        "chat",
        "formats",
        "handle",
        "checkpoint",
        "engine",
        "data",
        "evals",
    ),
    *("train", "knowledge", "serve", "rzoo", "catalog", "bench", "cli", "__main__"),
)


def sources() -> dict[str, Path]:
    """Dotted module name → file, for every module of rzoo, each file once."""
    found = {}
    for folder in ("rzoo", *LINKED):
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            if folder == "rzoo" and len(parts) > 2 and parts[1] in LINKED:
                continue  # the same file through its link
            name = ".".join(parts if folder == "rzoo" else ("rzoo", *parts))
            found[name.removesuffix(".__init__")] = file
    return found


def layer(module: str) -> str:
    """The entry of LAYERS that a dotted name below `rzoo` belongs to; the front door where it is none."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "rzoo"


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The dotted names that a statement imports, `from a import b` as "a.b"; a relative import keeps its dots."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return ["." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names]


def violations(module: str, source: str) -> list[str]:
    """What is wrong with the imports of `source`, the text of the dotted name `module`; inside functions, too."""
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    found = [(node, name) for node in statements for name in imported(node)]
    faults = [(node, name, fault(module, name, isinstance(node, ast.ImportFrom))) for node, name in found]
    return [f"{module}:{node.lineno} imports {name}: {words}" for node, name, words in faults if words]


def fault(module: str, name: str, is_from: bool) -> str | None:
    """What is wrong with one import of `name` in `module`, or None."""
    top = name.split(".")[0]
    if name.startswith("."):
        return "write the absolute name"
    if top in LINKED:
        return f"write rzoo.{name}"
    if name == "rzoo.compile" and is_from:
        return "`compile` hides the builtin, name what you need of rzoo.compile"
    if top == "rzoo" and module.startswith("rzoo.") and LAYERS.index(layer(name)) > LAYERS.index(layer(module)):
        return f"{layer(name)} is not below {layer(module)}"
    return None


def test_every_import_points_down():
    assert [line for name, file in sources().items() for line in violations(name, file.read_text())] == []


def test_tests_and_programs_import_by_absolute_names():
    files = [file for folder in ("tests", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")]
    assert [line for file in files for line in violations(file.stem, file.read_text())] == []


def test_every_module_has_a_layer():
    assert [name for name in sources() if name != "rzoo" and layer(name) == "rzoo"] == []


def test_no_module_is_named_as_one_of_the_standard_library():
    names = {part for name in sources() for part in name.split(".")}
    assert names & set(sys.stdlib_module_names) == set()


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("rzoo.models.llama", "from rzoo.compile.quantize import int8", "compile is not below models"),
        ("rzoo.models.llama", "import rzoo.sharding.rules", "sharding is not below models"),
        ("rzoo.models.llama", "from rzoo import sharding", "sharding is not below models"),
        ("rzoo.core", "def late():\n    from rzoo.models import rope", "models is not below core"),
        ("rzoo.engine.generate", "from rzoo import load", "rzoo is not below engine"),
        ("rzoo.checkpoint.gguf", "if TYPE_CHECKING:\n    import rzoo.cli", "cli is not below checkpoint"),
        ("rzoo.models.llama", "from .rope import Rope", "absolute"),
        ("rzoo.models.llama", "from . import rope", "absolute"),
        ("rzoo.cli", "from rzoo import compile", "hides the builtin"),
        ("rzoo.evals.run", "from models.rope import Rope", "write rzoo.models"),
        ("test_rope", "import models", "write rzoo.models"),
    ],
)
def test_a_planted_violation_is_found(module, source, words):
    (line,) = violations(module, source)
    assert words in line


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rzoo.models.llama", "from rzoo.models.rope import Rope\nfrom rzoo.core import RzooError"),
        ("rzoo.engine.generate", "import rzoo.compile.aot\nimport jax"),
        ("rzoo.cli", "import rzoo\nfrom rzoo import load"),
        ("rzoo", "def late():\n    from rzoo.evals.run import evaluate"),
        ("test_cli", "from rzoo.cli import main"),
    ],
)
def test_a_lawful_import_is_left_alone(module, source):
    assert violations(module, source) == []
