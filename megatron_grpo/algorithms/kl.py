"""Per-token estimators of KL(policy || reference) from d = reference - current log-prob (Schulman, "Approximating KL").

The gradient used is the plain derivative of the estimator, without the score term: with respect to the current
log-prob it is -d for k2 and 1 - e^d for k3, which vanish at the reference. For k1 it is 1 whatever the reference says:
k1 is a metric more than a penalty.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLType = Literal["k1", "k2", "k3"]
KL_TYPES: tuple[KLType, ...] = ("k1", "k2", "k3")


def kl_estimate(
    log_ratio: Tensor, kind: KLType, *, input_clamp: float | None = None, output_clamp: float | None = None
) -> Tensor:
    """`log_ratio` = q - c in any shape; clamped to +-`input_clamp` before and +-`output_clamp` after."""
    d = _clamp(log_ratio, input_clamp)
    if kind == "k1":
        estimate = -d
    elif kind == "k2":
        estimate = 0.5 * d * d
    else:
        estimate = torch.expm1(d) - d
    return _clamp(estimate, output_clamp)


def _clamp(x: Tensor, bound: float | None) -> Tensor:
    return x if bound is None else x.clamp(-bound, bound)
