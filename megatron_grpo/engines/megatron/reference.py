"""The reference policy of the KL term: a frozen copy of the weights in host memory, swapped in while it scores.

Half the device memory of a second model; each use costs two copies of the weights between host and device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch


class FrozenWeights:
    """What `module`'s parameters hold at construction; `weights` has them by name, in host memory."""

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self.weights = {name: _host_copy(parameter) for name, parameter in module.named_parameters()}

    def replace(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Hold copies of `weights` instead: one tensor for each name there is."""
        self.weights = {name: _host_copy(weights[name]) for name in self.weights}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block the module holds the frozen weights; afterwards the ones it had, bit for bit."""
        current = [parameter.detach().clone() for parameter in self._module.parameters()]
        self._write(self.weights.values())
        try:
            yield
        finally:
            self._write(current)

    @torch.no_grad()
    def _write(self, weights: Iterable[torch.Tensor]) -> None:
        for parameter, values in zip(self._module.parameters(), weights, strict=True):
            parameter.copy_(values)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
