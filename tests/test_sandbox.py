"""Generated code runs in a process of its own: whatever it does, the evaluator lives, and says what happened."""

import os
import sys
import textwrap
from pathlib import Path

import pytest

from rzoo.core import RzooError
from rzoo.evals import sandbox
from rzoo.evals.sandbox import Limits, Outcome, namespaces, run_code

SHORT = Limits(seconds=30.0, memory=256 << 20, disk=1 << 20, output=1 << 16)


def run(code: str, **options) -> Outcome:
    """The outcome within short limits."""
    return run_code(textwrap.dedent(code), **{"limits": SHORT, **options})


@pytest.fixture(params=["namespaces", "limits alone"])
def anywhere(request, monkeypatch):
    """As it is here, and as it is where there are no namespaces."""
    if request.param == "limits alone":
        monkeypatch.setattr(sandbox, "namespaces", tuple)
    elif not namespaces():
        pytest.skip("needs user namespaces")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("assert 1 + 1 == 2", "passed"),
        ("assert 1 + 1 == 3", "failed"),
        ("raise KeyboardInterrupt", "failed"),
        ("import os; os._exit(3)", "failed"),
        ("import sys; sys.exit()\nassert False", "exited"),
        ("import os; os._exit(0)\nassert False", "exited"),
        ("import os; os.abort()", "killed"),
        ("input('a number? ')", "failed"),
        ("class E(Exception):\n    def __str__(self): raise SystemExit(0)\nraise E", "failed"),
        ("import sys\nsys.stdout = sys.stderr = None", "passed"),
        ("import os\nos.close(1)", "passed"),
        ("import threading\nthreading.Thread(target=print).start()", "passed"),
        ("import atexit, time\natexit.register(time.sleep, 60)", "passed"),
        ("\ud800", "failed"),
        ("", "passed"),
    ],
)
def test_the_reason_tells_how_code_ended(code, reason):
    outcome = run(code)
    assert (outcome.reason, outcome.passed) == (reason, reason == "passed"), outcome


def test_an_error_names_its_line():
    error = run("x = 1\nassert x == 2, 'no'").error
    assert 'program.py", line 2' in error and "AssertionError: no" in error


def test_a_program_reads_its_input_and_its_output_is_kept():
    for reading in ("input()", "open(0).read().strip()", "__import__('os').read(0, 99).decode().strip()"):
        outcome = run(f"print({reading}[::-1])", stdin="abé\n")
        assert (outcome.output, outcome.reason) == ("éba\n", "passed")


def test_what_code_prints_is_not_taken_for_its_end():
    outcome = run("print('passed')\nprint('\\n0123 passed')\nassert False")
    assert outcome.reason == "failed" and "0123 passed" in outcome.output


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)"])
@pytest.mark.report("I31")
def test_code_without_end_is_ended(code):
    outcome = run(code, limits=Limits(seconds=0.5, memory=SHORT.memory))
    assert outcome.reason == "timeout", outcome


@pytest.mark.report("I32")
def test_the_limits_given_are_those_that_hold():
    code = """
        import resource
        for name in "CPU", "AS", "FSIZE", "NOFILE":
            print(name, *resource.getrlimit(getattr(resource, "RLIMIT_" + name)))
    """
    limits = Limits(seconds=29.5, memory=300 << 20, disk=3 << 20, files=32)
    lines = run(code, limits=limits).output.split("\n")
    assert lines[:4] == ["CPU 30 30", f"AS {300 << 20} {300 << 20}", f"FSIZE {3 << 20} {3 << 20}", "NOFILE 32 32"]


@pytest.mark.report("I33")
def test_code_that_eats_memory_is_stopped():
    assert run("held = []\nwhile True: held.append(bytearray(1 << 24))").reason == "memory"


@pytest.mark.report("I33")
def test_code_that_eats_disk_is_stopped():
    outcome = run("with open('endless', 'wb') as file:\n    while True: file.write(bytes(1 << 16))")
    assert outcome.reason == "failed" and "OSError" in outcome.error


def test_many_files_together_eat_no_more():
    if "--mount" not in namespaces():
        pytest.skip("needs mount namespaces")
    outcome = run("for i in range(9): open(str(i), 'wb').write(bytes(1 << 18))")
    assert "No space left" in outcome.error


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_code_that_prints_without_end_is_stopped(stream):
    outcome = run(f"import sys\nwhile True: print('x' * 1000, file=sys.{stream})")
    assert outcome.reason == "output" and len(outcome.output) + len(outcome.error) <= SHORT.output + 4096


@pytest.mark.parametrize(
    "code",
    [
        "while True: os.fork()",
        "import subprocess; subprocess.run(['sleep', '60'])",
        "os.posix_spawn('/bin/sleep', ['sleep', '60'], {})",
        "while True: os.setsid(); os.fork()",
    ],
)
@pytest.mark.report("I33")
def test_code_that_forks_makes_no_process(anywhere, code):
    outcome = run(f"import os\n{code}")
    assert outcome.reason == "failed" and "not permitted" in outcome.error, outcome


@pytest.mark.parametrize("victim", ["os.getppid()", "-1", str(os.getpid())], ids=["parent", "all", "tester"])
def test_code_that_kills_its_parent_kills_nobody(anywhere, victim):
    outcome = run(f"import os, signal\nos.kill({victim}, signal.SIGKILL)")
    assert outcome.reason == "failed" and "Error" in outcome.error


@pytest.mark.report("I34")
def test_code_that_climbs_out_of_its_objects_finds_no_process_no_network_and_no_secret(anywhere, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = """
        import os, socket
        print(sorted(os.environ))
        kinds = [kind for kind in ().__class__.__base__.__subclasses__() if kind.__name__ == "_wrap_close"]
        for attempt in (
            lambda: kinds[0].__init__.__globals__["system"]("true") and 1 / 0,
            lambda: socket.socket(),
        ):
            try:
                print(attempt())
            except (OSError, ZeroDivisionError) as error:
                print("no", type(error).__name__)
    """
    output = run(code).output
    assert output.count("no ") == 2 and "HF_TOKEN" not in output


def test_no_file_outside_of_the_folder_can_be_changed(tmp_path):
    if "--mount" not in namespaces():
        pytest.skip("needs mount namespaces")
    kept = tmp_path / "kept"
    kept.write_text("mine")
    outcome = run(f"open('own', 'w').write('x')\nopen({str(kept)!r}, 'w')")
    assert "Read-only file system" in outcome.error and "mounts" in outcome.guards
    assert kept.read_text() == "mine"


def test_the_folder_is_new_and_nothing_of_it_stays():
    folder = run("import os\nopen('left', 'w').write('x')\nprint(os.getcwd(), os.listdir())").output
    assert folder.split()[1] == "['left']"
    assert not Path(folder.split()[0]).exists()


def test_a_command_of_the_users_runs_the_code():
    command = ["env", f"PATH={Path(sys.executable).parent}", "MARK=mine"]
    outcome = run("import os\nprint(os.environ['MARK'])", command=command)
    assert (outcome.output, outcome.reason) == ("mine\n", "passed")
    assert run("while True: pass", command=command, limits=Limits(seconds=0.5)).reason == "timeout"


@pytest.mark.parametrize(
    ("command", "words"),
    [(["no-such-program"], "can't be started"), (["sh", "-c", "echo no image >&2; exit 1"], "no image")],
)
def test_a_command_that_starts_no_python_is_an_error_and_no_wrong_answer(command, words):
    with pytest.raises(RzooError, match=words):
        run("pass", command=command)
