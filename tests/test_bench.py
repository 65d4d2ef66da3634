"""`rzoo bench`: the conversation with child processes, what goes wrong in them, and the arithmetic of ratios."""

import json
import os
import subprocess
import sys

import pytest

from rzoo.bench import compare
from rzoo.bench.cases import CASES, PROMPT
from rzoo.bench.peers import PACKAGES
from rzoo.bench.turns import Child, ChildFailed
from rzoo.core import RzooError
from tests.goldens import GOLDEN

SQUARES, BROKEN = "tests.bench_engines:Squares", "tests.bench_engines:Broken"
LIMIT = 30.0


def ended(child: Child) -> bool:
    return child._process.poll() is not None


def answers(*seconds: float, **more) -> list[dict]:
    return [{"seconds": s, **more} for s in seconds]


def test_a_child_is_asked_turn_by_turn_and_gone_after_the_block():
    with Child(SQUARES, threads=1, limit=4) as child:
        about = child.ready(LIMIT)
        said = [child.run(case, LIMIT) for case in ("read", "again")]
        assert not ended(child)
    assert about["threads"] == about["cores"] == 1
    assert (about["OMP_NUM_THREADS"], about["OMP_WAIT_POLICY"]) == ("1", "passive")
    assert said == [{"case": case, "seconds": 1.0, "bytes": 14} for case in ("read", "again")]
    assert ended(child)


def test_a_child_is_gone_after_an_interrupt():
    with pytest.raises(KeyboardInterrupt), Child(SQUARES, threads=1) as child:
        child.ready(LIMIT)
        raise KeyboardInterrupt
    assert ended(child)


def test_a_crash_is_told_in_its_own_last_words_and_again_when_asked_again():
    with Child(BROKEN, threads=1) as child:
        child.ready(LIMIT)
        for _ in range(2):
            with pytest.raises(ChildFailed, match=r"^ValueError: the weights are upside down$"):
                child.run("crash", LIMIT)


def test_a_child_that_ends_without_an_exception_is_told_by_its_signal():
    with Child(BROKEN, threads=1) as child:
        child.ready(LIMIT)
        with pytest.raises(ChildFailed, match=r"\(ended by SIGABRT\)$"):
            child.run("abort", LIMIT)


def test_a_child_that_cannot_start_says_why():
    with Child("tests.bench_engines:Unloadable", threads=1) as child, pytest.raises(ChildFailed, match="no such model"):
        child.ready(LIMIT)


def test_a_child_that_never_answers_is_ended_at_its_time_limit():
    with Child(BROKEN, threads=1) as child:
        child.ready(LIMIT)
        with pytest.raises(ChildFailed, match=r"no answer within 0.2 s \(wait\)"):
            child.run("wait", 0.2)
        child._process.wait(LIMIT)


def test_the_bandwidth_engine_reads_a_small_array():
    with Child("rzoo.bench.bandwidth:Bandwidth", threads=2, megabytes=4) as child:
        about, answer = child.ready(LIMIT), child.run("read", LIMIT)
    assert {"numpy", "jax"} <= set(about["ways"])
    assert answer["way"] in about["ways"]
    assert 3_900_000 < answer["bytes"] == about["bytes"] <= 4_000_000
    # No machine reads a terabyte per second through two threads: a way that skips the work would show here.
    assert 1e6 < compare.speed("read", answer) < 1e12


def test_every_way_to_read_reads_the_whole_array():
    import numpy as np

    from rzoo.bench.bandwidth import ways

    array = np.random.default_rng(0).random((64, 4096), np.float32)
    for name, way in ways(array, 2).items():
        total = np.sum([np.sum(part) for part in way()])
        np.testing.assert_allclose(total, array.sum(), rtol=1e-4, err_msg=name)


def test_a_crew_goes_on_without_the_engine_that_fails(monkeypatch):
    monkeypatch.setattr(compare, "ANSWER_SECONDS", 0.2)
    lines: list[str] = []
    with compare.Crew() as crew:
        crew.hire("good", SQUARES, {"limit": 2000}, 1, lines.append)
        crew.hire("stuck", BROKEN, {}, 1, lines.append)
        crew.hire("absent", SQUARES, "not installed", 1, lines.append)
        for number in range(2):
            crew.play(number, 2, lines.append)
    assert crew.failures == {"stuck": "no answer within 0.2 s (read)", "absent": "not installed"}
    total = sum(i * i for i in range(2000))
    assert crew.results == {"good": {"read": 2 * answers(1.0, case="read", bytes=total)}}
    assert [line for line in lines if "2/2" in line] == [f"round 2/2: good read {total / 1e9:.1f} GB/s"]


def test_ratios_are_taken_within_a_round_and_reported_as_medians():
    # The machine slows down threefold in round 2 and rzoo stays twice as fast: the ratio does not move.
    abouts: dict[str, dict] = {
        "rzoo": {"weight_bytes": 10**9},
        "transformers": {"variants": {"decode_b1": "sdpa + static"}},
    }
    results = {
        "rzoo": {
            "decode_b1": answers(1, 3, 1, tokens=[[1, 2]]),
            "stream_b1": answers(1, 4, 2),
            "prefill512": answers(4, 4, 5),
        },
        "transformers": {"decode_b1": answers(2, 6, 2, tokens=[[1, 2]]), "prefill512": answers(2, 3, 5)},
        "bandwidth": {"read": answers(0.5, 1.5, 0.5, bytes=48 * 10**9)},
    }
    found = compare.summary(abouts, results)
    new = CASES["decode_b1"].new
    assert found["ratios"] == {
        "decode_b1_vs_transformers_f32": pytest.approx(2),
        "decode_b1_vs_llama_cpp": None,
        "decode_b8_vs_transformers_f32": None,
        "decode_b32_vs_transformers_f32": None,
        "stream_b1_vs_decode_b1": pytest.approx(3 / 4),
        "decode_b8_vs_decode_b1": None,
        "decode_b32_vs_decode_b1": None,
        "prefill512_vs_transformers_f32": pytest.approx(3 / 4),
        "decode_b1_share_of_bandwidth": pytest.approx(new * 1e9 / (96 * 1e9)),
    }
    assert found["spread"]["ratios"]["decode_b1_vs_transformers_f32"] == pytest.approx(0)
    assert found["spread"]["ratios"]["prefill512_vs_transformers_f32"] == pytest.approx((1 - 1 / 2) / (3 / 4))
    assert found["spread"]["rzoo"]["decode_b1"] == pytest.approx(2 / 3)
    assert found["medians"]["rzoo"]["decode_b1"] == pytest.approx(new)
    assert found["medians"]["bandwidth"]["read"] == pytest.approx(96e9)
    assert found["tokens_equal"] == {"decode_b1": True, "decode_b8": None, "decode_b32": None}
    assert found["variants"] == {"transformers": {"decode_b1": "sdpa + static"}}


def test_one_other_token_in_one_round_is_unequal():
    runs = {"rzoo": {"decode_b1": answers(1, 1, tokens=[[1, 2]])}}
    runs["transformers"] = {"decode_b1": [*answers(1, tokens=[[1, 2]]), *answers(1, tokens=[[1, 3]])]}
    assert compare.summary({}, runs)["tokens_equal"]["decode_b1"] is False


def test_missing_peers_are_null_and_the_result_is_json(monkeypatch):
    peers = ("transformers", "llama.cpp")
    monkeypatch.setattr(compare, "READ_MEGABYTES", 4)
    for name in peers:
        monkeypatch.setitem(PACKAGES, name, ("a-package-that-nobody-has",))
    result = json.loads(json.dumps(compare.bench(str(GOLDEN / "llama_tied"), engines=peers, rounds=1)))
    assert result["peers"] == {"transformers": None, "llama.cpp": None}
    assert result["failures"] == dict.fromkeys(peers, "not installed")
    assert set(result["ratios"].values()) == {None}
    assert result["medians"]["bandwidth"]["read"] > 0
    assert result["load"]["cores"] == os.cpu_count()
    assert "transformers: not installed" in compare.table(result)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"engines": ["transfomers"]}, "no engine is called 'transfomers'.*did you mean transformers"),
        ({"rounds": 0}, r"rounds \(0\) must be at least 1"),
        ({"threads": 0}, r"threads \(0\) must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(wrong, words):
    with pytest.raises(RzooError, match=f"(?s){words}"):
        compare.bench(**wrong)


def test_the_rows_of_a_batch_differ_and_repeat_the_prompt():
    assert CASES["decode_b1"].ids == [list(PROMPT)]
    rows = CASES["decode_b8"].ids
    assert len({tuple(row) for row in rows}) == 8
    assert all(sorted(row) == sorted(PROMPT) for row in rows)
    assert CASES["prefill512"].ids[0][: 2 * len(PROMPT)] == list(PROMPT) * 2
    assert {name: case.tokens for name, case in CASES.items()} == {
        "decode_b1": 48,
        "decode_b8": 256,
        "decode_b32": 512,
        "prefill512": 512,
    }


def test_a_child_holds_no_library_but_its_engines():
    code = "import sys, rzoo.bench.child, rzoo.bench.peers; print({'jax', 'torch', 'numpy'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
