"""Where each tensor of a rank's model belongs in the whole model: its name there, and how it is cut.

Megatron's own description (`ParameterMetadata`) is used as it is, but for three repairs. Experts kept in a list (`SequentialMLP`,
parameters `local_experts.K.*`) stay under their local number there, where those of `TEGroupedMLP` (`weightK`) get their
global one. Between expert-parallel sizes the same name would then mean another expert: 1 -> 2 ranks moved wrong experts
without an error. Chunks of an interleaved pipeline are told apart by their layers only. And the copy of a tied embedding
on the last stage of a pipeline has the name of what it is a copy of.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.resharding import ParameterMetadata
from megatron.core.resharding.utils import (
    _build_layer_module_prefix_map,
    extract_param_metadata,
    get_refit_tensor_dict,
    named_refit_tensors,
)
from megatron.core.transformer.module import MegatronModule

from .fingerprint import Cut, ShardSum, Weighing

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_CHUNK = re.compile(r"^chunks\.\d+\.")
_LISTED_EXPERT = re.compile(r"(?P<before>.*\.local_experts\.)(?P<local>\d+)(?P<after>\..*)")


def tensor_places(module: MegatronModule, owner: int, rank_offset: int = 0) -> list[ParameterMetadata]:
    """The place of every parameter and persistent buffer of the unwrapped `module`.

    `owner` is this rank's number in the group that moves weights; `rank_offset` the number there of rank 0 of its own
    world. Layers and experts are numbered globally in `resolved_name`.
    """
    prefixes, ranks_seen = _build_layer_module_prefix_map(module), {}
    found = []
    for name, tensor in named_refit_tensors(module):
        place = extract_param_metadata(
            tensor,
            name,
            owner,
            module.pg_collection,
            num_experts=module.config.num_moe_experts,
            layer_module_prefix_map=prefixes,
            rank_offset=rank_offset,
            _rank_list_cache=ranks_seen,  # lists shared between tensors are pickled once
        )
        place.resolved_name = _CHUNK.sub("", place.resolved_name)
        if place.resolved_name == OUTPUT and module.share_embeddings_and_output_weights:
            place.resolved_name = EMBEDDING
        _number_experts(place, module.pg_collection, rank_offset)
        found.append(place)
    return found


def _number_experts(place: ParameterMetadata, groups, rank_offset: int) -> None:
    """Give an expert of a list its global number and the groups of experts; other tensors are left alone.

    Rank i of the expert-parallel group holds experts i x n .. i x n + n - 1.  E.g. 4 experts on 2 ranks: rank 1 knows
    expert 2 as `local_experts.0`.
    """
    expert = _LISTED_EXPERT.fullmatch(place.resolved_name)
    if expert is None:
        return

    def ranks_of(group: dist.ProcessGroup) -> list[int]:
        return [rank + rank_offset for rank in dist.get_process_group_ranks(group)]

    holders = ranks_of(groups.ep)
    number = holders.index(place.owner_rank) * (place.num_experts // len(holders)) + int(expert["local"])
    place.global_expert_index = number
    place.resolved_name = f"{expert['before']}{number}{expert['after']}"
    place.expert_parallel_group_ranks = holders
    place.tensor_parallel_group_ranks = ranks_of(groups.expt_tp)
    # Replicas of an expert: the dense group would pass a rank that holds another expert for one of them.
    place.data_parallel_group_ranks = ranks_of(groups.expt_dp)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tensor:
    """What stays the same of one tensor from one fingerprint to the next."""

    name: str
    whole_name: str
    cut: Cut
    weighing: Weighing


class ModuleSums:
    """Checksums of this rank's tensors by their names in the whole model; where they belong is found out once."""

    def __init__(self, module: MegatronModule, owner: int, rank_offset: int = 0):
        self._module = module
        tensors = get_refit_tensor_dict(module)
        self._tensors = [
            _Tensor(
                name=place.name,
                whole_name=place.resolved_name,
                cut=(cut := _cut(place)),
                weighing=Weighing(place.shape, cut, tensors[place.name].device),
            )
            for place in tensor_places(module, owner, rank_offset)
        ]

    def now(self) -> dict[str, ShardSum]:
        """What the tensors hold at this moment: one pass over them."""
        held, sums = get_refit_tensor_dict(self._module), {}
        for one in self._tensors:
            value = one.weighing.checksum(held[one.name])
            sums[one.whole_name] = ShardSum(index=one.cut.index, count=one.cut.count, value=value)
        return sums


def _cut(place: ParameterMetadata) -> Cut:
    if not place.is_tp:
        return Cut()
    ranks = place.tensor_parallel_group_ranks
    return Cut(
        index=ranks.index(place.owner_rank),
        count=len(ranks),
        dim=place.partition_dim,
        stride=place.partition_stride,
    )
