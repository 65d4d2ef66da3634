"""Problems whose answer is a number or a formula: GSM8K, SVAMP, AIME, OlympiadBench, and MATH where the user has it."""

from typing import Any

from rzoo.evals.answers import number_in, written_answer
from rzoo.evals.data_files import instances_of
from rzoo.evals.task import Adapter, Instance, Scorer, Task, Verdict

BOXED = "Solve the problem step by step, and end with the answer alone in \\boxed{}."
# Written for this project.
SOLVED = (
    (
        "A baker fills 6 trays with 8 rolls each and sells 30 rolls. How many rolls are left?",
        "6 trays of 8 rolls are 6 * 8 = 48 rolls. After the sale 48 - 30 = 18 are left. #### 18",
    ),
    (
        "Mira reads 12 pages on Monday and twice as many on Tuesday. Her book has 90 pages. How many are left?",
        "On Tuesday she reads 2 * 12 = 24 pages, so 12 + 24 = 36 in all. There are 90 - 36 = 54 left. #### 54",
    ),
    (
        "Three friends share the price of a boat, 45 dollars, and of lunch, 21 dollars. How much does each pay?",
        "Together they pay 45 + 21 = 66 dollars. Each pays 66 / 3 = 22 dollars. #### 22",
    ),
    (
        "A tank holds 200 liters. A pump fills 15 liters a minute for 8 minutes. How many liters are missing?",
        "In 8 minutes the pump fills 15 * 8 = 120 liters. 200 - 120 = 80 liters are missing. #### 80",
    ),
)
SHOTS = tuple(Instance(id=f"solved-{i}", text=text, answer=answer) for i, (text, answer) in enumerate(SOLVED))
WORDS = Adapter(question="Question: {text}\nAnswer:", shots=SHOTS, stop=("\nQuestion:", "\n\n"), max_tokens=320)
CHAT = Adapter(instructions=BOXED, max_tokens=1024)
HARD = Adapter(instructions=BOXED, max_tokens=4096, thought=28672)


def number(instance: Instance, text: str) -> Verdict:
    """Right where the number in the answer is the one that is asked for, in whatever spelling. also: only where it
    stands in a box or behind ####.
    """
    answer, right = number_in(written_answer(text)), number_in(instance.answer)
    strict = number_in(written_answer(text, strict=True))
    also = {"accuracy_strict": float(strict is not None and strict == right)}
    if answer is None:
        return Verdict(0.0, None, "unparsed", also)
    return Verdict(float(answer == right), str(answer), None, also)


def gsm8k(place: int, row: Any) -> Instance:
    """A row of OpenAI's test.jsonl."""
    return Instance(
        id=f"gsm8k-{place}", text=row["question"].strip(), answer=row["answer"].rpartition("####")[2].strip()
    )


def svamp(place: int, row: Any) -> Instance:
    """A row of SVAMP.json."""
    text = f"{row['Body'].strip().rstrip('.')}. {row['Question'].strip()}"
    return Instance(id=str(row.get("ID", f"svamp-{place}")), text=text, answer=f"{float(row['Answer']):g}")


def problem(place: int, row: Any) -> Instance:
    """A row with a problem and its answer, under the names that the carriers of AIME and of MATH use."""
    answer = row["expected_answer"] if "expected_answer" in row else row["answer"]
    group = str(row.get("subject") or row.get("source") or "")
    return Instance(id=str(row.get("id") or f"problem-{place}"), text=row["problem"], answer=str(answer), group=group)


def _problems(name: str, about: str, file: str, scorer: Scorer) -> Task:
    files = (f"{name}/{file}", f"{name.rstrip('0123456789')}/{file}", file)
    instances = instances_of(files, "rows with problem and expected_answer", problem)
    return Task(name=name, about=about, instances=instances, text=HARD, chat=HARD, scorer=scorer, files=files)


GSM8K = ("gsm8k/test.jsonl", "gsm8k.jsonl")
SVAMP = ("svamp/test.jsonl", "svamp/SVAMP.json", "SVAMP.json")
TASKS = [
    Task(
        name="gsm8k",
        about="grade-school word problems",
        instances=instances_of(GSM8K, "test.jsonl of github.com/openai/grade-school-math", gsm8k),
        text=WORDS,
        chat=CHAT,
        scorer=number,
        files=GSM8K,
    ),
    Task(
        name="svamp",
        about="short word problems with distracting numbers",
        instances=instances_of(SVAMP, "SVAMP.json of github.com/arkilpatel/SVAMP", svamp),
        text=WORDS,
        chat=CHAT,
        scorer=number,
        files=SVAMP,
    ),
    _problems("aime24", "AIME 2024, integers 0 to 999", "aime24.jsonl", number),
    _problems("aime25", "AIME 2025, integers 0 to 999", "aime25.jsonl", number),
]
