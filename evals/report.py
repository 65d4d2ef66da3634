"""Results for people: a table in Markdown, and a page of HTML with a picture that needs nothing else."""

import html
import math
from collections.abc import Sequence

from rzoo.evals.estimates import Estimate
from rzoo.evals.summary import Result

HEADINGS = ("task", "score", "95 %", "n", "samples", "unparsed", "truncated", "tokens", "seconds", "asked as")
# Shown below the table, where a run has them.
FURTHER = ("accuracy_strict", "accuracy_norm", "accuracy_finished", "macro_f1", "ece_10_bin", "brier")
WIDTH, ROW, LEFT = 640, 22, 190  # of the picture, in pixels: in all, of a bar's line, of the names
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .7em;border-bottom:1px solid #ddd;text-align:left}"
)


def cells(result: Result) -> tuple[str, ...]:
    """A run in one line of the table."""
    main, of = result.scores["accuracy"], result.scores
    rates = [f"{of[name].mean:.1%}" for name in ("unparsed_rate", "truncated_rate")]
    return (
        result.run.task.name,
        f"{main.mean:.3f}" + ("" if main.error is None else f" ± {main.error:.3f}"),
        "" if math.isnan(main.low) else f"{main.low:.3f} to {main.high:.3f}",
        str(main.n),
        str(len(result.run.samples[0])),
        *rates,
        f"{of['output_tokens'].mean:.1f}",
        f"{of['seconds'].mean:.1f}",
        asked_as(result),
    )


def asked_as(result: Result) -> str:
    """What changes a score though the questions are the same: the template, examples, drawing, thinking, limits."""
    about, adapter = result.run.about, result.run.adapter
    words = ["chat template" if about["chat"] else "plain text", adapter.method, f"{len(adapter.shots)} examples"]
    if adapter.method == "generation":
        words += [f"temperature {about['temperature']:g}", f"at most {about['max_tokens']} tokens"]
        words += [f"stops {', '.join(map(repr, adapter.stop))}"] if adapter.stop else []
    thinking = {True: ["thinking on"], False: ["thinking off"], None: []}[about["thinking"]]
    return "; ".join([*words, *thinking])


def further(result: Result) -> list[str]:
    """The other scores of a run, in words."""
    names = [name for name in result.scores if name in FURTHER or "@" in name]
    names += ["no_room_rate"] if result.scores["no_room_rate"].mean else []
    return [f"{result.run.task.name} {name}: {_figure(result.scores[name])}" for name in names]


def _figure(value: Estimate) -> str:
    return f"{value.mean:.3f}" + ("" if value.error is None else f" ± {value.error:.3f}")


def markdown(results: Sequence[Result]) -> str:
    """The table, and what else there is to know of each run."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *map(cells, results)]
    table = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines]
    more = [f"- {line}" for result in results for line in further(result)]
    return "\n".join([f"# {_title(results)}", "", *table, *["", *more][: bool(more) + len(more)], ""])


def _title(results: Sequence[Result]) -> str:
    return f"Scores of {', '.join(dict.fromkeys(str(result.run.about['model']) for result in results))}"


def page(results: Sequence[Result]) -> str:
    """The same as a page of HTML."""
    title = html.escape(_title(results))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in HEADINGS)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells(one)) + "</tr>" for one in results)
    more = "".join(f"<li>{html.escape(line)}</li>" for one in results for line in further(one))
    parts = [(f"{one.run.task.name} {name}", value) for one in results for name, value in one.groups.items()]
    pictures = [picture([(one.run.task.name, one.scores["accuracy"]) for one in results]), picture(parts)]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1>{''.join(pictures)}<table><tr>{head}</tr>{body}</table><ul>{more}</ul></html>\n"
    )


def picture(bars: Sequence[tuple[str, Estimate]]) -> str:
    """Bars of scores from 0 to 1 with their intervals, as SVG; nothing where there are none."""
    if not bars:
        return ""
    drawn = "".join(_bar(place, name, value) for place, (name, value) in enumerate(bars))
    height = ROW * len(bars) + ROW
    axis = "".join(
        f'<text x="{_x(share)}" y="{height - 6}" text-anchor="middle" fill="#666">{share:g}</text>'
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{WIDTH}" height="{height}" font-size="13">'
        f"{drawn}{axis}</svg>"
    )


def _x(share: float) -> float:
    return round(LEFT + min(max(share, 0.0), 1.0) * (WIDTH - LEFT - 20), 1)


def _bar(place: int, name: str, value: Estimate) -> str:
    top, middle = place * ROW + 4, place * ROW + ROW / 2 + 1
    bar = f'<rect x="{LEFT}" y="{top}" width="{_x(value.mean) - LEFT:.1f}" height="{ROW - 8}" fill="#4c78a8"/>'
    words = f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">{html.escape(name)}</text>'
    if math.isnan(value.low):
        return words + bar
    ends = f'x1="{_x(value.low)}" x2="{_x(value.high)}" y1="{middle}" y2="{middle}"'
    return f'{words}{bar}<line {ends} stroke="#222" stroke-width="2"/>'
