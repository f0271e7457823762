"""Experts keep their number when trainer and engine are cut into different expert-parallel sizes."""

import pytest

from megatron_grpo.layout import Gpu, Sizes, build_world
from tests.megatron.experts import build_experts, fill, misplaced
from tests.megatron.world import Seat, free_address, run_world

TRAINED, FRESH = 100.0, -1.0


def cut(size, **sizes):
    return build_world([Gpu(node=0, gpu=gpu) for gpu in range(size)], Sizes(**sizes))


class Sides:
    """The first ranks train, the others generate, each side in a world of its own."""

    def __init__(self, train, generate):
        self.worlds = train, generate
        self.addresses = free_address(), free_address()
        self.meeting = free_address()

    @property
    def size(self):
        return sum(world.size for world in self.worlds)

    def join(self, seat):
        """This rank's side (0: trains) and its world."""
        side = int(seat.rank >= self.worlds[0].size)
        rank = seat.rank - side * self.worlds[0].size
        Seat(world=self.worlds[side], rank=rank, rendezvous=self.addresses[side]).join()
        return side, self.worlds[side]

    def group(self, seat):
        from megatron_grpo.weight_sync import joined_group

        return joined_group.join(
            host=self.meeting.host, port=self.meeting.port, rank=seat.rank, size=self.size, backend="gloo", timeout_s=15
        )


def resharding(seat, sides, kind):
    side, world = sides.join(seat)
    model = build_experts(world, base=FRESH if side else TRAINED)
    part = kind(
        sides.group(seat),
        source=None if side else model,
        target=model if side else None,
        target_offset=sides.worlds[0].size,
    )
    return model, part


def moved(seat, sides):
    from megatron_grpo.weight_sync.gloo import HostCopy
    from megatron_grpo.weight_sync.reshard import Resharding

    model, part = resharding(seat, sides, Resharding)
    part.move(HostCopy(part._group))
    part.confirm()
    return misplaced(model, TRAINED)


SIDES = {
    "EP2 -> EP1": (cut(2, ep=2), cut(1)),
    "EP1 -> EP2": (cut(1), cut(2, ep=2)),
    "EP2 -> EP2": (cut(2, ep=2), cut(2, ep=2)),
    "TP2 EP2 -> EP1": (cut(2, tp=2, ep=2, sequence_parallel=True), cut(1)),
    "EP2 -> TP2": (cut(2, ep=2), cut(2, tp=2, sequence_parallel=True)),
}


@pytest.mark.parametrize("name", SIDES)
def test_every_expert_arrives_under_its_number(name):
    sides = Sides(*SIDES[name])
    assert run_world(moved, sides, size=sides.size) == [[]] * sides.size


def moved_by_the_shipped_plan(seat, sides):
    from megatron.core.resharding import build_local_reshard_plan

    from megatron_grpo.weight_sync.gloo import HostCopy
    from megatron_grpo.weight_sync.reshard import Resharding

    class Shipped(Resharding):
        def _make_plan(self):
            return build_local_reshard_plan(
                self._source,
                self._target,
                num_experts=4,
                group=self._group,
                src_rank_offset=self._source_offset,
                dst_rank_offset=self._target_offset,
            )

    model, part = resharding(seat, sides, Shipped)
    part.move(HostCopy(part._group))
    with pytest.raises(RuntimeError) as error:
        part.confirm()
    return misplaced(model, TRAINED), str(error.value)


def test_checksums_find_the_wrong_experts_of_the_shipped_plan():
    sides = Sides(*SIDES["EP1 -> EP2"])
    answers = run_world(moved_by_the_shipped_plan, sides, size=sides.size)
    wrong_on_second_rank, _ = answers[2]
    assert wrong_on_second_rank and all("local_experts" in name for name in wrong_on_second_rank)
    for _, message in answers:
        assert "local_experts.2." in message and "checksum sent" in message


def second_model(seat, engine_world):
    from megatron_grpo.engines.megatron.parallel import second_groups
    from megatron_grpo.weight_sync.second_model import SecondModel

    seat.join()
    trained = build_experts(seat.world, base=TRAINED)
    copy = build_experts(engine_world, second_groups(engine_world), base=FRESH)
    second = SecondModel(trained, copy, backend="gloo", timeout_s=15)
    second.refresh()
    first = misplaced(copy, TRAINED)
    fill(trained, 2 * TRAINED)
    second.refresh()
    return first, misplaced(copy, 2 * TRAINED)


@pytest.mark.parametrize(
    ("train", "engine"),
    [
        (Sizes(ep=2), Sizes()),
        (Sizes(), Sizes(ep=2)),
        (Sizes(tp=2, ep=2, sequence_parallel=True), Sizes(ep=2)),
    ],
    ids=str,
)
def test_a_second_model_in_the_same_processes_gets_its_experts(train, engine):
    gpus = [Gpu(node=0, gpu=gpu) for gpu in range(2)]
    answers = run_world(second_model, build_world(gpus, engine), world=build_world(gpus, train))
    assert answers == [([], [])] * 2
