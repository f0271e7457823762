"""The ledger survives kills at any byte, stays small, and says what happened."""

import os
import shutil

import pytest

from megatron_grpo.data.ledger import Ledger, read_segments
from megatron_grpo.data.recorded import RecordedPrompts
from megatron_grpo.data.segment import RunStart, Segment, from_ranges, to_ranges
from megatron_grpo.errors import CheckpointError
from megatron_grpo.types import DroppedPrompt
from tests.fakes import make_group, make_prompt, make_trajectory


def start(attempt=1, step=0):
    return RunStart(attempt=attempt, start_step=step, cut=0, held=(3,), num_rows=100, num_served=100)


def write_step(ledger, step, *, num_prompts=2):
    ordinals = range(step * num_prompts, (step + 1) * num_prompts)
    for ordinal in ordinals:
        ledger.handed_out(ordinal)
        ledger.generated(make_group(ordinal, step, step, (make_trajectory([step, step]),)))
    ledger.trained(step, ordinals)


def written(folder, num_steps, **options):
    ledger = Ledger(folder, **options)
    ledger.run_started(start(), {})
    for step in range(num_steps):
        write_step(ledger, step)
        ledger.saving(step + 1)
    ledger.close()
    return folder


def test_what_was_written_is_read_back(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    ledger.run_started(start(), {3: 7})
    ledger.handed_out(4)
    ledger.generated(make_group(4, 9, 9, (make_trajectory([9, 8]), make_trajectory([9], masked_because="reward"))))
    ledger.dropped(5, "zero_variance")
    ledger.returned([6, 7])
    ledger.returned([])
    ledger.trained(9, [3, 4])
    ledger.saving(10)
    ledger.handed_out(8)
    ledger.close()
    first, second = read_segments(tmp_path / "ledger")
    assert first == Segment(
        start=start(),
        handed_out=[4],
        trained=[3, 4],
        steps=[9],
        dropped=[DroppedPrompt(ordinal=5, reason="zero_variance")],
        num_returned=2,
        num_generated=1,
        oldest_age=2,  # the restored group; of prompt 4 the oldest token is of version 8
        saved_step=10,
    )
    assert second == Segment(handed_out=[8])


def test_the_events_name_versions_lengths_and_mean_reward(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    ledger.generated(make_group(4, 9, 9, (make_trajectory([9, 8]), make_trajectory([9], masked_because="reward"))))
    ledger.close()
    lines = (tmp_path / "ledger" / "segment_000001.jsonl").read_text()
    assert lines == '{"gen":4,"v":[8,9],"len":[2,1],"r":0.0}\n'


def test_a_finished_step_can_be_read_while_the_run_goes_on(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    write_step(ledger, 0)
    assert read_segments(tmp_path / "ledger")[0].trained == [0, 1]


def ascending(segments):
    """A line of the history forgets the order inside it."""
    return [(one.start, sorted(one.handed_out), sorted(one.trained), one.steps, one.saved_step) for one in segments]


def test_old_segments_become_lines_that_say_the_same(tmp_path):
    detailed = read_segments(written(tmp_path / "detailed", 8, num_detailed=100))
    summed_up = read_segments(written(tmp_path / "summed_up", 8, num_detailed=2))
    assert ascending(detailed) == ascending(summed_up)
    assert [one.oldest_age for one in detailed] == [one.oldest_age for one in summed_up]
    assert len(list((tmp_path / "summed_up").glob("segment_*"))) == 3
    assert len((tmp_path / "summed_up" / "history.jsonl").read_text().splitlines()) == 6


def test_the_size_grows_by_one_short_line_per_checkpoint(tmp_path):
    folder = written(tmp_path / "ledger", 60, num_detailed=2)
    total = sum(path.stat().st_size for path in folder.iterdir())
    assert (folder / "history.jsonl").stat().st_size < 60 * 220 and total < 60 * 220 + 3 * 400


def test_a_ledger_without_saves_is_bounded_too(tmp_path):
    ledger = Ledger(tmp_path / "ledger", num_detailed=1, max_segment_bytes=2000)
    for step in range(200):
        write_step(ledger, step, num_prompts=4)
    ledger.close()
    assert sum(path.stat().st_size for path in (tmp_path / "ledger").glob("segment_*")) < 5000
    segments = read_segments(tmp_path / "ledger")
    assert [step for one in segments for step in one.steps] == list(range(200))
    assert sorted(ordinal for one in segments for ordinal in one.trained) == list(range(800))


def test_a_new_run_appends_a_segment_and_sums_up_the_old_ones(tmp_path):
    folder = written(tmp_path / "ledger", 3, num_detailed=9)
    ledger = Ledger(folder, num_detailed=1)
    assert ledger.next_attempt == 2
    ledger.run_started(start(2, 3), {})
    ledger.close()
    segments = read_segments(folder)
    assert [one.saved_step for one in segments] == [1, 2, 3, None, None]
    assert segments[-1].start == start(2, 3)
    assert len(list(folder.glob("segment_*"))) == 2


def test_a_line_torn_at_any_byte_is_ignored_and_the_next_run_goes_on(tmp_path):
    folder = written(tmp_path / "whole", 1, num_detailed=9)
    last = folder / "segment_000001.jsonl"
    data = last.read_bytes()
    for length in range(data.rfind(b"\n", 0, -1) + 1, len(data)):
        copy = tmp_path / f"torn{length}"
        shutil.copytree(folder, copy)
        os.truncate(copy / last.name, length)
        Ledger(copy, num_detailed=0).close()
        assert read_segments(copy)[0].trained == [0, 1]
        assert read_segments(copy)[0].saved_step is None


def test_a_history_torn_at_any_byte_loses_nothing_while_the_events_are_there(tmp_path):
    detailed = written(tmp_path / "detailed", 2, num_detailed=9)
    line = (written(tmp_path / "summed_up", 2, num_detailed=0) / "history.jsonl").read_bytes().splitlines(True)[0]
    for length in range(len(line) + 1):
        copy = tmp_path / f"torn{length}"
        shutil.copytree(detailed, copy)
        (copy / "history.jsonl").write_bytes(line[:length])
        expected = ascending(read_segments(detailed))
        assert ascending(read_segments(copy)) == expected
        Ledger(copy, num_detailed=1).close()
        assert ascending(read_segments(copy))[:3] == expected
        assert not (copy / "segment_000001.jsonl").exists()


def test_a_damaged_line_is_named(tmp_path):
    folder = written(tmp_path / "ledger", 1)
    path = folder / "segment_000001.jsonl"
    lines = path.read_text().splitlines(True)
    for bad in ("nonsense\n", '{"who": 3}\n', "[]\n", '{"run": {"attempt": 1}}\n'):
        path.write_text("".join([*lines[:2], bad, *lines[2:]]))
        with pytest.raises(CheckpointError, match=r"segment_000001.jsonl line 3 is damaged"):
            read_segments(folder)


def test_a_full_disk_is_explained(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "ledger")

    def refuse(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CheckpointError, match="ledger.*cannot be written.*make room"):
        ledger.saving(1)


@pytest.mark.parametrize("ordinals", [[], [3], [1, 2, 3, 7], [4, 5, 5, 6], [5, 4, 9, 5, 5]])
def test_ranges_keep_every_occurrence(ordinals):
    assert sorted(from_ranges(to_ranges(ordinals))) == sorted(ordinals)


class Prompts:
    def __init__(self):
        self.told = []

    def next_prompt(self):
        return make_prompt(4)

    def settle_trained(self, ordinals):
        self.told.append(("trained", ordinals))

    def settle_dropped(self, ordinal, reason, *, replace=True):
        self.told.append(("dropped", ordinal, reason, replace))

    def put_back(self, ordinal):
        self.told.append(("back", ordinal))

    def state(self):
        return "the state"


def test_recorded_prompts_pass_everything_on_and_write_it_down(tmp_path):
    inner, ledger = Prompts(), Ledger(tmp_path / "ledger")
    prompts = RecordedPrompts(inner, ledger)
    assert prompts.next_prompt() == make_prompt(4) and prompts.state() == "the state"
    prompts.settle_trained([1])
    prompts.settle_dropped(2, "zero_variance", replace=False)
    prompts.put_back(3)
    assert inner.told == [("trained", [1]), ("dropped", 2, "zero_variance", False), ("back", 3)]
    ledger.close()
    (segment,) = read_segments(tmp_path / "ledger")
    assert (segment.handed_out, segment.num_returned) == ([4], 1)
    assert segment.dropped == [DroppedPrompt(ordinal=2, reason="zero_variance")]
