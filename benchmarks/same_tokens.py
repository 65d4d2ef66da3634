"""Ten prompts answered alone, in one batch, streamed and with drafts: the same token ids each time.

python benchmarks/same_tokens.py [MODEL] [--tokens 24]

With deterministic=True, greedy. Prints a table: lengths, and whether the ids are those of the prompt alone;
exit status 1 where any differ.
"""

import argparse
import sys
from typing import Any

import rzoo

PROMPTS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write a sentence about a river that runs through a town, past a mill and under two bridges, in early spring.",
    "2 + 2 =",
    "Repeat after me: the cat sat on the mat, the cat sat on the mat.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "List the days of the week.",
    "def add(a, b):",
    "Who wrote Hamlet, and in which century was it first played? Answer in one short sentence.",
)


def ways(lm: Any, tokens: int) -> dict[str, list[tuple[int, ...]]]:
    """Way of asking -> the ids of each prompt's answer."""
    options = {"max_new_tokens": tokens, "deterministic": True}
    streams = [rzoo.stream(lm, prompt, **options) for prompt in PROMPTS]
    for stream in streams:
        "".join(stream)
    return {
        "alone": [rzoo.generate(lm, prompt, **options).tokens for prompt in PROMPTS],
        "batched": [one.tokens for one in rzoo.generate(lm, list(PROMPTS), **options)],
        "streamed": [stream.completion.tokens for stream in streams],
        "drafted": [rzoo.generate(lm, prompt, draft="lookup", **options).tokens for prompt in PROMPTS],
    }


def main() -> None:
    """Asks, compares, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=24)
    asked = parser.parse_args()
    found = ways(rzoo.load(asked.model), asked.tokens)
    print("| prompt | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    equal = True
    for i, prompt in enumerate(PROMPTS):
        cells = [
            f"{len(ids[i])} ids, {'equal' if ids[i] == found['alone'][i] else 'DIFFERENT'}" for ids in found.values()
        ]
        equal &= all(ids[i] == found["alone"][i] for ids in found.values())
        print(f"| {prompt[:40]} | {' | '.join(cells)} |")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
