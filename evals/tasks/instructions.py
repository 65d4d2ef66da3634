"""Instructions whose following a program can check: IFEval."""

from typing import Any

from rzoo.evals.data_files import instances_of
from rzoo.evals.ifeval import CHECKS, followed, followed_loosely
from rzoo.evals.task import Adapter, Instance, Task, Verdict

IFEVAL = ("ifeval/input_data.jsonl", "ifeval.jsonl")
ANSWER = Adapter(max_tokens=2048)


def ifeval(place: int, row: Any) -> Instance:
    """A row of Google's input_data.jsonl. Its checks are tried once, so that strange arguments are told of here."""
    names, arguments = row["instruction_id_list"], row["kwargs"]
    if unknown := [name for name in names if name not in CHECKS]:
        raise ValueError(f"unknown instruction {unknown[0]}")
    given = [{name: value for name, value in each.items() if value is not None} for each in arguments]
    asked = list(zip(names, given, strict=True))
    for instruction in asked:
        followed("a", instruction)
    return Instance(
        id=f"ifeval-{row.get('key', place)}",
        text=row["prompt"],
        answer="; ".join(names),
        extra={"instructions": asked},
        parts=len(asked),
    )


def following(instance: Instance, text: str) -> Verdict:
    """Right where every instruction is followed to the letter. also: where all are followed loosely, and the shares."""
    asked = instance.extra["instructions"]
    strict = [followed(text, one) for one in asked]
    loose = [followed_loosely(text, one) for one in asked]
    missed = [name for (name, _), right in zip(asked, strict, strict=True) if not right]
    also = {
        "accuracy_loose": float(all(loose)),
        "instructions_followed": sum(strict) / len(asked),
        "instructions_followed_loose": sum(loose) / len(asked),
    }
    return Verdict(float(not missed), None, "; ".join(missed) or None, also)


TASKS = [
    Task(
        name="ifeval",
        about="instructions that a program can check, such as a number of words",
        instances=instances_of(IFEVAL, "input_data.jsonl of google-research, instruction_following_eval", ifeval),
        text=ANSWER,
        chat=ANSWER,
        scorer=following,
        by_part=("instructions_followed", "instructions_followed_loose"),
        files=IFEVAL,
    )
]
