"""`rzoo tune` as people run it: options that abort a process, a kill, Ctrl-C, pictures."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rzoo.compile.autotune import Candidate, Search
from rzoo.compile.record import Choice, Record, draw
from rzoo.compile.report import plot
from rzoo.compile.workload import Case
from rzoo.core import RzooError
from tests.goldens import GOLDEN
from tests.test_every_model import tiny

TUNE = (sys.executable, "-m", "rzoo", "tune", str(GOLDEN / "llama_tied"), "--batch", "1", "--budget", "100")
TIMES = {"ratio": 1.2, "low": 1.1, "high": 1.3, "word": "win"}


def started(folder, *more):
    """The command, with its records in `folder`, and its lines."""
    settings = os.environ | {"RZOO_CACHE": str(folder), "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([*TUNE, *more], env=settings, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def tried(folder):
    """Names of the candidates in the only record of `folder`."""
    (path,) = (Path(folder) / "records").glob("*.json")
    return [entry["name"] for entry in json.loads(path.read_text())["candidates"]]


def read_until(process, words, count=1):
    """Reads lines until `count` of them hold `words`; returns all."""
    lines: list[str] = []
    while sum(words in line for line in lines) < count:
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    return lines


def test_a_killed_tuner_goes_on_where_it_was_and_ctrl_c_says_how(tmp_path):
    with started(tmp_path) as first:
        read_until(first, "attend_decode", 2)
        first.kill()
    done = tried(tmp_path)
    assert len(done) >= 2
    with started(tmp_path, "--resume") as second:
        lines = read_until(second, "joined")
        second.send_signal(signal.SIGINT)
        lines += second.communicate()[0].splitlines()
    assert any(f"going on after {len(done)} candidates" in line for line in lines)
    assert second.returncode == 130
    assert "--resume goes on" in lines[-1]
    names = tried(tmp_path)
    assert names[: len(done)] == done
    assert len(names) == len(set(names)) > len(done)


def test_a_flag_that_ends_its_process_is_recorded_and_the_search_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("RZOO_CACHE", str(tmp_path))
    running = Search(tiny("llama"), [Case("decode", 1, 2)], time.monotonic() + 600, lambda line: None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")  # XLA ends a process that starts with an unknown one
    option = ("xla_cpu_use_fusion_emitters", False)
    for name in ("first", "second"):
        change = lambda choice: choice.with_entry("options", ("decode 1", (option,)))  # noqa: E731
        running.consider(Candidate(name, change, ("decode 1",), (option,)))
    found = [(entry["result"], entry["why"]) for entry in running.record.candidates]
    assert len(found) == 2
    for result, why in found:
        assert result == "failed"
        assert why.startswith("exit status 1: F") and "xla_no_such_flag" in why


def test_records_and_reports_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    entry = {"name": "stacked", "result": "win", "times": {"decode 1": TIMES}}
    draw(Record({}, Choice(), (entry,)), tmp_path / "record.png")
    counted, measured = {"flops": 1e9, "intensity": 0.5}, {"seconds": 0.1}
    machine = {"read_bytes_per_second": 4e10, "matrix_flops_per_second": 3e11}
    phases = {"decode 1": {"counted": counted, "measured": measured}}
    plot({"model": "tiny from memory", "machine": machine, "phases": phases}, tmp_path / "roofline.png")
    for name in ("record.png", "roofline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_picture_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RzooError, match=r"needs matplotlib, which is not installed\n.*pip install"):
        draw(Record({}), "never.png")
