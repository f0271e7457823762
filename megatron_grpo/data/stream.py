"""The prompt stream of index-addressable data: ordinal -> (epoch, position) -> row, a pure function.

Owns the order of the prompts and the replacement of dropped ones. Must not know targets, versions or groups.

An epoch covers all R rows in a fresh order; its first floor(R/P) x P positions are served, the rest are *spare*
(drop_last): a spare position is jumped over, settled as dropped, unless a prompt dropped by a failure is owed a
replacement. A debt that the spares of one epoch cannot pay is carried to the next; the order simply goes on
meanwhile. Example, R = 10, P = 4: ordinals 0-7 are epoch 0, 8-9 its spares, 10-17 epoch 1.

A prompt that was filtered out (dynamic sampling) is owed nothing (`replace=False`): it had its turn, and rows are
what the filter spends. The order goes on, so that epochs pass sooner and the run may end before its last step.
"""

from __future__ import annotations

import dataclasses
import heapq
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError, EndOfData
from ..types import FrontierState, Problem, Prompt
from .frontier import Frontier

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """One usable row of the data, tokenized."""

    token_ids: tuple[int, ...]
    env_name: str
    problem: Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """All that decides which row an ordinal is. Frozen at the start of a run and saved with it, so that another P
    on resume does not move ordinals.

    The order of an epoch is the stable argsort of raw PCG64 draws seeded with (seed, epoch): numpy guarantees those
    draws, but not `Generator.permutation`, to stay the same in later releases.
    """

    num_rows: int
    num_served: int  # rows of an epoch that are trained unless replaced: floor(rows / P) x P
    seed: int
    shuffle: bool

    def epoch_of(self, ordinal: int) -> int:
        return ordinal // self.num_rows

    def is_spare(self, ordinal: int) -> bool:
        return ordinal % self.num_rows >= self.num_served

    def rows_of_epoch(self, epoch: int) -> np.ndarray:
        """Row indices by position, int64 [R]."""
        if not self.shuffle:
            return np.arange(self.num_rows)
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch]))
        return np.argsort(bits.random_raw(self.num_rows), kind="stable")


class PromptStream:
    """Hands out prompts in order (`PromptSource`). Not thread-safe; one event loop owns it.

    `order` is the saved order of a resumed run and wins over seed, shuffle and P. Raises ConfigError when the rows do
    not fill one batch, or are not as many as the saved order says.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        *,
        num_prompts_per_step: int,
        seed: int,
        num_epochs: int | None,
        shuffle: bool = True,
        order: EpochOrder | None = None,
    ):
        self._rows = rows
        self._num_epochs = num_epochs
        self.order = order or _new_order(len(rows), num_prompts_per_step, seed, shuffle)
        if self.order.num_rows != len(rows):
            raise ConfigError(f"the run started with {self.order.num_rows} rows, the data now has {len(rows)}")
        self._frontier = Frontier()
        self._returned: list[int] = []  # heap
        self._num_owed = 0
        self._pending_spares: set[int] = set()
        self._epoch_rows: dict[int, np.ndarray] = {}

    def next_prompt(self) -> Prompt:
        """The next prompt, returned ones first. Raises EndOfData when no row is left (a later failure may still free
        a spare row, so asking again is allowed).
        """
        if self._returned:
            return self._prompt(heapq.heappop(self._returned))
        ordinal = self._next_served()
        if self.order.is_spare(ordinal):
            self._num_owed -= 1
            self._pending_spares.add(ordinal)
        return self._prompt(self._frontier.hand_out())

    def settle_trained(self, ordinals: Sequence[int]) -> None:
        self._frontier.settle_trained(ordinals)
        self._pending_spares.difference_update(ordinals)

    def settle_dropped(self, ordinal: int, reason: str, *, replace: bool = True) -> None:
        """The prompt will not be trained; with `replace`, another row takes its place."""
        self._frontier.settle_dropped(ordinal)
        self._pending_spares.discard(ordinal)
        self._num_owed += replace
        log.info("prompt %d dropped: %s", ordinal, reason)

    def put_back(self, ordinal: int) -> None:
        assert self._frontier.is_pending(ordinal), f"prompt {ordinal} was put back, but it is not pending"
        assert ordinal not in self._returned, f"prompt {ordinal} was put back twice"
        heapq.heappush(self._returned, ordinal)

    @property
    def next_ordinal(self) -> int:
        """The next one that was never handed out."""
        return self._frontier.peek()

    def state(self) -> FrontierState:
        """As saved. Replacements that are still in flight count as owed: they are pending, like what they replace."""
        num_owed = self._num_owed + len(self._pending_spares)
        return dataclasses.replace(self._frontier.state(), num_owed=num_owed)

    def restore(self, state: FrontierState, held: Iterable[int]) -> None:
        """Continue a saved run; `held` are the ordinals of the groups that the buffer restored.

        Raises ValueError when a held ordinal is settled.
        """
        held = tuple(held)
        self._frontier = Frontier.restore(state, held)
        self._returned = []
        self._pending_spares = {ordinal for ordinal in held if self.order.is_spare(ordinal)}
        self._num_owed = state.num_owed - len(self._pending_spares)

    def _next_served(self) -> int:
        """The next ordinal to hand out, jumping over spare rows that replace nothing."""
        while True:
            ordinal = self._frontier.peek()
            epoch = self.order.epoch_of(ordinal)
            if self._num_epochs is not None and epoch >= self._num_epochs:
                raise EndOfData(f"all {self._num_epochs} epochs of {len(self._rows)} rows are used up")
            if not self.order.is_spare(ordinal) or self._num_owed:
                return ordinal
            # The last epoch's spares stay: a group that is still running may fail and need one.
            if epoch + 1 == self._num_epochs:
                raise EndOfData(f"{self._num_epochs} epochs of {self.order.num_served} rows are used up")
            self._frontier.settle_dropped(self._frontier.hand_out())

    def _prompt(self, ordinal: int) -> Prompt:
        epoch = self.order.epoch_of(ordinal)
        if epoch not in self._epoch_rows:
            self._epoch_rows[epoch] = self.order.rows_of_epoch(epoch)
            for old in [known for known in self._epoch_rows if known < epoch - 1]:
                del self._epoch_rows[old]
        row = self._rows[int(self._epoch_rows[epoch][ordinal % self.order.num_rows])]
        return Prompt(ordinal=ordinal, token_ids=row.token_ids, env_name=row.env_name, problem=row.problem)


def _new_order(num_rows: int, num_prompts_per_step: int, seed: int, shuffle: bool) -> EpochOrder:
    num_served = num_rows // num_prompts_per_step * num_prompts_per_step
    if num_served == 0:
        raise ConfigError(
            f"the data has {num_rows} usable rows, fewer than grpo.num_prompts_per_step = {num_prompts_per_step}: "
            "no batch can be filled; add rows or lower it"
        )
    return EpochOrder(num_rows=num_rows, num_served=num_served, seed=seed, shuffle=shuffle)
