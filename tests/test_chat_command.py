"""`rzoo chat` as a person and as a pipe meet it, and one path from messages to ids for all who ask."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rzoo
from rzoo.chat import encode_chat
from rzoo.cli.show import Shown
from rzoo.formats import TEMPLATES
from tests.chat_folder import BOS, EOS, TEMPLATE, write_talker
from tests.goldens import GOLDEN

ROOT = Path(__file__).parent.parent
ONE_DEVICE = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "TERM": "xterm", "COLUMNS": "120"}
PATIENCE = 120  # seconds until a silent terminal fails the test


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model whose context no answer fills while a test looks on."""
    return write_talker(tmp_path_factory.mktemp("chat") / "model", context=65536)


@pytest.fixture(scope="module")
def talker(folder):
    return rzoo.load(str(folder), quiet=True)


class Terminal:
    """A process at the other end of a terminal: what is typed into it, and what it shows."""

    def __init__(self, cache: Path, *arguments: str):
        ours, theirs = pty.openpty()
        # The child takes the terminal as its own, so that Ctrl-C reaches it as a signal.
        start = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        command = [sys.executable, "-c", start, sys.executable, "-m", "rzoo", "chat", *arguments]
        env = {**ONE_DEVICE, "RZOO_CACHE": str(cache)}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process = subprocess.Popen(command, env=env, start_new_session=True, **streams)
        os.close(theirs)
        self._terminal, self._shown = ours, b""

    def until(self, words: str, again: str = "") -> str:
        """What is shown up to `words`, and with them; `again` is typed once more after each second of silence: Python
        forgets a Ctrl-C that comes in the instant before its line editor listens, until the next key.
        """
        mark, end = words.encode(), time.monotonic() + PATIENCE
        while mark not in self._shown:
            ready, _, _ = select.select([self._terminal], [], [], 1.0 if again else end - time.monotonic())
            if not ready and again and time.monotonic() < end:
                self.type(again)
                continue
            assert ready, f"waited for {words!r}, and saw {self._shown[-2000:]!r}"
            self._shown += os.read(self._terminal, 65536)
        before, _, self._shown = self._shown.partition(mark)
        return (before + mark).decode()

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def close(self) -> int:
        """The exit code, once the process has ended."""
        code = self.process.wait(PATIENCE)
        os.close(self._terminal)
        return code


def test_a_person_talks_stops_an_answer_looks_back_and_leaves(folder, tmp_path):
    terminal = Terminal(tmp_path, str(folder), "--max-new-tokens", "60000")
    assert "/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves" in terminal.until("> ")
    terminal.type("hi\n")
    terminal.until("[=A*")  # the answer has begun
    terminal.type("\x03")
    assert "rzoo: stopped; " in terminal.until("(interrupted)")
    terminal.until("> ")
    terminal.type("unfinished\x03")
    terminal.until("rzoo: Ctrl-D or /exit leaves", again="\x03")
    terminal.until("> ")
    terminal.type("\x1b[A")  # the line before
    terminal.until("hi")
    terminal.type(" again\\\n")
    terminal.until(". ")
    terminal.type("second\n")
    terminal.until("\x1b[K")
    terminal.type("\x03")
    terminal.until("(interrupted)")
    terminal.until("> ")
    terminal.type(f"/save {tmp_path / 'talk.json'}\n")
    terminal.until("4 messages are in ")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.close() == 0
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert (messages[0]["content"], messages[2]["content"]) == ("hi", "hi again\nsecond")
    assert messages[1]["content"].startswith("[=A*")
    assert (tmp_path / "chat_history").read_text().splitlines()[0] == "hi"
    assert (tmp_path / "chat_history").stat().st_mode & 0o77 == 0


def piped(folder: Path, lines: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "rzoo", "chat", str(folder), *arguments]
    return subprocess.run(
        command, input=lines, capture_output=True, text=True, env=ONE_DEVICE, check=False, timeout=300
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_reasoning_is_faint_and_what_a_model_writes_cannot_steer_a_terminal(capsys, terminal):
    printer = Shown(terminal, waiting=terminal)
    printer.styled = terminal
    for thought, text in (("why", ""), (" so", "fo\x1b[2Jur\n\t"), ("", ".")):
        printer.push(thought, text)
    printer.finish()
    shown = capsys.readouterr()
    if terminal:
        assert (shown.out, shown.err) == ("\x1b[2mwhy so\n\n\x1b[0mfo\ufffd[2Jur\n\t.\n", "\r\x1b[K")
    else:
        assert (shown.out, shown.err) == ("fo\x1b[2Jur\n\t.\n", "why so\n\n")


def test_a_pipe_gets_answers_alone_and_the_rest_is_said_beside_them(folder, talker, tmp_path):
    saved = tmp_path / "talk.json"
    lines = ["hi", "", "/nothing", "/help", "/think maybe", "/system", "/reset", "//x", '"""a', 'b"""']
    lines += ["/system Brief.", "/reset", f"/save {saved}", f"/save {saved}", "/save /absent/x", "/save", "/exit", "hi"]
    done = piped(folder, "\n".join(lines), "--max-new-tokens", "4")
    assert done.returncode == 0
    first = rzoo.generate(talker, "hi", max_new_tokens=4)
    slash = rzoo.generate(talker, "/x", max_new_tokens=4)
    turns = [{"role": "user", "content": "/x"}, {"role": "assistant", "content": slash.text}]
    last = rzoo.generate(talker, [*turns, {"role": "user", "content": "a\nb"}], max_new_tokens=4)
    assert done.stdout == f"{first.text}\n{slash.text}\n{last.text}\n"
    for words in (
        "/nothing is no command; /help lists them",
        "  /system TEXT    set the system message",
        "/think maybe: say /think on or /think off",
        "there is no system message now",
        "a new conversation, with the same system message",
        f"1 messages are in {saved}",
        f"{saved} exists already; give another name",
        "/absent/x can't be written: No such file or directory",
        "/save FILE: give the name of a new file",
    ):
        assert words in done.stderr
    assert "> " not in done.stdout + done.stderr
    assert json.loads(saved.read_text())["messages"] == [{"role": "system", "content": "Brief."}]


def test_a_full_context_is_said_with_the_way_out(tmp_path):
    small = write_talker(tmp_path / "small", context=64)
    for lines, way in (("x" * 60, "ask something shorter"), ("hi\n" + "x" * 40, "/reset begins a new one")):
        done = piped(small, lines, "--max-new-tokens", "2")
        assert done.returncode == 2
        assert "the conversation would have " in done.stderr and "the model's context is 64" in done.stderr
        assert way in done.stderr
    assert "the context of 64 tokens is full, /reset begins a new conversation" in piped(small, "hi\n").stderr


def test_a_model_that_was_not_made_to_converse_is_refused_before_anything_is_typed(tmp_path):
    base = write_talker(tmp_path / "base", chat_template=None)
    for model, words in ((base, "has no chat template"), (GOLDEN / "qwen2", "has no tokenizer")):
        done = piped(model, "hi\n")
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr and "Traceback" not in done.stderr


def test_a_checkpoint_without_a_template_gets_that_of_its_family(tmp_path):
    lm = rzoo.load(str(write_talker(tmp_path / "chatml", end="<|im_end|>", chat_template=None)), quiet=True)
    assert lm.about.template == TEMPLATES["chatml"]


def test_reasoning_goes_beside_the_answer_and_an_unfinished_thought_is_not_kept(tmp_path):
    template = TEMPLATE.replace("{{ '<think>\n' if think is defined }}", "<think>\n")
    thinker = write_talker(tmp_path / "thinker", chat_template=template)
    done = piped(thinker, "hi\n", "--max-new-tokens", "6")
    assert done.stdout == "\n"
    assert "there is no answer, so this turn is not kept" in done.stderr


@pytest.mark.report("B10", "B11", "B13")
def test_every_way_from_messages_to_ids_is_the_same_with_one_bos_also_after_a_save(talker, tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    expected = encode_chat(talker.tokenizer, messages)
    rzoo.export(talker, tmp_path / "copy")
    for lm in (talker, rzoo.load(str(tmp_path / "copy"), quiet=True)):
        ways = [rzoo.prompt_ids(lm, "hi"), rzoo.prompt_ids(lm, messages)]
        ways += [list(rzoo.generate(lm, p, max_new_tokens=1).prompt_tokens) for p in ("hi", messages)]
        ways += [list(rzoo.stream(lm, p, max_new_tokens=1).completion.prompt_tokens) for p in ("hi", messages)]
        ways += [list(answer.prompt_tokens) for answer in rzoo.generate(lm, ["hi", messages], max_new_tokens=1)]
        assert ways == [expected] * len(ways)
        assert expected.count(BOS) == 1 and expected[0] == BOS
        assert rzoo.prompt_ids(lm, "hi", raw=True)[:2].count(BOS) == 1


@pytest.mark.report("C09", "C11")
def test_an_answer_ends_at_any_id_that_the_files_name_alone_and_in_a_batch(talker, tmp_path):
    free = rzoo.generate(talker, "hi", max_new_tokens=8)
    end = free.tokens[3]
    lm = rzoo.load(str(write_talker(tmp_path / "model", context=65536, stops=(end,))), quiet=True)
    assert set(lm.about.stops) == {EOS, end}
    kept = free.tokens[: free.tokens.index(end)]
    for answer in (rzoo.generate(lm, "hi", max_new_tokens=8), rzoo.generate(lm, ["hi", "you"], max_new_tokens=8)[0]):
        assert answer.tokens == (*kept, end)
        assert answer.text == lm.tokenizer.decode(kept)
        assert answer.prompt_tokens.count(BOS) == 1


def test_a_stream_gives_its_parts_as_the_completion_holds_them(talker):
    stream = rzoo.stream(talker, "hi", max_new_tokens=20)
    parts = list(stream.parts())
    assert "".join(reasoning for reasoning, _ in parts) == (stream.completion.reasoning or "")
    assert "".join(text for _, text in parts) == stream.completion.text
