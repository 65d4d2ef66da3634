"""`rzoo chat`: a conversation at the terminal, or one line of standard input at a time.

At a terminal a conversation has a prompt, history, and reasoning in faint letters. In a pipe each line is a turn,
answers alone go to standard output and all else to standard error.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rzoo.cli.common import (
    Dtype,
    MaxThinkTokens,
    MeshOption,
    MinP,
    Model,
    Policy,
    RepetitionPenalty,
    RulesOption,
    Seed,
    Temperature,
    Thinking,
    TopK,
    TopP,
    app,
    load,
)
from rzoo.cli.show import FAINT, PLAIN, Shown, styled

HISTORY = 1000  # lines of it that are kept
QUOTE = '"""'


@app.command()
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 2048,
    thinking: Thinking = None,
    max_think_tokens: MaxThinkTokens = None,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    dtype: Dtype = None,
    policy: Policy = "exact",
    mesh: MeshOption = None,
    rules: RulesOption = None,
) -> None:
    """Talk to a model. Ctrl-C stops an answer, Ctrl-D leaves, /help says what else there is."""
    lm = load(model, dtype, policy, mesh, rules)
    if lm.tokenizer is not None and lm.about.template is None:
        from rzoo.core import RzooError

        fix = "`rzoo generate MODEL TEXT` continues a text"
        raise RzooError(f"{lm.about.source} has no chat template: it was not made to converse", field="model", fix=fix)
    options = {
        "max_new_tokens": max_new_tokens,
        "max_think_tokens": max_think_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    talk = Talk(lm, options, thinking)
    talk.set_system(system)
    run(talk)


class Talk:
    """A conversation with a model: its messages, and what the commands change."""

    def __init__(self, lm: Any, options: dict[str, Any], thinking: bool | None):
        import rzoo

        self.lm, self.thinking = lm, thinking
        self.options = {**options, "session": rzoo.Session()}  # what a turn shares with the last is not read again
        self.system: list[dict[str, Any]] = []
        self.turns: list[dict[str, Any]] = []
        self.terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def turn(self, text: str) -> None:
        """Asks, prints the answer as it comes, and keeps both. Raises RzooError, with nothing kept, where it can't."""
        import rzoo

        asked = {"role": "user", "content": text}
        ids = rzoo.prompt_ids(self.lm, [*self.system, *self.turns, asked], thinking=self.thinking)
        self._check_room(len(ids))
        answer = rzoo.stream(self.lm, ids, **self.options)
        self._show(answer)
        done = answer.completion
        self._note(f"{self._why(done)}{answer.report()}")
        if done.text.strip():
            self.turns += [asked, self._reply(done)]

    def _reply(self, done: Any) -> dict[str, Any]:
        """What was said, reasoning included, for the template to keep or to drop."""
        from rzoo.chat import opens_reasoning, reply

        ends = 1 if done.tokens[-1] in self.lm.about.stops else 0
        text = self.lm.tokenizer.decode(done.tokens[: len(done.tokens) - ends])
        opened = opens_reasoning(self.lm.tokenizer.decode(done.prompt_tokens, skip_special=False))
        return reply(text, opened=opened)

    def _check_room(self, length: int) -> None:
        from rzoo.core import RzooError

        context = self.lm.config.context
        if length >= context:
            words = f"the conversation would have {length} tokens, the model's context is {context}"
            way = "/reset begins a new one (/save FILE keeps this)" if self.turns else "ask something shorter"
            raise RzooError(words, field="messages", value=length, fix=way)

    def _show(self, answer: Any) -> None:
        """Prints the pieces of an answer; Ctrl-C ends it at a terminal, and in a pipe the program."""
        if self.terminal:
            self._note(f"reading {answer.prompt_length} tokens …", end="")
        shown = Shown(self.terminal, waiting=self.terminal)
        try:
            for thought, text in answer.parts():
                shown.push(thought, text)
        except KeyboardInterrupt:
            if not self.terminal:
                raise
        shown.finish()

    def _why(self, done: Any) -> str:
        """What to say of an answer that did not end by itself, and of one that is none."""
        words = {"interrupted": "stopped; ", "length": "cut at --max-new-tokens; "}.get(done.finish_reason, "")
        if len(done.prompt_tokens) + len(done.tokens) >= self.lm.config.context:
            words = f"the context of {self.lm.config.context} tokens is full, /reset begins a new conversation; "
        return words if done.text.strip() else f"{words}there is no answer, so this turn is not kept; "

    def _note(self, text: str, end: str = "\n") -> None:
        faint = self.terminal and styled() and sys.stderr.isatty()
        print(f"{FAINT}rzoo: {text}{PLAIN}" if faint else f"rzoo: {text}", end=end, file=sys.stderr, flush=True)

    def command(self, line: str) -> None:
        """Does what a line such as "/think on" says."""
        name, _, rest = line.partition(" ")
        action = COMMANDS.get(name)
        if action is None:
            self._note(f"{name} is no command; /help lists them, and //… sends a line that begins with /")
        else:
            action[2](self, rest.strip())

    def help(self, _: str) -> None:
        """Says what can be typed."""
        lines = [f"{f'{name} {argument}':<16}{words}" for name, (argument, words, _) in COMMANDS.items()]
        lines.append(f"a line that ends in \\ goes on in the next; {QUOTE} begins and ends a text of several lines")
        lines.append("Ctrl-C stops an answer, Ctrl-D leaves")
        print("".join(f"  {line}\n" for line in lines), end="", file=sys.stderr)

    def think(self, word: str) -> None:
        """Switches thinking for the turns to come."""
        from rzoo.formats import with_thinking

        if word in ("on", "off"):
            with_thinking(self.lm.about.thinking, [], word == "on")
            self.thinking = word == "on"
        elif word:
            return self._note(f"/think {word}: say /think on or /think off")
        state = {True: "on", False: "off", None: "as the model comes"}[self.thinking]
        return self._note(f"thinking is {state}")

    def reset(self, _: str) -> None:
        """Forgets all but the system message."""
        self.turns = []
        self._note("a new conversation" + (", with the same system message" if self.system else ""))

    def change_system(self, text: str) -> None:
        """As /system TEXT."""
        self.set_system(text)
        self._note("the system message is set" if text else "there is no system message now")

    def set_system(self, text: str | None) -> None:
        """Gives the conversation a system message, or none. Raises RzooError where the model's template takes none,
        and where it has no template.
        """
        import rzoo

        system = [{"role": "system", "content": text}] if text else []
        rzoo.prompt_ids(self.lm, [*system, {"role": "user", "content": "?"}], thinking=self.thinking)
        self.system = system

    def save(self, name: str) -> None:
        """Writes the conversation as JSON to a new file."""
        if not name:
            return self._note("/save FILE: give the name of a new file")
        data = {"model": self.lm.source, "messages": [*self.system, *self.turns]}
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                json.dump(data, file, ensure_ascii=False, indent=1)
        except FileExistsError:
            return self._note(f"{name} exists already; give another name")
        except OSError as error:
            return self._note(f"{name} can't be written: {error.strerror}")
        return self._note(f"{len(data['messages'])} messages are in {name}")

    def exit(self, _: str) -> None:
        """Leaves."""
        raise EOFError


# What is typed → its argument, what it does, who does it.
COMMANDS: dict[str, tuple[str, str, Callable[[Talk, str], None]]] = {
    "/think": ("on|off", "switch a reasoning model's thinking", Talk.think),
    "/system": ("TEXT", "set the system message; without a text, remove it", Talk.change_system),
    "/reset": ("", "begin a new conversation", Talk.reset),
    "/save": ("FILE", "write the conversation as JSON", Talk.save),
    "/help": ("", "this list", Talk.help),
    "/exit": ("", "leave", Talk.exit),
}


def run(talk: Talk) -> None:
    """Reads and answers until the input ends."""
    from rzoo.core import RzooError

    if talk.terminal:
        _use_readline()
        print("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves", file=sys.stderr)
    while True:
        try:
            line = read_turn(talk.terminal)
            if line.startswith("/") and not line.startswith("//"):
                talk.command(line)
            elif line:
                talk.turn(line.removeprefix("/"))
        except EOFError:
            break
        except KeyboardInterrupt:
            if not talk.terminal:
                raise
            print("\nrzoo: Ctrl-D or /exit leaves", file=sys.stderr)
        except RzooError as error:
            print(f"rzoo: {error}", file=sys.stderr)
            if not talk.terminal:
                sys.exit(2)
    if talk.terminal:
        print("", file=sys.stderr)


def read_turn(prompted: bool) -> str:
    """The next turn without the space around it: one line, or several by a backslash at their end or in triple quotes.

    Raises EOFError at the end of the input, where it stands in no unfinished turn.
    """
    line = _line("> " if prompted else "").strip()
    quoted = line.startswith(QUOTE)
    lines = [line.removeprefix(QUOTE)]
    while not lines[-1].endswith(QUOTE) if quoted else lines[-1].endswith("\\"):
        if not quoted:
            lines[-1] = lines[-1].removesuffix("\\")
        try:
            lines.append(_line(". " if prompted else ""))
        except EOFError:
            break
    return "\n".join(lines).removesuffix(QUOTE if quoted else "").strip()


def _line(prompt: str) -> str:
    if prompt:
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _use_readline() -> None:
    """Arrow keys, and a history that is kept from one run to the next where the cache folder can be written."""
    try:
        import readline
    except ImportError:  # not built into every Python
        return
    import atexit

    from rzoo.compile.folders import cache_folder

    file = cache_folder() / "chat_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        readline.read_history_file(file)
    except OSError:
        return
    readline.set_history_length(HISTORY)
    atexit.register(readline.write_history_file, file)
