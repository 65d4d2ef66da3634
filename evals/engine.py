"""What an evaluation asks of a model, and a loaded model that answers it."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from rzoo.engine.generate import finished
from rzoo.engine.prompts import prompt_ids
from rzoo.engine.score import score_pairs
from rzoo.handle import LM

Prompt = str | list[dict[str, str]]


@runtime_checkable
class Answer(Protocol):
    """One answer, as rzoo.Completion is. text: without the reasoning; finish_reason: stop, length or interrupted."""

    @property
    def text(self) -> str: ...
    @property
    def reasoning(self) -> str | None: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def prompt_tokens(self) -> Sequence[int]: ...


@runtime_checkable
class Likelihood(Protocol):
    """Of a continuation, as rzoo.Score is."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def total(self) -> float: ...
    @property
    def greedy(self) -> bool: ...


@runtime_checkable
class Engine(Protocol):
    """A model. name: for people; key: equal for equal weights, template and settings, so that no run goes on with
    another model's answers. chat: it has a chat template. thinking: how its thinking is switched
    (rzoo.formats.THINKING), None for a model without.
    """

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> Mapping[str, Any]: ...
    @property
    def chat(self) -> bool: ...
    @property
    def thinking(self) -> str | None: ...

    def room(self, prompt: Prompt) -> int:
        """Tokens that the context leaves after a prompt; negative where it is too long."""

    def answers(self, prompts: Sequence[Prompt], options: Mapping[str, Any]) -> Iterator[tuple[int, Answer]]:
        """(place, answer) of each prompt as it comes; options are those of rzoo.generate."""

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> Sequence[Likelihood]:
        """Of each (text, continuation)."""


class LoadedModel:
    """An LM as an Engine."""

    def __init__(self, lm: LM, name: str | None = None):
        self.lm = lm
        self.name = name or lm.about.source.split(" from ")[0]
        self.key = key_of(lm)
        self.chat = lm.about.template is not None
        self.thinking = lm.about.thinking

    def room(self, prompt: Prompt) -> int:
        return self.lm.config.context - len(prompt_ids(self.lm, prompt, raw=isinstance(prompt, str)))

    def answers(self, prompts: Sequence[Prompt], options: Mapping[str, Any]) -> Iterator[tuple[int, Answer]]:
        return finished(self.lm, prompts, raw=isinstance(prompts[0], str), **options)

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> Sequence[Likelihood]:
        return score_pairs(self.lm, pairs, raw=True)


def key_of(lm: LM) -> dict[str, Any]:
    """What answers depend on: the config, a digest of some numbers of each weight, the template, the policy."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(lm.params):
        digest.update(str((leaf.shape, leaf.dtype)).encode())
        digest.update(np.asarray(leaf[(0,) * (leaf.ndim - 1)][:64] if leaf.ndim else leaf).tobytes())
    template = hashlib.sha256((lm.about.template or "").encode()).hexdigest()[:16]
    config = hashlib.sha256(repr(lm.config).encode()).hexdigest()[:16]
    return {"weights": digest.hexdigest()[:16], "config": config, "template": template, "policy": lm.policy}
