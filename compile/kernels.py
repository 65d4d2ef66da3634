"""Forms of the hot operations: which functions a model runs on where no tuning record says otherwise."""

from rzoo.models.attention import attend_in_blocks
from rzoo.models.forms import Forms
from rzoo.models.weights import Numerics


def default_forms(numerics: Numerics) -> Forms:
    """References, but for prefill against a cache: there scores of all keys at once would grow with the square."""
    return Forms(numerics=numerics, attend_prefill=attend_in_blocks)
