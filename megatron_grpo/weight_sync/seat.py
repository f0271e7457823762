"""Who sits where in the group that joins a trainer's world and a generator's: trainers first, then generators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A rank's place in the joined group. The rendezvous address is one of joined rank 0's machine."""

    host: str
    port: int
    rank: int
    num_policy: int
    num_generation: int

    @property
    def size(self) -> int:
        return self.num_policy + self.num_generation

    @property
    def sends(self) -> bool:
        return self.rank < self.num_policy
