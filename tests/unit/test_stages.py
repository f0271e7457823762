"""Which layers each stage of a pipeline holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.stages import StageEnds, stage_sizes


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "ends", "expected"),
    [
        (5, 1, 1, {"first": 3}, (5,)),
        (8, 4, 1, {}, (2, 2, 2, 2)),
        (8, 2, 2, {}, (2, 2, 2, 2)),
        (7, 3, 1, {"first": 3}, (3, 2, 2)),
        (7, 3, 1, {"last": 1}, (3, 3, 1)),
        (7, 2, 1, {"first": 5, "last": 2}, (5, 2)),
        (10, 2, 2, {"first": 4}, (2, 3, 2, 3)),
        (6, 4, 1, {"embedding_counts": True, "loss_counts": True}, (1, 2, 2, 1)),
        (7, 2, 2, {"loss_counts": True}, (2, 2, 2, 1)),
    ],
)
def test_examples(num_layers, pp, vpp, ends, expected):
    assert stage_sizes(num_layers, pp, vpp, StageEnds(**ends)) == expected


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "ends"),
    [
        (7, 2, 1, {}),
        (6, 2, 2, {}),
        (7, 2, 1, {"first": 5, "last": 3}),
        (7, 2, 1, {"first": 5, "last": 1}),
        (8, 3, 1, {"first": 3}),
        (6, 2, 2, {"first": 3}),
        (2, 2, 1, {"first": 2}),
        (2, 4, 1, {"embedding_counts": True, "loss_counts": True}),
    ],
)
def test_what_does_not_come_out_is_refused(num_layers, pp, vpp, ends):
    with pytest.raises(ValueError, match="layer"):
        stage_sizes(num_layers, pp, vpp, StageEnds(**ends))


@given(
    st.integers(1, 80),
    st.integers(1, 8),
    st.integers(1, 4),
    st.builds(StageEnds, first=st.none() | st.integers(1, 20), last=st.none() | st.integers(1, 20)),
)
def test_every_layer_has_a_place(num_layers, pp, vpp, ends):
    try:
        sizes = stage_sizes(num_layers, pp, vpp, ends)
    except ValueError:
        return
    assert sum(sizes) == num_layers and min(sizes) >= 1 and len(sizes) == (1 if pp == 1 else pp * vpp)
    if pp > 1:
        assert ends.first is None or sum(sizes[::pp]) == ends.first
        assert ends.last is None or sum(sizes[pp - 1 :: pp]) == ends.last
