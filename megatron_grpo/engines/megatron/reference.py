"""The reference policy of the KL term: a frozen copy of the weights in host memory, swapped in while it scores.

Half the device memory of a second model; each use costs two copies of the weights between host and device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class FrozenWeights:
    """What `module`'s parameters hold at construction."""

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._frozen = [parameter.detach().to("cpu", copy=True) for parameter in module.parameters()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block the module holds the frozen weights; afterwards the ones it had, bit for bit."""
        current = [parameter.detach().clone() for parameter in self._module.parameters()]
        self._write(self._frozen)
        try:
            yield
        finally:
            self._write(current)

    @torch.no_grad()
    def _write(self, weights: list[torch.Tensor]) -> None:
        for parameter, values in zip(self._module.parameters(), weights, strict=True):
            parameter.copy_(values)
