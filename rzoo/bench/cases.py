"""What is timed: one prompt, a few shapes."""

from __future__ import annotations

from dataclasses import dataclass

# SmolLM2's tokens of "The river rises in the hills north of the town and runs for forty miles through fields and small
# woods before it reaches the sea. In spring, when the snow melts, its water is": real text keeps the most likely token
# apart from the second, so that two exact engines choose alike. Other models read other words in it; time is the same.
PROMPT = (
    *(504, 4626, 13685, 281, 260, 12610, 4081, 282, 260, 3102, 284, 7313, 327, 14510, 4158, 738, 3705, 284, 1165),
    *(15629, 1092, 357, 9732, 260, 3426, 30, 533, 4921, 28, 645, 260, 5806, 34294, 28, 624, 913, 314),
)


@dataclass(frozen=True)
class Case:
    """`batch` prompts of `prompt` tokens, then `new` greedy tokens each; where `new` is 0 the prompt is timed."""

    batch: int
    prompt: int
    new: int

    @property
    def room(self) -> int:
        """Tokens per row that a cache must hold."""
        return self.prompt + self.new

    @property
    def tokens(self) -> int:
        """Tokens that the timed part handles, over all rows."""
        return self.batch * (self.new or self.prompt)

    @property
    def ids(self) -> list[list[int]]:
        """The prompts [batch, prompt]: PROMPT over and over; row r starts at its r-th token, so that rows differ."""
        return [[PROMPT[(r + i) % len(PROMPT)] for i in range(self.prompt)] for r in range(self.batch)]


CASES = {
    "decode_b1": Case(batch=1, prompt=len(PROMPT), new=48),
    "decode_b8": Case(batch=8, prompt=len(PROMPT), new=32),
    "decode_b32": Case(batch=32, prompt=len(PROMPT), new=16),
    "prefill512": Case(batch=1, prompt=512, new=0),
}
# rzoo alone: the case "decode_b1" as text that comes piece by piece, from the first piece on.
STREAM = "stream_b1"
