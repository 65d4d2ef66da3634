"""`rzoo generate`: from a prompt to an answer."""

import json
import sys
import time
from typing import Annotated, Any

import typer

from rzoo.cli.common import AsJson, Dtype, MeshOption, Model, Policy, RulesOption, app, load, say


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Text; - reads standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 512,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="Switch a reasoning model's thinking on or off.")
    ] = None,
    dtype: Dtype = None,
    policy: Policy = "exact",
    mesh: MeshOption = None,
    rules: RulesOption = None,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt."""
    import rzoo

    text = sys.stdin.read() if prompt == "-" else prompt
    lm = load(model, dtype, policy, mesh, rules)
    start = time.perf_counter()
    if as_json:
        answer: Any = rzoo.generate(lm, text, max_new_tokens=max_new_tokens, raw=raw, thinking=thinking)
        seconds = time.perf_counter() - start
        result = {"model": lm.source, **vars(answer), "seconds": round(seconds, 3)}
        say(json.dumps(result, ensure_ascii=False))
        if answer.finish_reason == "interrupted":
            raise KeyboardInterrupt
        return
    answer = rzoo.stream(lm, text, max_new_tokens=max_new_tokens, raw=raw, thinking=thinking)
    waiting = sys.stderr.isatty()
    if waiting:  # the first piece takes seconds where programs have to be compiled, and more for a long prompt
        say(f"rzoo: reading {answer.prompt_length} tokens …", end="", file=sys.stderr)
    try:
        for piece in answer:
            if waiting:
                say("\r\033[K", end="", file=sys.stderr)
            waiting = False
            say(piece, end="")
    except KeyboardInterrupt:  # what there is stays, and the line below says that it was cut
        say(f"\nrzoo: {answer.report()}", file=sys.stderr)
        raise
    say("")
    say(f"rzoo: {answer.report()}", file=sys.stderr)
