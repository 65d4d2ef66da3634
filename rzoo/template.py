"""Jinja templates from untrusted files, run within bounds.

Jinja's sandbox keeps a template away from Python; what it leaves open is time and memory. Here every text, list and
loop that a template makes is counted. The template's syntax tree is changed before it is compiled, so that each turn
of a loop, each literal list, each `~` and each piece of output reports to the environment; operators, calls and
filters report through the sandbox's own hooks. Filters and methods that can make much out of little (center, format,
ljust) do not exist here, and those that templates need (replace, join, indent, `*`) are measured before they run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, ValuesView
from datetime import datetime
from functools import lru_cache, wraps
from types import CodeType
from typing import Any

from jinja2 import Template, TemplateError, Undefined, filters, nodes, pass_context, pass_environment
from jinja2.ext import Extension, LoopControlExtension
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from rzoo.core import RzooError

MAX_SOURCE = 256 << 10  # characters of a template
MAX_VALUE = 4 << 20  # weight of one value, and characters of the output
MAX_TOTAL = 64 << 20  # weight of all values that one rendering makes
MAX_RANGE = 100_000
MAX_STEPS = 1_000_000  # turns of loops, operators, calls and filters
MAX_SECONDS = 5.0
MAX_BITS = 4096  # of a whole number
MAX_NEEDLE = 256  # characters of what is searched backwards or stripped, which Python does one by one
ITEM = 8  # weight of a place in a list, in characters

_TEXT_METHODS = """
    capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace istitle
    isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
    splitlines startswith strip swapcase title upper
"""
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    dict: frozenset(["get", "items", "keys", "values"]),
    list: frozenset(["count", "index"]),
    tuple: frozenset(["count", "index"]),
}
_SLOW_METHODS = frozenset(["lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"])
_FILTERS = """
    abs capitalize count d default dictsort e escape first float int items last length list lower map max min reject
    rejectattr reverse safe select selectattr sort string title unique upper
"""  # Jinja's own; the others that exist here are below


def render_template(source: str, context: dict[str, Any]) -> str:
    """What the Jinja template `source` makes of `context`, which holds JSON data.

    Raises RzooError when the template is broken, calls raise_exception, uses what is not there, or passes a bound.
    """
    if len(source) > MAX_SOURCE:
        raise _refused(f"has {len(source)} characters; {MAX_SOURCE} are allowed", len(source))
    try:
        environment = _Environment()
        template = Template.from_code(environment, _compiled(source), environment.globals)
        pieces = []
        for piece in template.generate(context):
            pieces.append(piece)
            environment.count_output(len(piece))
        return "".join(pieces)
    except RzooError:
        raise
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise RzooError(
            f"the chat template says: {error.message}{f' (line {line})' if line else ''}", field="template"
        ) from error
    except Exception as error:  # whatever a program of strangers can run into
        raise RzooError(f"the chat template fails: {type(error).__name__}: {error}", field="template") from error


@lru_cache(maxsize=16)
def _compiled(source: str) -> CodeType:
    environment = _Environment()
    tree = _Reporting().visit(environment.parse(source))
    tree.set_environment(environment)
    return environment.compile(tree)


def _refused(words: str, value: Any = None) -> RzooError:
    return RzooError(f"the chat template {words}", field="template", value=value)


class _Reporting(NodeTransformer):
    """Makes a template report what the sandbox has no hook for."""

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:  # noqa: N802
        """Literal text as an expression, since expressions are counted when they are written."""
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _report("concatenated", node.nodes, node.lineno)

    def visit_List(self, node: nodes.Expr) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _report("built", [node], node.lineno)

    visit_Dict = visit_List  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        return self.visit_List(node) if node.ctx == "load" else node

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        """Each turn of a loop, those that its condition leaves out too."""
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_report("turned", [], node.lineno), node.test, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_report("turned", [], node.lineno), lineno=node.lineno))
        return node


def _report(method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    target = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(target, arguments, [], None, None, lineno=line)


class _Generation(Extension):
    """{% generation %} … {% endgeneration %}, a mark for training that changes no text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _written(context: Any, value: Any) -> str:
    """A value as it is written to the output or into a block. Taking the context, it is never run while compiling."""
    return context.environment.written(value)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of one rendering, which counts what it makes."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        extensions = [LoopControlExtension, _Generation]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions, finalize=_written
        )
        own: dict[str, Callable[..., Any]] = {
            "join": _join,
            "replace": _replace,
            "indent": _indent,
            "tojson": _tojson,
            "trim": _trim,
        }
        allowed = {name: filters.FILTERS[name] for name in _FILTERS.split()}
        self.filters = {name: self._counted(function) for name, function in {**allowed, **own}.items()}
        self.globals = {
            "range": self._range,
            "dict": dict,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self._steps = self._total = self._output = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _refused(f"takes more than {MAX_STEPS} steps", MAX_STEPS)
        if time.monotonic() > self._deadline:
            raise _refused(f"takes longer than {MAX_SECONDS} seconds", MAX_SECONDS)

    def fit(self, weight: int) -> None:
        """Refuse a value of `weight` before it is made."""
        if weight > MAX_VALUE:
            raise _refused(f"makes a value of more than {MAX_VALUE} characters", weight)

    def made(self, value: Any) -> Any:
        """`value`, which the template made, after counting it."""
        if not isinstance(value, Namespace):
            self._total += _weight(value)
            if self._total > MAX_TOTAL:
                raise _refused(f"makes more than {MAX_TOTAL} characters in all", self._total)
        return value

    def count_output(self, characters: int) -> None:
        self._output += characters
        if self._output > MAX_VALUE:
            raise _refused(f"writes more than {MAX_VALUE} characters", self._output)

    def turned(self) -> bool:
        self.step()
        return True

    def built(self, value: Any) -> Any:
        self.step()
        return self.made(value)

    def written(self, value: Any) -> str:
        _weight(value)
        return self.built(value if isinstance(value, str) else str(value))

    def concatenated(self, *values: Any) -> str:
        return self.built("".join([self.written(value) for value in values]))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if owner is self and obj != self._range:
            return obj(*args)
        self.step()
        kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
        if kind is not None:
            args = self._method_arguments(kind, owner, obj.__name__, args)
        elif not (
            isinstance(obj, Macro | LoopContext | BlockReference | Undefined)
            or isinstance(owner, LoopContext)
            or obj in self.globals.values()
        ):
            raise _refused(f"calls {getattr(obj, '__name__', type(obj).__name__)}, which it may not")
        return self.made(super().call(context, obj, *args, **kwargs))

    def _method_arguments(self, kind: type, owner: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments for the method `name` of text, list or dict, once its result is known to fit."""
        if name not in _METHODS[kind]:
            raise _refused(f"calls the method {name} of {kind.__name__}, which it may not", name)
        if name == "join" and args:
            items = list(args[0])
            self.fit(len(owner) * len(items) + _weight(items))
            return (items, *args[1:])
        if name == "replace" and len(args) > 1:
            self.fit(len(owner) + owner.count(args[0]) * (len(args[1]) - len(args[0])))
        if name in _SLOW_METHODS and args:
            _check_needle(args[0])
        return args

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.step()
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            _check_bits(abs(right) * max(1, left.bit_length()) if _whole(left) and _whole(right) else 0)
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        return self.made(super().call_binop(context, operator, left, right))

    def _check_product(self, left: Any, right: Any) -> None:
        if _whole(left) and _whole(right):
            _check_bits(left.bit_length() + right.bit_length())
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and _whole(times):
                self.fit(_weight(sequence) * times)

    def _check_format(self, form: str, values: Any) -> None:
        """Widths such as %999d are refused; plain %s and %d make no more than all values at each."""
        if any(not part[:1].isalpha() for part in form.replace("%%", "").split("%")[1:]):
            raise _refused(f"formats with {form[:40]!r}: only plain forms such as %s are allowed")
        self.fit(len(form) + form.count("%") * (_weight(values) + 32))

    def _range(self, *bounds: int) -> range:
        made = range(*bounds)
        if len(made) > MAX_RANGE:
            raise _refused(f"asks for a range of {len(made)}; {MAX_RANGE} are allowed", len(made))
        return made

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.step()
            for value in (*args, *kwargs.values()):
                _weight(value)
            return self.made(function(*args, **kwargs))

        return counted


def _whole(value: Any) -> bool:
    return isinstance(value, int)


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise _refused(f"makes a whole number of more than {MAX_BITS} bits", bits)


def _check_needle(text: str | None) -> None:
    if text is not None and len(text) > MAX_NEEDLE:
        raise _refused(f"searches for or strips {len(text)} characters; {MAX_NEEDLE} are allowed", len(text))


def _weight(value: Any) -> int:
    """The size of JSON data in characters, things that are in it twice counted twice; refuses what passes MAX_VALUE.

    A namespace could hold itself, or itself twice over, and so is refused where it would be written out.
    """
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Namespace):
            raise _refused("uses a namespace as a value")
        if isinstance(item, int):
            _check_bits(item.bit_length())
        elif isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            total += 2 * ITEM * len(item)
            waiting += [*item.keys(), *item.values()] if total <= MAX_VALUE else []
        elif isinstance(item, list | tuple | KeysView | ValuesView | ItemsView):
            total += ITEM * len(item)
            waiting += item if total <= MAX_VALUE else []
        if total > MAX_VALUE:
            raise _refused(f"makes a value of more than {MAX_VALUE} characters", total)
    return total


@pass_environment
def _join(environment: _Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's filter `join`."""
    items = value if attribute is None else map(filters.make_attrgetter(environment, attribute), value)
    texts = [environment.written(item) for item in items]
    environment.fit(len(str(d)) * len(texts) + _weight(texts))
    return str(d).join(texts)


@pass_environment
def _replace(environment: _Environment, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    """Jinja's filter `replace`."""
    text, old, new = str(s), str(old), str(new)
    environment.fit(len(text) + text.count(old) * (len(new) - len(old)))
    return text.replace(old, new, -1 if count is None else count)


@pass_environment
def _indent(environment: _Environment, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's filter `indent`."""
    text = str(s)
    environment.fit(len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else width))
    return filters.do_indent(text, width, first, blank)


@pass_environment
def _tojson(
    environment: _Environment,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: no HTML escapes, other scripts as they are."""
    if indent is not None and not 0 <= indent <= 16:
        raise _refused(f"asks tojson for an indent of {indent}; 0 to 16 are allowed", indent)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    pieces, size = [], 0
    for piece in encoder.iterencode(value):
        pieces.append(piece)
        size += len(piece)
        environment.fit(size)
    return "".join(pieces)


def _trim(value: Any, chars: str | None = None) -> str:
    """Jinja's filter `trim`."""
    _check_needle(chars)
    return str(value).strip(chars)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 100:
        raise _refused(f"asks for the time in a form of {len(form)} characters; 100 are allowed", len(form))
    return datetime.now().strftime(form)
