"""A run in HELM's five files, in the folder where its samples are.

run_spec.json: what was run; scenario.json: the task; scenario_state.json: every prompt and every answer;
per_instance_stats.json: the scores of each question; stats.json: their means. Field names are those of HELM 0.5.16.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rzoo.compile.folders import write_whole
from rzoo.evals.ask import pairs_of
from rzoo.evals.run import Run
from rzoo.evals.samples import Sample, seed_for
from rzoo.evals.summary import Result, values
from rzoo.evals.task import CHOICE, GENERATION, Instance

SPLIT = "test"
HIDDEN = "(withheld: the authors of this task ask that its text be shown nowhere)"
METHODS = {GENERATION: "generation", CHOICE: "multiple_choice_separate_original"}


def write(result: Result, folder: Path) -> None:
    """Writes the five files."""
    run = result.run
    files = {
        "run_spec": run_spec(run),
        "scenario": {"name": run.task.name, "description": run.task.about, "tags": [], "definition_path": __package__},
        "scenario_state": {"adapter_spec": adapter_spec(run), "request_states": request_states(run)},
        "per_instance_stats": per_instance_stats(run),
        "stats": stats(result),
    }
    for name, value in files.items():
        text = json.dumps(value, indent=2, ensure_ascii=False)
        write_whole(folder / f"{name}.json", text.encode("utf-8", "replace"))


def run_spec(run: Run) -> dict[str, Any]:
    """HELM's RunSpec."""
    return {
        "name": run.name,
        "scenario_spec": {"class_name": f"rzoo.evals.tasks.{run.task.name}", "args": dict(run.about)},
        "adapter_spec": adapter_spec(run),
        "metric_specs": [{"class_name": "rzoo.evals.summary", "args": {"names": [*values(run)]}}],
        "data_augmenter_spec": {"perturbation_specs": []},
        "groups": [run.task.name],
    }


def adapter_spec(run: Run) -> dict[str, Any]:
    """HELM's AdapterSpec: every setting is stated, since HELM's own defaults are others."""
    adapter, about = run.adapter, run.about
    method = METHODS.get(adapter.method, "language_modeling")
    return {
        "method": "chat" if about["chat"] and method == "generation" else method,
        "instructions": adapter.instructions,
        "input_prefix": "",
        "input_suffix": "",
        "output_prefix": "",
        "output_suffix": "",
        "instance_prefix": adapter.between,
        "max_train_instances": len(adapter.shots),
        "max_eval_instances": len(run.instances),
        "num_outputs": len(run.samples[0]),
        "num_train_trials": 1,
        "num_trials": 1,
        "sample_train": False,
        "model": f"rzoo/{about['model']}",
        "model_deployment": f"rzoo/{about['model']}",
        "temperature": about["temperature"],
        "max_tokens": about["max_tokens"],
        "stop_sequences": list(adapter.stop),
    }


def request_states(run: Run) -> list[dict[str, Any]]:
    """HELM's RequestState of each question; of a choice, one for each option."""
    found = []
    for instance, samples in zip(run.instances, run.samples, strict=True):
        shown = {"instance": _instance(run, instance), "train_trial_index": 0}
        rest = {"num_train_instances": len(run.adapter.shots), "prompt_truncated": False}
        found += [{**shown, **state, **rest} for state in _states(run, instance, samples)]
    return found


def _instance(run: Run, instance: Instance) -> dict[str, Any]:
    if run.task.private:
        return {"input": {"text": HIDDEN}, "references": [], "split": SPLIT, "id": instance.id}
    references = [
        {"output": {"text": option}, "tags": ["correct"] if option == instance.answer else []}
        for option in instance.options or (instance.answer,)
    ]
    return {"input": {"text": instance.text}, "references": references, "split": SPLIT, "id": instance.id}


def _states(run: Run, instance: Instance, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The requests of one question and what came back."""
    seconds = sum(sample.seconds for sample in samples)
    if run.adapter.method == GENERATION:
        prompt = run.adapter.messages(instance) if run.about["chat"] else run.adapter.text(instance)
        request = _request(run, prompt, seed=seed_for(run.about["seed"], instance, 0))
        return [{"request": request, "result": _returned([_completion(sample) for sample in samples], seconds)}]
    pairs, logprobs = pairs_of(run.adapter, instance), samples[0].logprobs
    return [
        {
            "reference_index": index,
            "request_mode": "original",
            "request": {**_request(run, prompt + option), "echo_prompt": True, "max_tokens": 0},
            "result": _returned([{"text": "", "logprob": logprob, "tokens": []}], seconds / len(pairs)),
        }
        for index, ((prompt, option), logprob) in enumerate(zip(pairs, logprobs, strict=False))
    ]


def _request(run: Run, prompt: Any, seed: int | None = None) -> dict[str, Any]:
    shown: Any = HIDDEN if run.task.private else prompt
    asked = {"prompt": "", "messages": shown} if isinstance(shown, list) else {"prompt": shown}
    return {
        **{name: adapter_spec(run)[name] for name in ("model", "model_deployment", "max_tokens", "stop_sequences")},
        **asked,
        "embedding": False,
        "temperature": run.about["temperature"],
        "top_p": run.about["top_p"],
        "num_completions": len(run.samples[0]),
        "top_k_per_token": 1,
        "echo_prompt": False,
        "random": None if seed is None else str(seed),
        "presence_penalty": 0,
        "frequency_penalty": 0,
    }


def _returned(completions: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    return {
        "success": True,
        "embedding": [],
        "completions": completions,
        "cached": False,
        "request_time": seconds,
    }


def _completion(sample: Sample) -> dict[str, Any]:
    """HELM knows the reasons length, stop, endoftext and unknown."""
    reason = sample.finish_reason if sample.finish_reason in ("length", "stop") else "unknown"
    thought = {} if sample.reasoning is None else {"thinking": {"text": sample.reasoning}}
    # Completions are sorted by logprob before the first is graded: equal ones stay in their order.
    return {"text": sample.text, "logprob": 0.0, "tokens": [], "finish_reason": {"reason": reason}, **thought}


def per_instance_stats(run: Run) -> list[dict[str, Any]]:
    """HELM's PerInstanceStats: each score of each question, the mean of its samples."""
    columns = values(run)
    return [
        {
            "instance_id": instance.id,
            "train_trial_index": 0,
            "stats": [stat({"name": name}, [column[place]]) for name, column in columns.items()],
        }
        for place, instance in enumerate(run.instances)
    ]


def stats(result: Result) -> list[dict[str, Any]]:
    """HELM's Stat of each score over the questions, of each part of the task too, and of what is one number a run."""
    columns = values(result.run)
    parts = {
        group: [v for one, v in zip(result.run.instances, columns["accuracy"], strict=True) if one.group == group]
        for group in result.groups
    }
    whole = {name: [score.mean] for name, score in result.scores.items() if name not in columns}
    return [
        *(stat({"name": name}, column) for name, column in (columns | whole).items()),
        *(stat({"name": "accuracy", "sub_split": group}, column) for group, column in parts.items()),
    ]


def stat(name: Mapping[str, str], column: Sequence[float]) -> dict[str, Any]:
    """HELM's Stat of some numbers."""
    of = np.asarray(column, np.float64)
    figures = {"sum": of.sum(), "sum_squared": (of * of).sum(), "min": of.min(), "max": of.max()}
    figures |= {"mean": of.mean(), "variance": of.var(), "stddev": of.std()}
    return {"name": {**name, "split": SPLIT}, "count": len(of), **{key: float(v) for key, v in figures.items()}}
