"""Starts the real command line, watches its files, kills its processes and looks for what it left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
MARK = "MEGATRON_GRPO_TEST_RUN"


class LiveRun:
    """One `megatron-grpo train` in a process group of its own. A context manager: nothing survives the block."""

    def __init__(self, recipe, log_dir, *overrides, start_folder=REPOSITORY):
        self.log_dir = Path(log_dir)
        self.mark = uuid.uuid4().hex
        self.output_path = self.log_dir.with_suffix(".out")
        self._output = self.output_path.open("w")
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megatron_grpo", "train", str(recipe), f"logger.log_dir={log_dir}", *overrides],
            cwd=start_folder,
            env=environment | {MARK: self.mark, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._output.close()
        for pid in [self.process.pid, *self.left_over()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    @property
    def output(self):
        return self.output_path.read_text()

    def records(self):
        """What metrics.jsonl holds so far."""
        path = self.log_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_step(self, step, timeout_s=180):
        deadline = time.monotonic() + timeout_s
        while not any(record["step"] >= step for record in self.records()):
            assert self.process.poll() is None, f"the run ended before step {step}:\n{self.output}"
            assert time.monotonic() < deadline, f"step {step} did not come within {timeout_s} s:\n{self.output}"
            time.sleep(0.1)

    def process_id(self, worker):
        """The process of a worker, from the line with which it started; a log is continued by the next run."""
        log = self.log_dir / "workers" / f"{worker.replace(' ', '-').replace('/', '-')}.log"
        return int(re.findall(r"is process (\d+)", log.read_text())[-1])

    def wait(self, timeout_s=300):
        """The exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {timeout_s} s:\n{self.output[-4000:]}") from None

    def left_over(self):
        """Processes of this run that are still alive, by the mark in their environment (zombies do not count)."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                continue
        return found

    def wait_for_nothing_left(self, timeout_s=20):
        deadline = time.monotonic() + timeout_s
        while left := self.left_over():
            if time.monotonic() > deadline:
                names = [(pid, Path(f"/proc/{pid}/cmdline").read_bytes()[:80]) for pid in left]
                raise AssertionError(f"processes left behind: {names}")
            time.sleep(0.2)
