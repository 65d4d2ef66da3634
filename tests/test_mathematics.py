"""Whether two answers are the same mathematics, by math-verify in a child that can be killed."""

import subprocess
import threading

import pytest

from rzoo.core import RzooError
from rzoo.evals import mathematics
from rzoo.evals.mathematics import equal


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("18", "18"),
        ("18", " $18$. "),
        ("18", "**18**"),
        ("18", r"\(18\)."),
        (r"\left(1, 2\right)", "(1,2)"),
        (r"\frac{1}{2}", r"\frac{1} {2}"),
    ],
)
def test_answers_that_are_written_alike_need_no_mathematics(gold, answer, monkeypatch):
    monkeypatch.setattr(mathematics, "_comparer", None)
    assert equal(gold, answer) is True


@pytest.mark.parametrize("answer", [None, "", " ", "$$"])
def test_no_answer_is_wrong(answer):
    assert equal("18", answer) is False


@pytest.mark.parametrize(
    "answer",
    [
        "5^{5^{5^5}}",
        "9999^{9999^{9999}}",
        "2^{1000000}",
        "10**10**10",
        "1000000!",
        "9" * 300,
        "(" * 50 + "1" + ")" * 50,
        "1+" * 2000 + "1",
    ],
)
@pytest.mark.report("I19")
def test_what_would_keep_sympy_busy_for_ever_is_not_compared(answer, monkeypatch):
    monkeypatch.setattr(mathematics, "_comparer", None)
    assert equal("3", answer) is None


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("1/2", "0.5", True),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True),
        (r"(3, \frac{\pi}{2})", r"(3,\pi/2)", True),
        ("p-q", "-q+p", True),
        ("2^{100}", "1267650600228229401496703205376", True),
        ("[0,1]", "(0,1)", False),
        ("3, 5", "5, 3", True),
        ("3, 5", "3", False),
        ("3", "3, 5", False),
        ("0.5", r"50\%", True),
        ("5", "x=5", True),
        ("1 2", "12", False),
        ("18", "17", False),
        ("18", r"\frac{", False),
        ("A", "no idea", False),
    ],
)
@pytest.mark.extras
@pytest.mark.report("I18")
def test_equality_is_that_of_mathematics(gold, answer, same):
    assert equal(gold, answer, seconds=60.0) is same


@pytest.mark.extras
@pytest.mark.report("I19")
def test_a_child_that_hangs_is_killed_and_the_next_one_answers(monkeypatch):
    assert equal("1/2", "0.5", seconds=60.0)
    child = mathematics._comparer._child
    monkeypatch.setattr(mathematics, "ENDLESS", mathematics.re.compile("(?!)"))
    assert equal("3", "9999^{9999^{9999}}", seconds=0.3) is None
    assert isinstance(child, subprocess.Popen) and child.poll() is not None
    assert equal("1/2", "0.5", seconds=60.0)


@pytest.mark.extras
def test_threads_get_their_own_results():
    results = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: equal(f"{i}/2", f"{2 * i}/4", seconds=60.0)}))
        for i in (1, 3, 5, 7)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys((1, 3, 5, 7), True)


def test_without_math_verify_the_error_names_the_pip_line(monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("import sys\nsys.modules['math_verify'] = None\n" + mathematics.WORKER.read_text())
    monkeypatch.setattr(mathematics, "WORKER", worker)
    monkeypatch.setattr(mathematics, "_comparer", mathematics._Comparer())
    with pytest.raises(RzooError, match=r"pip install 'rzoo\[evals\]'"):
        equal("1/2", "0.5")
