import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.data.frontier import Frontier
from megatron_grpo.types import FrontierState


def handed_out(count):
    frontier = Frontier()
    for _ in range(count):
        frontier.hand_out()
    return frontier


def test_the_cut_lies_below_everything_pending():
    frontier = handed_out(8)
    frontier.settle_trained([0, 1, 2, 3, 4, 6])
    assert frontier.state() == FrontierState(cut=5, frontier=7, trained_above_cut=(6,), dropped_above_cut=())


def test_dropped_prompts_move_the_cut_but_not_the_frontier():
    frontier = handed_out(3)
    frontier.settle_dropped(0)
    frontier.settle_dropped(2)
    assert frontier.state() == FrontierState(cut=1, frontier=0, trained_above_cut=(), dropped_above_cut=(2,))


def test_with_nothing_pending_the_cut_is_the_next_ordinal():
    frontier = handed_out(2)
    frontier.settle_trained([1, 0])
    assert frontier.state() == FrontierState(cut=2, frontier=2, trained_above_cut=(), dropped_above_cut=())


def test_restored_groups_are_pending_but_do_not_advance_the_next_ordinal():
    state = FrontierState(cut=5, frontier=7, trained_above_cut=(6,), dropped_above_cut=())
    frontier = Frontier.restore(state, held=[9])
    # A save before anything was handed out again must not lose 5, 7 and 8.
    assert frontier.state() == state
    assert [frontier.hand_out() for _ in range(4)] == [5, 7, 8, 10]
    frontier.settle_trained([5, 7, 8])
    assert frontier.cut == 9


def test_a_group_that_holds_a_settled_prompt_is_refused():
    state = FrontierState(cut=5, frontier=7, trained_above_cut=(6,), dropped_above_cut=(7,))
    for settled in (4, 6, 7):
        with pytest.raises(ValueError, match=f"prompt {settled}"):
            Frontier.restore(state, held=[settled])


def test_settling_twice_is_our_mistake_and_says_so():
    frontier = handed_out(1)
    frontier.settle_trained([0])
    with pytest.raises(AssertionError, match="prompt 0"):
        frontier.settle_dropped(0)


def test_the_lowering_is_logged_with_both_numbers(caplog):
    frontier = handed_out(8)
    frontier.settle_trained([0, 6])
    with caplog.at_level("INFO"):
        frontier.state()
    assert "cut 1 " in caplog.text and "frontier 7" in caplog.text


def test_memory_is_bounded_by_what_is_in_flight():
    frontier = Frontier()
    for _ in range(20_000):
        frontier.settle_trained([frontier.hand_out()])
    assert len(frontier._trained) + len(frontier._dropped) + len(frontier._pending_heap) <= 2


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), restarts=st.integers(0, 3))
def test_no_prompt_is_lost_or_trained_twice_through_random_saves_and_restores(seed, restarts):
    rng = random.Random(seed)
    frontier, pending, trained, dropped = Frontier(), set(), [], []
    for _ in range(restarts + 1):
        for _ in range(rng.randrange(40)):
            if pending and rng.random() < 0.5:
                ordinal = rng.choice(sorted(pending))
                pending.remove(ordinal)
                (trained if rng.random() < 0.8 else dropped).append(ordinal)
                frontier.settle_trained([ordinal]) if ordinal in trained else frontier.settle_dropped(ordinal)
            else:
                pending.add(frontier.hand_out())
        state = frontier.state()
        settled = set(trained) | set(dropped)
        assert state.frontier == 1 + max(trained, default=-1)
        assert state.cut == next(n for n in range(10**6) if n not in settled)
        assert set(state.trained_above_cut) == {n for n in trained if n >= state.cut}
        assert set(state.dropped_above_cut) == {n for n in dropped if n >= state.cut}
        held = {ordinal for ordinal in pending if rng.random() < 0.5}
        frontier, pending = Frontier.restore(state, held), set(held)
    for _ in range(100):
        pending.add(frontier.hand_out())
    done = sorted([*trained, *dropped, *pending])
    assert done == list(range(len(done)))
