"""Modes of a loaded model: the same arrays with fewer of them touched for each token."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models.budget import Move, greedy
from rzoo.models.modes import borrowed, full, mode_config, mode_moves, touched_costs
from rzoo.models.prune import Sizes
from rzoo.train.prune import MEASURED_ROWS, Calibration, Say, losses_of, mean_divergence, prunable


def mode(lm: LM, sizes: Sequence[Sizes]) -> LM:
    """The model run with these sizes of each layer: channels and experts of a token, no groups for no attention."""
    lm = prunable(lm)
    config = mode_config(lm.config, sizes)
    return replace(lm, config=config, params=borrowed(lm.config, lm.params, config, sizes))


def mode_losses(lm: LM, calibration: Calibration, say: Say = lambda *_: None) -> dict[Move, float]:
    """KL(whole ‖ mode) in nats a token of each move alone. Of channels it is that of leaving the least important ones
    out for all tokens, which orders layers alike; of fewer experts it is measured in the mode itself.
    """
    moves = mode_moves(lm.config)
    found = losses_of(lm, calibration, [m for m in moves if m.part != "experts"], refit=False, say=say)
    ids = calibration.rows[:MEASURED_ROWS]
    for move in (m for m in moves if m.part == "experts"):
        found[move] = mean_divergence(lm(ids), mode(lm, move.applied(full(lm.config)))(ids))
    return found


def mode_within(lm: LM, losses: Mapping[Move, float], share: float) -> tuple[LM, tuple[Sizes, ...]]:
    """The mode that touches at most `share` of the parameters that the whole model touches for a token, most
    loss-neutral first, and its sizes. Raises RzooError for a share that is no share, or that no mode reaches.
    """
    if not 0 < share < 1:
        raise RzooError(f"share ({share}) must be above 0 and below 1", field="share", value=share)
    costs, whole = touched_costs(lm.config), full(lm.config)
    sizes, _ = greedy(costs, losses, int(share * costs.of(whole)), whole)
    return mode(lm, sizes), sizes
