"""Which real public bug reports the tests hold: `python -m tests.reports [--json]`, or `make reports`.

Reads the marks in the tests' source and tests/reports.toml; runs nothing.
"""

import ast
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


def marked(source: str) -> set[str]:
    """The ids that the marks `pytest.mark.report("A01", …)` in a module's text name."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    marks = [call for call in calls if ast.unparse(call.func).endswith("mark.report")]
    return {ast.literal_eval(argument) for call in marks for argument in call.args}


def counted() -> dict[str, dict[str, Any]]:
    """By part: ids that are handled, not applicable (with the reason), open. Raises ValueError for contradictions."""
    table = tomllib.loads((TESTS / "reports.toml").read_text())
    known = {part: [part + number for number in numbers.split()] for part, numbers in table["parts"].items()}
    handled = set().union(*(marked(path.read_text()) for path in TESTS.glob("*.py")))
    excused = table["not_applicable"]
    unknown = (handled | excused.keys()) - {one for ids in known.values() for one in ids}
    both = handled & excused.keys()
    if unknown or both:
        raise ValueError(f"unknown reports: {sorted(unknown)}; handled and yet not applicable: {sorted(both)}")
    return {
        part: {
            "handled": [one for one in ids if one in handled],
            "not applicable": {one: excused[one] for one in ids if one in excused},
            "open": [one for one in ids if one not in handled and one not in excused],
        }
        for part, ids in known.items()
    }


def main() -> None:
    """Prints the counts, or all as JSON."""
    found = counted()
    if "--json" in sys.argv[1:]:
        print(json.dumps(found, indent=1))
        return
    print("part  handled  not applicable  open")
    for part, one in found.items():
        total = sum(map(len, one.values()))
        print(f"{part:4} {len(one['handled']):5} of {total:2} {len(one['not applicable']):10} {len(one['open']):9}")


if __name__ == "__main__":
    main()
