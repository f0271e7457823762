"""What the collector writes down: finished groups and trained prompts, as the ledger has to know them."""

from tests.fakes import make_trajectory
from tests.unit.collecting import Parts, collector_test


class Kept:
    def __init__(self):
        self.entries = []

    def generated(self, group):
        self.entries.append(f"generated {group.ordinal}")

    def trained(self, step, ordinals):
        self.entries.append(f"step {step} trained {list(ordinals)}")


@collector_test
async def test_a_prompt_whose_group_was_fully_masked_is_not_written_down_as_trained():
    parts = Parts(prompts=2, max_age=0, journal=(journal := Kept()))
    async with parts.running():
        parts.rollout.finish(0, (make_trajectory([0], masked_because="overlong"),))
        parts.rollout.finish(1, (make_trajectory([0]),))
        await parts.train(0)
    assert journal.entries == ["generated 0", "generated 1", "step 0 trained [1]"]


@collector_test
async def test_a_journal_that_cannot_be_written_ends_the_collector_with_its_error():
    class Refusing(Kept):
        def generated(self, group):
            raise OSError("disk full")

    parts = Parts(prompts=2, max_age=0, journal=Refusing())
    async with parts.running() as run:
        parts.rollout.finish(0, (make_trajectory([0]),))
        try:
            await run
        except OSError as error:
            assert "disk full" in str(error)
        else:
            raise AssertionError("the collector went on")
