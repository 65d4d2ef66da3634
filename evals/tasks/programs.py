"""Programs, judged by running their tests in a process of their own: HumanEval and MBPP."""

from collections.abc import Iterator, Sequence
from typing import Any

from rzoo.evals.answers import code_in, completed
from rzoo.evals.data_files import instances_of
from rzoo.evals.sandbox import run_code
from rzoo.evals.task import Adapter, Instance, Source, Task, Verdict

HUMANEVAL = ("humaneval/HumanEval.jsonl.gz", "humaneval/HumanEval.jsonl", "HumanEval.jsonl.gz")
MBPP = ("mbpp/mbpp.jsonl", "mbpp.jsonl")
TESTED = range(11, 511)  # the task_id of MBPP's test part
# A program that goes on behind its function: what stands there is no part of the answer.
NEXT = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\n```", "\nassert ")
EXAMPLE = Instance(
    id="solved",
    text="Write a function that gives the sum of the squares of a list of numbers.\nassert squares([1, 2]) == 5",
    answer="def squares(numbers):\n    return sum(number * number for number in numbers)\n",
)


def human_eval(place: int, row: Any) -> Instance:
    """A row of OpenAI's file."""
    extra = {"name": row["entry_point"], "tests": f"{row['test']}\ncheck({row['entry_point']})"}
    answer = row.get("canonical_solution") or "pass"
    return Instance(id=row["task_id"], text=row["prompt"], answer=answer, extra=extra)


def mbpp(place: int, row: Any) -> Instance:
    """A row of Google's file; what is asked shows the tests, which name the function."""
    tests = "\n".join(row["test_list"])
    extra = {"tests": f"{row.get('test_setup_code', '')}\n{tests}", "test": row["task_id"] in TESTED}
    return Instance(id=str(row["task_id"]), text=f"{row['text']}\n{tests}", answer=row["code"], extra=extra)


def passes(instance: Instance, text: str, command: Sequence[str] = ()) -> Verdict:
    """Right where the program that the answer makes passes its tests. command: as for rzoo.evals.sandbox.run_code."""
    name = instance.extra.get("name")
    code = completed(instance.text, text, name) if name else code_in(text)
    if not text.strip():
        return Verdict(0.0, None, "unparsed")
    outcome = run_code(f"{code}\n{instance.extra['tests']}\n", command=command)
    return Verdict(float(outcome.passed), code, None if outcome.passed else outcome.reason)


def _tested(source: Source) -> Iterator[Instance]:
    rows = instances_of(MBPP, "mbpp.jsonl of github.com/google-research/google-research, mbpp", mbpp)
    return (one for one in rows(source) if one.extra["test"])


TASKS = [
    Task(
        name="humaneval",
        about="the body of a Python function, by its head",
        instances=instances_of(HUMANEVAL, "HumanEval.jsonl.gz of github.com/openai/human-eval", human_eval),
        text=Adapter(stop=NEXT, whole=False),
        chat=Adapter(
            instructions="Complete this function. Answer with the whole program in one block of Python code.",
            question="```python\n{text}```",
            max_tokens=1024,
        ),
        scorer=passes,
        files=HUMANEVAL,
        runs_code=True,
    ),
    Task(
        name="mbpp",
        about="a small Python function, by a sentence and its tests",
        instances=_tested,
        text=Adapter(
            question='"""{text}"""\n',
            answer="{answer}",
            between="\n",
            shots=(EXAMPLE,),
            stop=('\n"""', "\nassert ", "\nprint("),
            whole=False,
        ),
        chat=Adapter(
            instructions="Write this function. Answer with the program in one block of Python code.", max_tokens=1024
        ),
        scorer=passes,
        files=MBPP,
        runs_code=True,
    ),
]
