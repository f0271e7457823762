import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.data.stream import PromptRow, PromptStream
from megatron_grpo.errors import ConfigError, EndOfData
from megatron_grpo.types import Problem


def make_rows(count):
    return [
        PromptRow(token_ids=(n,), env_name="fake", problem=Problem(question=str(n), answer="")) for n in range(count)
    ]


def stream(num_rows=10, prompts=4, seed=0, epochs=2, **options):
    return PromptStream(make_rows(num_rows), num_prompts_per_step=prompts, seed=seed, num_epochs=epochs, **options)


def drain(prompts):
    drained = []
    while True:
        try:
            drained.append(prompts.next_prompt())
        except EndOfData:
            return drained


def row(prompt):
    return int(prompt.problem.question)


def ordinals(prompts):
    return [prompt.ordinal for prompt in prompts]


def test_ten_prompts_four_a_step_two_epochs_are_four_steps_of_distinct_prompts():
    prompts = drain(stream(10, 4, epochs=2))
    first, second = [row(p) for p in prompts[:8]], [row(p) for p in prompts[8:]]
    assert len(set(first)) == len(set(second)) == 8
    assert first != second


def test_forty_five_rows_twelve_a_step_three_epochs_are_nine_steps():
    assert len(drain(stream(45, 12, epochs=3))) == 9 * 12


def test_a_row_is_a_function_of_seed_epoch_and_ordinal():
    assert [row(p) for p in drain(stream(seed=3))] == [row(p) for p in drain(stream(seed=3))]
    assert [row(p) for p in drain(stream(seed=3))] != [row(p) for p in drain(stream(seed=4))]


def test_the_order_of_a_seed_never_changes():
    # Pinned: a saved run must find its rows again after an update of numpy.
    prompts = drain(stream(10, 5, seed=1, epochs=1))
    assert [row(p) for p in prompts] == [9, 2, 4, 7, 5, 0, 8, 6, 3, 1]


def test_without_shuffling_the_file_order_repeats():
    assert [row(p) for p in drain(stream(10, 4, epochs=2, shuffle=False))] == [*range(8)] * 2


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(ConfigError, match="3 usable rows.*num_prompts_per_step = 4"):
        stream(num_rows=3, prompts=4)


def test_a_returned_prompt_comes_again_before_new_ones():
    prompts = stream(shuffle=False)
    for _ in range(4):
        prompts.next_prompt()
    prompts.put_back(3)
    prompts.put_back(1)
    assert ordinals(prompts.next_prompt() for _ in range(3)) == [1, 3, 4]
    assert prompts.state().cut == 0


def test_a_prompt_is_put_back_once():
    prompts = stream()
    prompts.next_prompt()
    prompts.put_back(0)
    with pytest.raises(AssertionError, match="twice"):
        prompts.put_back(0)


def test_a_dropped_prompt_is_replaced_from_the_spare_rows():
    prompts = stream(10, 4, epochs=1, shuffle=False)
    for _ in range(8):
        prompts.next_prompt()
    with pytest.raises(EndOfData):
        prompts.next_prompt()
    prompts.settle_dropped(2, "generation_failed")
    assert ordinals(drain(prompts)) == [8]


def test_a_drop_without_replacement_takes_no_spare_row():
    prompts = stream(10, 4, epochs=1)
    prompts.next_prompt()
    prompts.settle_dropped(0, "zero_variance", replace=False)
    assert ordinals(drain(prompts)) == list(range(1, 8))


def test_more_drops_than_spare_rows_go_on_with_the_next_epochs_order():
    prompts = stream(9, 4, epochs=2, shuffle=False)
    for _ in range(3):
        prompts.next_prompt()
    for ordinal in range(3):
        prompts.settle_dropped(ordinal, "generation_failed")
    # 3-7, the spare 8, then epoch 1; its spare row 17 pays one more.
    assert ordinals(drain(prompts)) == [*range(3, 9), *range(9, 18)]


def test_spare_rows_of_earlier_epochs_are_settled_when_jumped_over():
    prompts = stream(10, 4, epochs=2, shuffle=False)
    prompts.settle_trained(ordinals(drain(prompts)))
    state = prompts.state()
    assert (state.cut, state.frontier, state.dropped_above_cut) == (18, 18, ())


def test_another_p_on_resume_does_not_move_ordinals():
    before = stream(10, 4, seed=5, epochs=2)
    taken = [before.next_prompt() for _ in range(6)]
    before.settle_trained(ordinals(taken))
    after = stream(10, 5, seed=99, epochs=2, order=before.order)
    after.restore(before.state(), held=[])
    assert [(p.ordinal, row(p)) for p in drain(after)] == [(p.ordinal, row(p)) for p in drain(before)]


def test_another_number_of_rows_on_resume_is_refused():
    with pytest.raises(ConfigError, match="10 rows.*now has 20"):
        stream(20, order=stream(10).order)


def test_a_replacement_in_flight_at_the_save_is_still_owed_after_resume():
    prompts = stream(10, 4, epochs=1, shuffle=False)
    for _ in range(8):
        prompts.next_prompt()
    prompts.settle_trained([0, 1, 3, 4])
    prompts.settle_dropped(2, "generation_failed")
    assert prompts.next_prompt().ordinal == 8
    for held, again in (([], [5, 6, 7, 8]), ([8, 6], [5, 7])):
        resumed = stream(10, 4, epochs=1, shuffle=False)
        resumed.restore(prompts.state(), held=held)
        assert ordinals(drain(resumed)) == again


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(2, 12),
    epochs=st.integers(1, 3),
    failures=st.integers(0, 2),
)
def test_every_served_row_is_trained_or_replaced_whatever_is_saved_when(seed, num_rows, epochs, failures):
    rng = random.Random(seed)
    prompts_per_step = rng.randrange(1, num_rows + 1)
    prompts = stream(num_rows, prompts_per_step, seed, epochs)
    num_spare = num_rows - prompts.order.num_served
    running, trained, left = [], [], failures
    while True:
        if rng.random() < 0.1:
            held = [ordinal for ordinal in running if rng.random() < 0.5]
            state = prompts.state()
            prompts = stream(num_rows, prompts_per_step, seed, epochs)
            prompts.restore(state, held)
            running = held
        try:
            if not running or rng.random() < 0.5:
                running.append(prompts.next_prompt().ordinal)
        except EndOfData:
            if not running:
                break
        if running:
            ordinal = running.pop(rng.randrange(len(running)))
            if left and rng.random() < 0.2:
                left -= 1
                prompts.settle_dropped(ordinal, "generation_failed")
            elif rng.random() < 0.1:
                prompts.put_back(ordinal)
            else:
                prompts.settle_trained([ordinal])
                trained.append(ordinal)
    num_failed = failures - left
    served = epochs * prompts.order.num_served
    assert len(set(trained)) == len(trained)
    # The last epoch's spare rows are always there to replace; more failures than those may end the run earlier.
    assert served - max(0, num_failed - num_spare) <= len(trained) <= served
