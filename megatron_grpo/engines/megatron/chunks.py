"""The chunks of the model that a pipeline rank holds, as one module for all that only handles tensors.

An interleaved pipeline gives a rank several runs of layers. Refit, checkpoints and the reference policy see them as one
module whose tensors are called `chunks.K.*`; the schedule runs them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.module import MegatronModule


class InterleavedModel(MegatronModule):
    """Holds a rank's chunks, the earliest first. It is never called: no token passes its chunks in a row."""

    def __init__(self, chunks: Sequence[HybridModel]):
        super().__init__(chunks[0].config)
        self.pg_collection = chunks[0].pg_collection
        self.share_embeddings_and_output_weights = chunks[0].share_embeddings_and_output_weights
        self.chunks = torch.nn.ModuleList(chunks)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata=None) -> ShardedStateDict:
        """What is stored is named by its place in the whole model; only the keys here tell the chunks apart."""
        return {
            f"{prefix}chunks.{number}.{name}": places
            for number, chunk in enumerate(self.chunks)
            for name, places in chunk.sharded_state_dict("", sharded_offsets, metadata).items()
        }


def as_one_module(chunks: Sequence[HybridModel]) -> HybridModel | InterleavedModel:
    return chunks[0] if len(chunks) == 1 else InterleavedModel(chunks)
