"""`rzoo generate`: from a prompt to an answer."""

import json
import sys
import time
from typing import Annotated, Any

import typer

from rzoo.cli.common import (
    AsJson,
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
    say,
)
from rzoo.cli.show import Shown


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Text; - reads standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 512,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="The prompt is token ids, separated by spaces or commas.")] = False,
    thinking: Thinking = None,
    max_think_tokens: MaxThinkTokens = None,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    n: Annotated[int, typer.Option("-n", min=1, help="How many answers.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits alone and in any batch; slower.")
    ] = False,
    draft: Annotated[
        str | None, typer.Option(help="What guesses tokens: mtp (the model's own module), lookup, or a smaller model.")
    ] = None,
    draft_tokens: Annotated[int, typer.Option(help="Guesses of a pass.")] = 4,
    dtype: Dtype = None,
    policy: Policy = "exact",
    mesh: MeshOption = None,
    rules: RulesOption = None,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt; on a terminal reasoning is faint, elsewhere it goes to standard error."""
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "raw": raw,
        "thinking": thinking,
        "max_think_tokens": max_think_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "n": n,
        "stop": stop or (),
        "deterministic": deterministic,
        "draft_tokens": draft_tokens,
    }
    text = sys.stdin.read() if prompt == "-" else prompt
    given = _given(text, ids, options)
    lm = load(model, dtype, policy, mesh, rules, mtp=draft == "mtp")
    if draft is not None:
        options["draft"] = draft if draft in ("mtp", "lookup") else load(draft, dtype, policy, mesh, rules)
    if as_json or n > 1:
        _whole(lm, given, options, as_json)
    else:
        _streamed(lm, given, options)


def _given(text: str, ids: bool, options: dict[str, Any]) -> Any:
    """The prompt; what can be refused before a model is loaded is."""
    from rzoo.core import RzooError
    from rzoo.engine.options import options_of

    options_of(options)
    if not ids:
        return text
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        fix = "give whole numbers, separated by spaces or commas"
        raise RzooError(f"prompt ({text!r:.40}) is not a list of token ids", field="prompt", fix=fix) from error


def _whole(lm: Any, prompt: Any, options: dict[str, Any], as_json: bool) -> None:
    """All answers when they are there; as JSON one object for each."""
    import rzoo

    start = time.perf_counter()
    found = rzoo.generate(lm, prompt, **options)
    answers = found if isinstance(found, list) else [found]
    seconds = round(time.perf_counter() - start, 3)
    for number, answer in enumerate(answers, 1):
        result = {"model": lm.source, **vars(answer), "seconds": seconds}
        say(json.dumps(result, ensure_ascii=False) if as_json else f"[{number}] {answer}")
    if any(answer.finish_reason == "interrupted" for answer in answers):
        raise KeyboardInterrupt


def _streamed(lm: Any, prompt: Any, options: dict[str, Any]) -> None:
    """The text as it comes, its reasoning apart, then a line on it."""
    import rzoo

    answer = rzoo.stream(lm, prompt, **options)
    shown = Shown(sys.stdout.isatty(), waiting=sys.stderr.isatty())
    if shown.waiting:  # the first piece takes seconds where programs have to be compiled, and more for a long prompt
        say(f"rzoo: reading {answer.prompt_length} tokens …", end="", file=sys.stderr)
    try:
        for thought, text in answer.parts():
            shown.push(thought, text)
    finally:  # after Ctrl-C, too: what there is stays, and the line says that it was cut
        shown.finish()
        say(f"rzoo: {answer.report()}", file=sys.stderr)
