"""The lineage V3 → R1 in small: one architecture, trained on answers alone (v3-tiny) or on thoughts, too (r1-tiny).

Both learn chained arithmetic (rzoo.data.chains) from the same number of tokens; the one that may write its steps down
solves chains that the other can't. The conversation is written in DeepSeek's own format over single bytes.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

from rzoo.core import RzooError, closest
from rzoo.data.chains import Chain, chain
from rzoo.formats import TEMPLATES, thinking_of
from rzoo.handle import LM, About
from rzoo.models.presets import R1_TINY
from rzoo.models.registry import initialize
from rzoo.tokenizer import Tokenizer
from rzoo.train.loop import Bar, fit
from rzoo.train.step import Batch, Objective

BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
CONTROL = (BOS, EOS, USER, ASSISTANT, "<think>", "</think>")
CONFIG = replace(R1_TINY, mtp=True)  # training makes the module for a second token, too


@dataclass(frozen=True)
class Recipe:
    """How a member of the lineage is trained. thinks: whether samples hold the thought. depths: of the chains, from 1
    on. tokens: of a batch, about.
    """

    thinks: bool
    depths: int = 10
    tokens: int = 4096
    steps: int = 600
    peak: float = 3e-3

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW with clipping, a warm-up of a twentieth and a cosine to a tenth."""
        schedule = optax.warmup_cosine_decay_schedule(0.0, self.peak, self.steps // 20, self.steps, self.peak / 10)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))

    def objective(self) -> Objective:
        """Balance, the second token, and indexers that learn from dense attention for the first two thirds."""
        return Objective(bias_rate=1e-2, dense_steps=2 * self.steps // 3)


RECIPES = {"r1-tiny": Recipe(thinks=True), "v3-tiny": Recipe(thinks=False)}


def recipe(name: str) -> Recipe:
    """The recipe of a member of the lineage. Raises RzooError with close names for another."""
    if name not in RECIPES:
        raise RzooError(f"recipe ({name}) is unknown", field="recipe", value=name, fix=closest(name, [*RECIPES]))
    return RECIPES[name]


def untrained(name: str, seed: int = 0) -> LM:
    """A member of the lineage with random weights."""
    tokenizer, thinks = byte_tokenizer(), recipe(name).thinks
    template = TEMPLATES["deepseek-r1" if thinks else "deepseek-v3"]
    eos = tokenizer.token_id(EOS)
    about = About(
        source=name,
        tokenizer=tokenizer,
        template=template,
        stops=() if eos is None else (eos,),
        thinking=thinking_of(template),
    )
    params = initialize(CONFIG, seed)
    # The embedding is the head, too: drawn at scale 1, first logits would be as large as the width is wide.
    return LM(CONFIG, {**params, "embed": params["embed"] * CONFIG.width**-0.5}, about=about)


@lru_cache(maxsize=1)
def byte_tokenizer() -> Tokenizer:
    """One token a byte of UTF-8, in the order of the bytes' printable stand-ins, then the control tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    for text in CONTROL:
        # As in R1's file, the tags of thinking are text that stays, and the others are left out of decoded text.
        core.add_tokens([tokenizers.AddedToken(text, special=not text.endswith("think>"), normalized=False)])
    return Tokenizer(core, bos_id=len(alphabet), eos_ids=(len(alphabet) + 1,))


def learn(
    name: str,
    folder: str | Path,
    *,
    steps: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> LM:
    """Trains a member of the lineage, or goes on with the one in `folder`; progress: a bar on the terminal.

    Raises RzooError for an unknown name and for a folder that holds something else.
    """
    wanted = recipe(name) if steps is None else replace(recipe(name), steps=steps)
    options = {"optimizer": wanted.optimizer(), "objective": wanted.objective(), "folder": folder}
    with Bar(name, wanted.steps, shown=progress) as bar:
        return fit(untrained(name, seed), partial(batch, wanted, seed), wanted.steps, progress=bar.update, **options)


def batch(wanted: Recipe, seed: int, number: int) -> Batch:
    """Batch `number` of a run: whole samples, padded on the right; only what the model is to write counts."""
    rng = np.random.default_rng((seed, number))
    rows = wanted.tokens // _longest(wanted)
    samples = [ids_of(chain(rng, int(rng.integers(1, wanted.depths + 1))), wanted.thinks) for _ in range(rows)]
    tokens, weights = (np.zeros((rows, _longest(wanted)), kind) for kind in (np.int32, np.float32))
    for row, (prompt, answer) in enumerate(samples):
        tokens[row, : len(prompt) + len(answer)] = prompt + answer
        weights[row, len(prompt) : len(prompt) + len(answer)] = 1
    return Batch(jnp.asarray(tokens), jnp.asarray(weights))


def ids_of(sample: Chain, thinks: bool) -> tuple[list[int], list[int]]:
    """Ids of the prompt, and of what the model is to answer."""
    encode = byte_tokenizer().encode
    thought = f"<think>{sample.thought}</think>" if thinks else ""
    return encode(f"{BOS}{USER}{sample.prompt}{ASSISTANT}"), encode(f"{thought}{sample.answer}{EOS}")


def _longest(wanted: Recipe) -> int:
    """Tokens of the longest sample: 2 an operation in the prompt and 6 in the thought, and what stands around them."""
    return 2 * wanted.depths + 7 + ((6 * wanted.depths + 1) if wanted.thinks else 0)
