"""The tasks, by name. To add one: an entry of 20 lines in a file of this folder."""

from rzoo.core import RzooError, closest
from rzoo.evals.task import Task
from rzoo.evals.tasks import fields, generated, instructions, multiple_choice, programs, texts, word_problems

MODULES = (generated, fields, word_problems, multiple_choice, programs, texts, instructions)
TASKS: dict[str, Task] = {task.name: task for module in MODULES for task in module.TASKS}


def task_named(name: str) -> Task:
    """The task of this name. Raises RzooError with close names for another."""
    if name not in TASKS:
        raise RzooError(f"task ({name}) is unknown", field="task", value=name, fix=closest(name, [*TASKS]))
    return TASKS[name]
