"""Where the prompts of a run start, what they leave in the ledger, and the state that a save takes of them."""

import logging

import pytest

from megatron_grpo.data.ledger import LEDGER_NAME, Ledger
from megatron_grpo.data.saved_prompts import SavedPrompts, StartPoint
from megatron_grpo.data.stream import PromptRow, PromptStream
from megatron_grpo.data.stream_state import resume_point
from megatron_grpo.types import FrontierState, LiveCursor, Problem
from megatron_grpo.verify import verify

ROWS = [PromptRow(token_ids=(n,), env_name="fake", problem=Problem(question=f"{n}", answer="")) for n in range(10)]
FRESH = StartPoint(step=0, point=None, oldest_versions={})


def prompts(folder, start, *, num_prompts=2, order=None):
    stream = PromptStream(ROWS, num_prompts_per_step=num_prompts, seed=1, num_epochs=None, order=order)
    ledger = Ledger(folder / LEDGER_NAME)
    return SavedPrompts(stream, ledger, start, rows_digest="rows"), ledger


def train(saved, ledger, steps):
    """Two prompts a step; the rows they were."""
    rows = []
    for step in steps:
        handed = [saved.source.next_prompt() for _ in range(2)]
        rows += [prompt.token_ids for prompt in handed]
        saved.source.settle_trained([prompt.ordinal for prompt in handed])
        ledger.trained(step, [prompt.ordinal for prompt in handed])
    return rows


def test_a_resumed_run_keeps_the_uninterrupted_order_through_epochs(tmp_path):
    whole = train(*prompts(tmp_path / "whole", FRESH), range(12))
    saved, ledger = prompts(tmp_path / "cut", FRESH)
    rows = train(saved, ledger, range(4))
    state = saved.state_for(4)
    train(saved, ledger, range(4, 6))  # thrown away by the crash
    ledger.close()
    point = resume_point(state, "with_ordinals", "")
    again, ledger = prompts(tmp_path / "cut", StartPoint(step=4, point=point, oldest_versions={}), order=state.order)
    rows += train(again, ledger, range(4, 12))
    assert rows == whole
    ledger.close()
    verdict = verify(tmp_path / "cut")
    assert (verdict.exit_code, verdict.num_void_steps, verdict.num_trained) == (0, 2, 24)


def test_another_batch_size_does_not_move_the_rows(tmp_path):
    saved, ledger = prompts(tmp_path, FRESH)
    train(saved, ledger, range(2))
    state = saved.state_for(2)
    ledger.close()
    start = StartPoint(step=2, point=resume_point(state, "with_ordinals", ""), oldest_versions={})
    with_three, _ = prompts(tmp_path, start, num_prompts=3, order=state.order)
    assert with_three.state_for(2).order == state.order
    assert with_three.source.next_prompt().ordinal == 4


def test_prompts_of_restored_groups_are_not_handed_out_again(tmp_path):
    saved, ledger = prompts(tmp_path, FRESH)
    for _ in range(5):
        saved.source.next_prompt()
    saved.source.settle_trained([0, 1])
    ledger.trained(0, [0, 1])
    state = saved.state_for(1)
    assert (state.frontier.cut, state.cursor) == (2, 5)
    ledger.close()
    start = StartPoint(step=1, point=resume_point(state, "with_ordinals", ""), oldest_versions={3: 0})
    again, _ = prompts(tmp_path, start, order=state.order)
    assert [again.source.next_prompt().ordinal for _ in range(3)] == [2, 4, 5]


def test_a_held_prompt_that_is_settled_is_refused(tmp_path):
    point = FrontierState(cut=2, frontier=2, trained_above_cut=(), dropped_above_cut=())
    with pytest.raises(ValueError, match="holds prompt 1"):
        prompts(tmp_path, StartPoint(step=1, point=point, oldest_versions={1: 0}))


def test_a_run_without_alignment_stays_so_with_its_descendants(tmp_path, caplog):
    point = LiveCursor(position=6, reason="an old checkpoint")
    saved, ledger = prompts(tmp_path, StartPoint(step=3, point=point, oldest_versions={-1: 2}))
    assert saved.source.next_prompt().ordinal == 6
    saved.source.settle_trained([-1, 6])
    state = saved.state_for(4)
    ledger.close()
    assert (state.frontier, state.cursor, state.unaligned_because) == (None, 7, "an old checkpoint")
    with caplog.at_level(logging.WARNING):
        start = StartPoint(step=4, point=resume_point(state, "without_ordinals", ""), oldest_versions={})
        child, _ = prompts(tmp_path, start, order=state.order)
    assert "data alignment is off" in caplog.text and child.source.next_prompt().ordinal == 7
