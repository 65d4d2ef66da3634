"""Programs, judged by running their tests: HumanEval and MBPP."""

from rzoo.evals.task import Task

TASKS: list[Task] = []
