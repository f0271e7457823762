"""A generation backend of another package runs through the real command line: it is found, refitted and trained on."""

import pytest

from tests.running import REPOSITORY, LiveRun

DISJOINT = REPOSITORY / "recipes/llm/grpo-sort3-1n2g-megatron_async.yaml"
ECHO = ("policy.generation.backend=echo", "grpo.max_num_steps=2", "data.validation=null")


def test_a_backend_found_by_its_entry_point_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests/example_backend"))
    with LiveRun(DISJOINT, tmp_path / "run", *ECHO) as run:
        assert run.wait(180) == 0, run.output
        assert [record["step"] for record in run.records()] == [1, 2]
        assert not (tmp_path / "run/workers/generation-worker-0.log").exists()
        run.wait_for_nothing_left()


@pytest.mark.long
def test_rewards_that_never_differ_end_a_run_with_dynamic_sampling_by_its_key(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests/example_backend"))
    sampling = ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=3")
    with LiveRun(DISJOINT, tmp_path / "run", *ECHO, *sampling) as run:
        assert run.wait(180) == 1, run.output
        assert "grpo.dynamic_sampling_max_gen_batches = 3" in run.output.splitlines()[-1], run.output
        assert run.records() == []
        run.wait_for_nothing_left()
