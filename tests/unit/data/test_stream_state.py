"""From where a resumed run continues: the frontier, or the live cursor with its reason."""

import dataclasses
import json
import logging

import pytest

from megatron_grpo.data.stream import EpochOrder, PromptRow, PromptStream
from megatron_grpo.data.stream_state import (
    StreamState,
    check_same_rows,
    frontier_at,
    reason_unstampable,
    resume_point,
    rows_digest,
    stream_state_from_json,
)
from megatron_grpo.data.unaligned import UnalignedPrompts
from megatron_grpo.errors import CheckpointError, ConfigError
from megatron_grpo.types import FrontierState, LiveCursor, Problem

FRONTIER = FrontierState(cut=4, frontier=9, trained_above_cut=(6, 8), dropped_above_cut=(7,), num_owed=1)
ALIGNED = StreamState(
    order=EpochOrder(num_rows=20, num_served=20, seed=7, shuffle=True),
    cursor=12,
    frontier=FRONTIER,
    unaligned_because=None,
    rows_digest="abc",
)
LEGACY = dataclasses.replace(ALIGNED, frontier=None)


def row(number):
    return PromptRow(token_ids=(1, number), env_name="fake", problem=Problem(question=f"q{number}", answer="a"))


ROWS = [row(number) for number in range(20)]


@pytest.mark.parametrize("state", [ALIGNED, LEGACY, dataclasses.replace(LEGACY, unaligned_because="why")])
def test_a_state_comes_back_from_its_json(state):
    assert stream_state_from_json(state.to_json(), "file") == state


def test_a_state_without_the_frontier_entries_is_one_without_alignment():
    record = json.loads(ALIGNED.to_json())
    del record["frontier"], record["unaligned_because"]
    assert stream_state_from_json(json.dumps(record), "file") == LEGACY


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format_version": 2}, "format version 2"),
        ({"cursor": -1}, "-1 is not a whole number"),
        ({"cursor": "4"}, "'4' is not a whole number"),
        ({"order": {"num_rows": 3}}, "damaged: TypeError"),
        ({"frontier": {"cut": 3}}, "damaged: KeyError: 'frontier'"),
    ],
)
def test_a_wrong_entry_is_named_with_the_file(change, named):
    text = json.dumps(json.loads(ALIGNED.to_json()) | change)
    with pytest.raises(CheckpointError, match=f"prompts.json.*{named}"):
        stream_state_from_json(text, "prompts.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", "3"])
def test_a_foreign_file_is_named(text):
    with pytest.raises(CheckpointError, match="prompts.json is not the state of a prompt stream"):
        stream_state_from_json(text, "prompts.json")


@pytest.mark.parametrize("buffer", ["with_ordinals", "absent", "not_loaded"])
def test_a_frontier_decides_with_any_buffer_that_has_ordinals(buffer):
    assert resume_point(ALIGNED, buffer, "step_5") == FRONTIER


@pytest.mark.parametrize("buffer", ["without_ordinals", "absent", "not_loaded"])
def test_legacy_neither_frontier_nor_ordinals_continues_at_the_live_cursor(buffer):
    point = resume_point(LEGACY, buffer, "step_5")
    assert isinstance(point, LiveCursor) and point.position == 12
    assert "neither a data frontier nor ordinals" in point.reason
    assert ("are lost" in point.reason) == (buffer == "not_loaded")


def test_the_descendants_of_an_unaligned_run_stay_unaligned_with_its_reason():
    child = dataclasses.replace(LEGACY, unaligned_because="the first reason", cursor=40)
    assert resume_point(child, "without_ordinals", "step_9") == LiveCursor(position=40, reason="the first reason")


@pytest.mark.parametrize(
    ("state", "buffer", "named"),
    [
        (ALIGNED, "without_ordinals", "step_5 is damaged: it has a data frontier, but its buffer has no ordinals"),
        (LEGACY, "with_ordinals", "step_5 is damaged: its buffer has ordinals, but the data frontier is missing"),
    ],
)
def test_only_one_of_frontier_and_ordinals_is_damage(state, buffer, named):
    with pytest.raises(CheckpointError, match=named):
        resume_point(state, buffer, "step_5")


@pytest.mark.parametrize(("info", "named"), [({}, None), ({"a": 1}, None), (None, "NoneType"), ([1], "list")])
def test_only_a_mapping_can_carry_an_ordinal(info, named):
    reason = reason_unstampable(info)
    assert reason is None if named is None else named in reason


def stream():
    return PromptStream(ROWS, num_prompts_per_step=4, seed=7, num_epochs=None, order=ALIGNED.order)


def test_an_unaligned_run_goes_on_behind_everything_that_was_handed_out(caplog):
    cursor = LiveCursor(position=12, reason="no frontier")
    restored = stream()
    restored.restore(frontier_at(cursor), held=())
    with caplog.at_level(logging.WARNING):
        prompts = UnalignedPrompts(restored, cursor)
    assert caplog.text.count("data alignment is off") == 1 and "no frontier" in caplog.text
    assert [prompts.next_prompt().ordinal for _ in range(3)] == [12, 13, 14]
    prompts.settle_trained([-1, 12, -2])  # two groups of a buffer without ordinals, one of this run
    prompts.put_back(-3)
    prompts.put_back(13)
    assert prompts.next_prompt().ordinal == 13
    assert prompts.state() == LiveCursor(position=15, reason="no frontier")


# Another data set


def test_the_same_rows_pass_and_others_are_refused():
    state = dataclasses.replace(ALIGNED, rows_digest=rows_digest(ROWS))
    check_same_rows(state, num_rows=20, digest=rows_digest(list(ROWS)))
    with pytest.raises(ConfigError, match="has 6 usable rows, the run started with 20"):
        check_same_rows(state, num_rows=6, digest=rows_digest(ROWS[:6]))
    with pytest.raises(ConfigError, match="as many rows .20., but other ones"):
        check_same_rows(state, num_rows=20, digest=rows_digest([*ROWS[1:], row(99)]))


# The handed example: 16 prompts, P = 4, trained 0-4, stored 6, 7, 10, in flight 5, 8, 9, 11


@pytest.mark.parametrize(("held", "expected"), [((6, 7, 10), [5, 8, 9, 11, 12, 13, 14, 15]), ((), list(range(5, 16)))])
def test_prompts_in_flight_at_the_save_come_again_and_none_twice(held, expected):
    rows = ROWS[:16]
    before = PromptStream(rows, num_prompts_per_step=4, seed=7, num_epochs=1)
    for _ in range(12):
        before.next_prompt()
    before.settle_trained([0, 1, 2, 3, 4])
    state = dataclasses.replace(ALIGNED, order=before.order, cursor=12, frontier=before.state())
    saved = stream_state_from_json(state.to_json(), "file")
    after = PromptStream(rows, num_prompts_per_step=4, seed=99, num_epochs=1, order=saved.order)
    point = resume_point(saved, "with_ordinals", "step_1")
    assert isinstance(point, FrontierState) and point.cut == 5
    after.restore(point, held)
    assert [after.next_prompt().ordinal for _ in expected] == expected
