"""kill -9 of any process, at any time, and during saves; each time the same command again, and `verify` at the end.

Prints who was killed at which step, and the seconds from the kill to the first step of the next run. `KILLS=1 pytest
tests/acceptance/test_kills.py` kills once in either test; `KILLS_SEED` repeats the choices of an earlier run (not its
moments to the millisecond).
"""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.ray.test_end_to_end import DISJOINT, NUM_PROMPTS
from tests.ray.test_resume import NEEDED, finish, start, verify

NUM_KILLS = int(os.environ.get("KILLS", "20"))
NUM_KILLS_IN_A_SAVE = min(NUM_KILLS, 5)
SEED = int(os.environ.get("KILLS_SEED", random.randrange(2**32)))
STEPS_PER_KILL = 14  # the most that a run trains before it is killed, and a few
START_SHARE, START_S = 0.25, 12.0  # so many of the kills come while a run starts, which takes about so long
DRIVER = "driver"

pytestmark = pytest.mark.timeout(120 * (NUM_KILLS + 2))


class Kills:
    """One run, started again and again. `tell` prints past pytest's capture."""

    def __init__(self, folder, num_kills, tell):
        self._folder = folder
        self.num_steps = STEPS_PER_KILL * (num_kills + 1)
        self.overrides = (f"grpo.max_num_steps={self.num_steps}", "checkpointing.save_period=2")
        self._tell = tell
        self._killed_at = None  # until the next run has trained a step

    def start(self):
        return start(DISJOINT, self._folder, *self.overrides)

    def kill(self, run, victim, when=""):
        """`victim`, or the driver where that one has not started yet. The run must end, and leave nothing behind."""
        process_id = process_of(run, victim)
        if process_id is None:
            victim, process_id = DRIVER, run.process.pid
        assert run.process.poll() is None, f"the run ended before the kill of {victim}:\n{run.output[-4000:]}"
        os.kill(process_id, signal.SIGKILL)
        step = last_step(run)
        killed_at = time.monotonic()
        assert run.wait(90) != 0, f"seed {SEED}, {victim}:\n{run.output[-4000:]}"
        run.wait_for_nothing_left(60)
        self._tell(f"killed {victim} after step {step}{when}; all gone {time.monotonic() - killed_at:.1f} s later")
        self._killed_at = killed_at if self._killed_at is None else self._killed_at

    def wait_for_new_steps(self, run, number):
        """Steps that this run trained itself: before its workers start, it cuts the records back to its checkpoint."""
        wait_until(run, lambda: "workers ready" in run.output)
        first = last_step(run) + 1
        wait_until(run, lambda: last_step(run) >= first)
        if self._killed_at is not None:
            self._tell(f"    step {first} trained {time.monotonic() - self._killed_at:.1f} s after the kill")
            self._killed_at = None
        wait_until(run, lambda: last_step(run) >= first + number - 1)

    def finish(self):
        """To the end, which proves that nothing was skipped or trained twice."""
        output, records = finish(DISJOINT, self._folder, *self.overrides)
        assert [record["step"] for record in records] == list(range(1, self.num_steps + 1)), f"seed {SEED}"
        proof = verify(self._folder)
        self._tell(f"verify: {proof}")
        assert proof["exit_code"] == 0 and proof["num_trained"] == self.num_steps * NUM_PROMPTS, f"seed {SEED}"
        assert not proof["dropped"] and proof["oldest_age"] <= 1, f"seed {SEED}: {proof}"
        return output


@pytest.fixture
def tell(capsys):
    def show(line):
        with capsys.disabled():
            print(f"\n{line}", end="", flush=True)

    show(f"seed {SEED}")
    return show


def test_no_prompt_is_lost_or_repeated_whichever_process_is_killed_whenever(tmp_path, tell):
    draw, kills = random.Random(SEED), Kills(tmp_path, NUM_KILLS, tell)
    for _ in range(NUM_KILLS):
        with kills.start() as run:
            victim = draw.choice([DRIVER, *NEEDED])
            starting, steps, seconds = draw.random() < START_SHARE, draw.randint(1, 8), draw.random()
            if starting:
                time.sleep(START_S * seconds)
            else:
                kills.wait_for_new_steps(run, steps)
                time.sleep(seconds)
            kills.kill(run, victim, ", while it started" if starting else "")
    kills.finish()


def test_a_save_cut_off_leaves_the_checkpoint_before_it(tmp_path, tell):
    draw, kills, cut_off = random.Random(SEED), Kills(tmp_path, NUM_KILLS_IN_A_SAVE, tell), 0
    for _ in range(NUM_KILLS_IN_A_SAVE):
        with kills.start() as run:
            kills.wait_for_new_steps(run, draw.randint(1, 4))
            wait_until(run, lambda: saves_under_way(tmp_path), pause_s=0.002)
            before = checkpoints(tmp_path)
            time.sleep(draw.uniform(0, 0.03))
            kills.kill(run, DRIVER, ", during a save")
        left = saves_under_way(tmp_path)
        cut_off += bool(left)
        tell(f"    left {left or 'nothing'}, last checkpoints {before[-1:]} -> {checkpoints(tmp_path)[-1:]}")
        assert left or checkpoints(tmp_path) != before, "neither the save nor its remains"
    assert cut_off, "every save was faster than its kill"
    kills.finish()
    assert saves_under_way(tmp_path) == []


def process_of(run, victim):
    """None: it has not started in this run, whose log goes on behind that of the last."""
    if victim == DRIVER:
        return run.process.pid
    try:
        process_id = run.process_id(victim)
    except (FileNotFoundError, IndexError):
        return None
    return process_id if process_id in run.left_over() else None


def last_step(run):
    """Also while the file is being written."""
    path = run.log_dir / "metrics.jsonl"
    return max(map(int, re.findall(r'"step": (\d+)', path.read_text())), default=0) if path.exists() else 0


def checkpoints(folder: Path):
    """Their steps."""
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))


def saves_under_way(folder: Path):
    return sorted(path.name for path in (folder / "checkpoints").glob("tmp_step_*"))


def wait_until(run, happened, *, pause_s=0.1, timeout_s=180):
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert run.process.poll() is None, f"seed {SEED}: the run ended by itself:\n{run.output[-4000:]}"
        assert time.monotonic() < deadline, f"seed {SEED}: nothing happened within {timeout_s} s:\n{run.output[-4000:]}"
        time.sleep(pause_s)
