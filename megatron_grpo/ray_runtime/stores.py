"""What a save reads from and a resume writes to, over actor handles: policy ranks and the replay buffer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .actors import RestoredGroups
from .clients import all_answers
from .supervision import Named, answer


class RayPolicyStore:
    """`checkpoint.saving.PolicyStore` over all policy ranks: their collectives meet."""

    def __init__(self, ranks: Sequence[Named]):
        self._ranks = ranks

    async def begin_save(self, path: Path) -> None:
        await all_answers(self._ranks, "begin_save", path)

    async def finish_save(self, *, blocking: bool) -> bool:
        return all(await all_answers(self._ranks, "finish_save", blocking))

    async def load(self, path: Path) -> None:
        """Before the engine starts."""
        await all_answers(self._ranks, "load_checkpoint", path)


class RayBufferStore:
    """`checkpoint.saving.BufferStore` over the buffer actor, which reads and writes the file itself."""

    def __init__(self, actor: Named):
        self._actor = actor

    async def begin_save(self, path: Path, *, with_ordinals: bool) -> None:
        await answer(self._actor, self._actor.handle.begin_save.remote(path, with_ordinals=with_ordinals))

    async def finish_save(self) -> None:
        await answer(self._actor, self._actor.handle.finish_save.remote())

    async def restore(self, path: Path | None, resume_step: int) -> RestoredGroups:
        return await answer(self._actor, self._actor.handle.restore.remote(path, resume_step))
