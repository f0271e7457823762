"""Constants that layers derive from their weights for decoding, and keep."""

from __future__ import annotations

from megatron.core.ssm.mamba_mixer import MambaMixer
from torch import nn


def mark_stale(module: nn.Module) -> None:
    """Make Mamba layers derive -exp(A_log) again at their next decode step.

    They do so by themselves only after a phase in training mode: under weights that arrived in evaluation mode,
    prefill was right and every decode step wrong.
    """
    for layer in module.modules():
        if isinstance(layer, MambaMixer):
            layer._A_neg_exp_cache_stale = True
