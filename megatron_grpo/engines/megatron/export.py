"""The trained weights as whole Hugging Face tensors, one parameter at a time, on rank 0 of the trainer's world.

Walking through them is collective: for every parameter the ranks that hold shards of one copy gather it, and where
rank 0 is not among them it is sent there. No rank ever holds more than one whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from ...conversion.mapping import Weight, WeightMapping, global_name
from ...weight_sync.wire import TensorMeta


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """What a rank tells of one of its parameters. `ranks` hold the shards of the same copy, in order."""

    dtype: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]  # of the whole parameter, padding of the vocabulary included


class WeightExport:
    """One rank's part. Construction is collective over the world, as is every walk; weights are read when they come.

    Raises ConversionError for a parameter that the mapping does not know, or a weight that no rank holds.
    """

    def __init__(self, module: MegatronModule, mapping: WeightMapping):
        self._rank = dist.get_rank()
        self._mapping = mapping
        self._parameters = dict(_named(module, mapping))
        groups = module.pg_collection
        self._groups = {False: groups.tp, True: groups.expt_tp}
        mine = {name: self._describe(mapping.of(name), parameter) for name, parameter in self._parameters.items()}
        everyone: list[dict[str, _Held]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        self._held: dict[str, _Held] = {}
        for of_rank in everyone:  # the lowest rank that holds a parameter speaks for it
            self._held = of_rank | self._held
        if absent := [weight.name for weight in mapping.weights if weight.name not in self._held]:
            raise RuntimeError(f"no rank of the trainer holds {absent[0]} ({len(absent)} such parameters)")

    @property
    def manifest(self) -> list[TensorMeta]:
        """What a walk yields, in its order."""
        return [
            TensorMeta(name=name, dtype=self._held[weight.name].dtype, shape=shape)
            for weight in self._mapping.weights
            for name, shape in weight.hf.items()
        ]

    def walk(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in the order of the manifest on rank 0; nothing on the others, which must walk too."""
        with torch.no_grad():
            for weight in self._mapping.weights:
                whole = self._whole(weight)
                if whole is not None:
                    yield from weight.to_hf(whole).items()

    def _whole(self, weight: Weight) -> Tensor | None:
        """The parameter on rank 0; None on the others."""
        ranks = self._held[weight.name].ranks
        if self._rank not in ranks:
            return self._arrived(weight, ranks[0]) if self._rank == 0 else None
        own = self._parameters[weight.name].detach()
        whole = weight.gather(self._shards(own, weight)) if len(ranks) > 1 else own
        if ranks[0] == 0:
            return whole if self._rank == 0 else None
        if self._rank == ranks[0]:
            dist.send(whole.contiguous(), 0)
        return None

    def _shards(self, own: Tensor, weight: Weight) -> list[Tensor]:
        group = self._groups[weight.is_expert]
        shards = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(shards, own.contiguous(), group=group)
        return shards

    def _arrived(self, weight: Weight, source: int) -> Tensor:
        held = self._held[weight.name]
        device = next(iter(self._parameters.values())).device
        whole = torch.empty(held.shape, dtype=getattr(torch, held.dtype), device=device)
        dist.recv(whole, source)
        return whole

    def _describe(self, weight: Weight, parameter: Tensor) -> _Held:
        ranks = dist.get_process_group_ranks(self._groups[weight.is_expert])
        whole = weight.shape
        if weight.is_vocabulary:
            whole = (parameter.shape[0] * len(ranks), *whole[1:])
        return _Held(dtype=str(parameter.dtype).removeprefix("torch."), ranks=tuple(ranks), shape=whole)


def _named(module: MegatronModule, mapping: WeightMapping) -> Iterator[tuple[str, Tensor]]:
    """This rank's parameters by their names in the whole model, without repetitions of tied ones."""
    decoder = module.decoder
    numbers = [layer.layer_number - 1 for layer in decoder.layers]
    first_expert = _first_expert(module)
    for local_name, parameter in module.named_parameters():
        name = global_name(local_name, numbers, first_expert)
        if not mapping.is_copy(name):
            yield mapping.of(name).name, parameter


def _first_expert(module: MegatronModule) -> int:
    num_experts = module.config.num_moe_experts
    if not num_experts:
        return 0
    group = module.pg_collection.ep
    return group.rank() * (num_experts // group.size())
