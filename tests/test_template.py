"""Jinja templates within bounds: what honest ones write, and what hostile ones may not do."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rzoo.core import RzooError
from rzoo.template import MAX_SOURCE, render_template


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in ms %}\n{{ m.a }},\n  {% endfor %}\nend", "1,\n2,\nend"),
        ("{{ 'a' ~ 1 ~ none }}{{ [1, 'x'] }}{{ (1,) }}{{ {'k': 2} }}", "a1None[1, 'x'](1,){'k': 2}"),
        ("{% for i in range(9) if i % 2 %}{% if i > 6 %}{% break %}{% endif %}{{ i }}{% endfor %}", "135"),
        ("{% for i in range(3) %}{{ loop.index }}{{ loop.cycle('a', 'b') }}{{ loop.last }} {% endfor %}", None),
        ("{% set ns = namespace(n=0) %}{% for m in ms %}{% set ns.n = ns.n + m.a %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro hi(x, y='!') %}hi {{ x }}{{ y }}{% endmacro %}{{ hi('you') }}{{ hi('z', y='?') }}", "hi you!hi z?"),
        ("{% set x %}a{{ 1 }}b{% endset %}{{ x * 2 }}{% filter upper %}c{% endfilter %}", "a1ba1bC"),
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}'),
        ("{{ [1, {'a': 2}] | tojson(indent=2) }}", '[\n  1,\n  {\n    "a": 2\n  }\n]'),
        ("{{ ms | map(attribute='a') | join('-') }}{{ ms | join(',', attribute='a') }}", "1-21,2"),
        ("{{ ms | selectattr('a', 'equalto', 2) | list | length }}{{ ms[::-1][0].a }}{{ ms[0]['a'] }}", "121"),
        ("{{ ' x'.strip().upper() + 'a-b'.split('-')[-1] + 'aa'.replace('a', 'c') + '-'.join(['p', 'q']) }}", None),
        ("{{ 'a\nb' | indent(2) }}{{ 'aba' | replace('a', 'x') }}{{ ' t ' | trim }}", "a\n  bxbxt"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'a': 1}.get('b', 7) }}", "a17"),
        ("{{ 2 ** 10 }}{{ 7 // 2 }}{{ '%s-%d' % ('a', 3) }}{{ missing }}{{ missing is defined }}", "10243a-3False"),
        ("{% generation %}g{{ 1 }}{% endgeneration %}{% set a, b = 1, 2 %}{{ a + b }}", "g13"),
        ("{{ strftime_now('%Y') | length }}{{ dict(a=1).a }}{{ 'x' if true else 'y' }}", "41x"),
    ],
)
def test_honest_templates_write_what_plain_jinja_writes(source: str, text: str | None) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    context = {"ms": [{"a": 1}, {"a": 2}]}
    out = render_template(source, context)
    assert text is None or out == text
    if not re.search("tojson|strftime|generation", source):
        options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
        plain = ImmutableSandboxedEnvironment(**options, extensions=["jinja2.ext.loopcontrols"])
        assert out == plain.from_string(source).render(context)


DOUBLING = (
    "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = GROW %}{% endfor %}{{ ns.x | length }}"
)
BLOCKS = DOUBLING.replace("START", "'a'").replace(
    "{% set ns.x = GROW", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y"
)
HUGE = "'a' * 90000"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "range of 1000000000"),
        ("{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}", "steps"),
        ("{% set r = range(99999) %}{% for i in r %}{% for j in r if false %}x{% endfor %}{% endfor %}", "steps"),
        (
            "{% set r = range(99999) | list %}{{ r | map('string') | list }}{% for i in r %}{{ r | sort }}{% endfor %}",
            "",
        ),
        ("{{ 'a' * 10**10 }}", "makes a value of more than"),
        ("{{ 10**10 * [0] }}", "makes a value of more than"),
        ("{{ 9**9**9**9**9 }}", "whole number of more than 4096 bits"),
        ("{{ (2**4000) * (2**4000) }}", "whole number of more than 4096 bits"),
        ("{{ (" + HUGE + ") | int(0, 16) // 3 }}", "whole number of more than 4096 bits"),
        ("{{ 'a'.center(10**10) }}", "calls the method center of str"),
        ("{{ 'a'.ljust(9) }}{{ '{:9}'.format(1) }}", "calls the method ljust of str"),
        ("{{ '{:9999999999}'.format(1) }}", "calls format, which it may not"),
        ("{{ '%9999999999d' % 1 }}", "only plain forms"),
        ("{{ '%*d' % (9999999999, 1) }}", "only plain forms"),
        ("{{ ('%s' * 1000000) % (('a' * 1000000,) * 3) }}", "makes a value of more than"),
        ("{{ 'a' | center(10**10) }}", "No filter named 'center'"),
        ("{{ 'a\n' | indent(10**10) }}", "makes a value of more than"),
        ("{{ [[1]] | tojson(indent=10**9) }}", "tojson for an indent of 1000000000"),
        ("{{ ('a' * 10000).replace('', 'b' * 10000) }}", "makes a value of more than"),
        ("{{ ('a' * 10000) | replace('', 'b' * 10000) }}", "makes a value of more than"),
        ("{{ ('a' * 1000).join(range(1000) | map('string')) }}", "makes a value of more than"),
        ("{{ range(1000) | join('a' * 1000) }}", "makes a value of more than"),
        ("{{ (" + HUGE + ").rfind('b' + 'a' * 40000) }}", "searches for or strips"),
        ("{{ (" + HUGE + ") | trim('b' * 40000) }}", "searches for or strips"),
        (DOUBLING.replace("START", "'a'").replace("GROW", "ns.x + ns.x"), "makes a value of more than"),
        (DOUBLING.replace("START", "'a'").replace("GROW", "ns.x ~ ns.x"), "makes a value of more than"),
        (DOUBLING.replace("START", "[1]").replace("GROW", "[ns.x, ns.x]"), "makes a value of more than"),
        (DOUBLING.replace("START", "[1]").replace("GROW", "(ns.x, ns.x)"), "makes a value of more than"),
        (DOUBLING.replace("START", "{}").replace("GROW", "{'a': ns.x, 'b': ns.x}"), "makes a value of more than"),
        (DOUBLING.replace("START", "{}").replace("GROW", "dict(a=ns.x.items(), b=ns.x.items())"), "makes a value"),
        (DOUBLING.replace("START", "1").replace("GROW", "namespace(a=ns.x, b=ns.x)"), "namespace as a value"),
        ("{% set ns = namespace() %}{% set ns.me = ns %}{{ ns }}", "namespace as a value"),
        (BLOCKS, "makes a value of more than"),
        (
            "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{{ " + "m(" * 40 + "'a'" + ")" * 40 + " }}",
            "value of more than",
        ),
        ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "fails: RecursionError"),
        ("{% for i in range(99999) %}" + "long text " * 1000 + "{% endfor %}", "writes more than"),
        ("{% set x %}{% for i in range(99999) %}" + "long text " * 1000 + "{% endfor %}{% endset %}", "in all"),
        (
            "{% set x = [" + HUGE + "] %}{% for i in range(99) %}{% set y = x[0] ~ i %}{% endfor %}",
            "in all",
        ),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ ms.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ ms() }}", "calls list, which it may not"),
        ("{{ range.__globals__.x }}{{ range.__self__ }}", "unsafe"),
        ("{{ strftime_now('%Y' * 99) }}", "form of 198 characters"),
        ("{% include '/etc/passwd' %}", "fails: "),
        ("{{ lipsum(10**9) }}{{ cycler }}", "'lipsum' is undefined"),
        ("{{ raise_exception('roles must alternate') }}", "says: roles must alternate"),
        ("{{ missing.a.b }}", "'missing' is undefined"),
        ("a\n{% if %}", "says: Expected an expression.*line 2"),
        ("{{ " + "(" * 50_000, "fails: RecursionError"),
        ("{{ 1" + "+1" * 50_000 + " }}", "fails: RecursionError"),
        ("{{ " + "9" * 50_000 + " }}", "fails: ValueError"),
        ("{{ 1 / 0 }}", "fails: ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "fails: TypeError"),
        ("x" * (MAX_SOURCE + 1), f"has {MAX_SOURCE + 1} characters"),
    ],
)
def test_a_hostile_or_broken_template_is_refused_in_words(
    source: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under smaller bounds than the real ones, for the sake of time."""
    for name, bound in {"MAX_STEPS": 10_000, "MAX_VALUE": 100_000, "MAX_TOTAL": 2_000_000}.items():
        monkeypatch.setattr(f"rzoo.template.{name}", bound)
    with pytest.raises(RzooError, match=f"the chat template .*{words}") as caught:
        render_template(source, {"ms": [1]})
    assert caught.value.field == "template"


def test_a_template_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rzoo.template.MAX_SECONDS", -1.0)
    with pytest.raises(RzooError, match=r"takes longer than -1.0 seconds"):
        render_template("{% for i in range(2) %}{% endfor %}", {})


def test_each_rendering_has_bounds_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rzoo.template.MAX_STEPS", 130)
    for _ in range(9):
        assert len(render_template("{% for i in range(60) %}{{ 'ab' }}{% endfor %}", {})) == 120
