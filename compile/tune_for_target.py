"""`rzoo tune MODEL --gpu h100`: forms chosen by what the programs compiled for it read, write and launch."""

from typing import Any

from rzoo.compile.targets import Target

LAUNCH_SECONDS = 1.5e-6  # what a kernel costs beside its bytes where a command buffer launches it; modelled


def step_seconds(gpu: Target, part: Any) -> float:
    """Modelled seconds of one run of a program that target_programs.read tells of: its bytes and its launches."""
    return (part["read"] + part["written"]) / gpu.bandwidth + part["launches"] * LAUNCH_SECONDS
