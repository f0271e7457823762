"""Milliseconds to save and to restore `replay_buffer.pt`, against plain torch on the same tensors.

    python -m benchmarks.save [groups ...] [--rounds 5] [--folder DIR]        default 1000 10000

Groups of 8 trajectories of 250 tokens. What is compared, both sides once in every round, medians of all rounds:

    save      groups of a live buffer -> `step_N` by CheckpointDirectory: flatten, write, sync, CRC-32, manifest, rename
    plain     torch.save of the flattened tensors and one fsync: no flattening, no digest, torch's own checksums
    restore   verify `step_N` with its digests, load and check the file, groups back in a buffer
    load      torch.load(weights_only=True) of the plain file: tensors only; both read from the page cache

Of a save, training waits for `take`: the buffer hands out its groups and goes on. `flatten` follows in a thread that
keeps the interpreter to itself for most of the time, and the buffer answers late: it counts as stall too, and is timed
apart, on the same groups. `pause` is the longest time in which the buffer's event loop did not run during a save.
Wanted: save / plain at most 1.3. The column behind it leaves the flattening out, which plain is spared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from megatron_grpo.checkpoint.directory import CheckpointDirectory
from megatron_grpo.checkpoint.manifest import REPLAY_BUFFER_NAME
from megatron_grpo.replay.buffer import ReplayBuffer
from megatron_grpo.replay.columns import Columns, to_columns
from megatron_grpo.replay.storage import SavedBuffer, load_buffer, save_buffer
from megatron_grpo.types import Problem, Prompt, Trajectory, TrajectoryGroup

TRAJECTORIES, TOKENS, PROMPT_TOKENS = 8, 250, 50
HEARTBEAT_S = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Seconds."""

    take: float
    flatten: float
    pause: float
    save: float
    plain: float
    restore: float
    load: float


def make_groups(num_groups: int) -> tuple[TrajectoryGroup, ...]:
    """Half of them for step 0, half for step 1; every array has memory of its own, as in a run."""
    random = np.random.default_rng(0)
    return tuple(make_group(ordinal, 2 * ordinal // num_groups, random) for ordinal in range(num_groups))


def make_group(ordinal: int, target_step: int, random: np.random.Generator) -> TrajectoryGroup:
    prompt_ids = random.integers(0, 150_000, PROMPT_TOKENS, np.int32)
    problem = Problem(question=f"What is {ordinal} + {ordinal}?", answer=str(2 * ordinal))
    return TrajectoryGroup(
        ordinal=ordinal,
        prompt=Prompt(ordinal=ordinal, token_ids=tuple(prompt_ids.tolist()), env_name="math", problem=problem),
        trajectories=tuple(make_trajectory(prompt_ids, random) for _ in range(TRAJECTORIES)),
        generation_version=0,
        target_step=target_step,
    )


def make_trajectory(prompt_ids: np.ndarray, random: np.random.Generator) -> Trajectory:
    generated = np.arange(TOKENS) >= PROMPT_TOKENS
    answer = random.integers(0, 150_000, TOKENS - PROMPT_TOKENS, np.int32)
    return Trajectory(
        token_ids=np.concatenate([prompt_ids, answer]),
        loss_mask=generated,
        generation_logprobs=np.where(generated, -random.random(TOKENS, np.float32), 0).astype(np.float32),
        token_versions=np.where(generated, 0, -1).astype(np.int32),
        reward=float(random.integers(0, 2)),
        finish_reason="stop",
    )


def build_buffer(groups: tuple[TrajectoryGroup, ...]) -> ReplayBuffer:
    buffer = ReplayBuffer(
        capacity=len(groups), num_prompts_per_step=len(groups) // 2, max_age=1, sample_timeout_s=600, num_steps=2
    )
    restored = buffer.restore(groups, 0)
    assert len(restored.kept) == len(groups)
    return buffer


async def longest_pause(gaps: list[float]) -> None:
    """Append, for ever, by how much each sleep was longer than it should be."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(HEARTBEAT_S)
        gaps.append(time.perf_counter() - began - HEARTBEAT_S)


async def save(directory: CheckpointDirectory, step: int, buffer: ReplayBuffer) -> tuple[float, float, float]:
    """Seconds until the groups are taken, of the longest pause, and of all; as the buffer's actor and the loop do it."""
    gaps = [0.0]
    heartbeat = asyncio.create_task(longest_pause(gaps))
    await asyncio.sleep(0)
    began = time.perf_counter()
    path = directory.begin(step)
    asked = time.perf_counter()
    saved = SavedBuffer(groups=buffer.groups, last_sampled=buffer.last_sampled, max_size=buffer.size)
    taken = time.perf_counter() - asked
    await asyncio.to_thread(save_buffer, path / REPLAY_BUFFER_NAME, saved)
    await asyncio.to_thread(directory.commit, step)
    seconds = time.perf_counter() - began
    heartbeat.cancel()
    return taken, max(gaps), seconds


def flatten(groups: tuple[TrajectoryGroup, ...]) -> tuple[float, Columns]:
    began = time.perf_counter()
    columns = to_columns(groups)
    return time.perf_counter() - began, columns


def save_plain(path: Path, columns: Columns) -> float:
    began = time.perf_counter()
    with path.open("wb") as file:
        torch.save(columns, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def restore(directory: CheckpointDirectory, step: int) -> float:
    began = time.perf_counter()
    directory.verify(directory.path(step))
    build_buffer(load_buffer(directory.path(step) / REPLAY_BUFFER_NAME).groups)
    return time.perf_counter() - began


def load_plain(path: Path) -> float:
    began = time.perf_counter()
    torch.load(path, map_location="cpu", weights_only=True)
    return time.perf_counter() - began


def measure(directory: CheckpointDirectory, step: int, buffer: ReplayBuffer) -> Round:
    """One round; the side that goes first changes, and the files go afterwards, so that the disk never fills up."""
    plain_path = directory.root / "plain.pt"
    flattening, columns = flatten(buffer.groups)
    plain = save_plain(plain_path, columns) if step % 2 else None
    take, pause, total = asyncio.run(save(directory, step, buffer))
    plain = save_plain(plain_path, columns) if plain is None else plain
    del columns
    measured = Round(
        take=take,
        flatten=flattening,
        pause=pause,
        save=total,
        plain=plain,
        restore=restore(directory, step),
        load=load_plain(plain_path),
    )
    shutil.rmtree(directory.path(step))
    plain_path.unlink()
    return measured


def row(num_groups: int, rounds: list[Round]) -> str:
    """Ratios are medians of each round's own: both sides then saw the same disk."""
    columns = [1000 * statistics.median([getattr(one, field.name) for one in rounds]) for field in fields(Round)]
    ratios = (
        statistics.median([one.save / one.plain for one in rounds]),
        statistics.median([(one.save - one.flatten) / one.plain for one in rounds]),
        statistics.median([one.restore / one.load for one in rounds]),
    )
    return f"{num_groups:6d}" + "".join(f"{ms:10.2f}" for ms in columns) + "".join(f"{one:16.2f}" for one in ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", type=int, nargs="*", default=[1_000, 10_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: that of temporary files")
    arguments = parser.parse_args()
    names = "".join(f"{field.name:>10}" for field in fields(Round))
    print(f"groups{names}{'save / plain':>16}{'but flatten':>16}{'restore / load':>16}   (medians, milliseconds)")
    for num_groups in arguments.groups:
        buffer = build_buffer(make_groups(num_groups))
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            directory = CheckpointDirectory(folder)
            rounds = [measure(directory, step, buffer) for step in range(1, 1 + arguments.rounds)]
        print(row(num_groups, rounds), flush=True)


if __name__ == "__main__":
    main()
