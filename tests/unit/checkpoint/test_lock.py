import os
import socket
import subprocess
import sys

import pytest

from megatron_grpo.checkpoint.lock import run_lock
from megatron_grpo.errors import CheckpointError

HOLD = """
import sys
from pathlib import Path
from megatron_grpo.checkpoint.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_naming_host_and_process_until_the_first_is_gone(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        named = f"process {holder.pid} on host {socket.gethostname()}"
        with pytest.raises(CheckpointError, match=named), run_lock(tmp_path):
            raise AssertionError("not reached")
    finally:
        holder.kill()
        holder.communicate()
    with run_lock(tmp_path):  # a killed run leaves no lock
        assert str(os.getpid()) in (tmp_path / ".lock").read_text()


def test_the_lock_can_be_taken_again(tmp_path):
    for _ in range(2):
        with run_lock(tmp_path / "new" / "directory"):
            pass


def test_a_directory_that_cannot_be_made_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="no run can start in"), run_lock(tmp_path / "file"):
        pass


def test_the_message_names_the_setting_that_chose_the_directory(tmp_path):
    wanted = pytest.raises(CheckpointError, match="set logger.log_dir to another")
    with run_lock(tmp_path), wanted, run_lock(tmp_path, "logger.log_dir"):
        raise AssertionError("two runs hold one directory")
