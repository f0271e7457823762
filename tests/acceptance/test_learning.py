"""The shipped recipes learn what they claim, as shipped: whole runs, minutes each. Prints the figures.

Rewards are running means over ten steps, read where the run says it is read: at its start and at its end.
"""

from statistics import fmean

import pytest

from tests.running import REPOSITORY, LiveRun

RECIPES = REPOSITORY / "recipes/llm"
SPELL = RECIPES / "grpo-spell-1n2g-megatron_async.yaml"
SORT3 = {
    "disjoint": RECIPES / "grpo-sort3-1n2g-megatron_async.yaml",
    "colocated": RECIPES / "grpo-sort3-1n1g-megatron_async_colocated.yaml",
    "sync": RECIPES / "grpo-sort3-1n1g-megatron_colocated.yaml",
}
WINDOW = 10
LONGEST_RUN_S = 1500

pytestmark = pytest.mark.timeout(LONGEST_RUN_S + 100)


class Learned:
    """What a finished run's records say."""

    def __init__(self, records):
        self.steps = [record for record in records if "train/reward" in record]
        self.exact = [record["val:accuracy"] for record in records if "val:accuracy" in record]

    def column(self, name):
        return [step[name] for step in self.steps]

    @property
    def first_reward(self):
        return fmean(self.column("train/reward")[:WINDOW])

    @property
    def last_reward(self):
        return fmean(self.column("train/reward")[-WINDOW:])

    def told(self, name):
        return (
            f"{name}: {len(self.steps)} steps, {fmean(self.column('timing/train/total_step_time')):.2f} s each, "
            f"reward {self.first_reward:.3f} -> {self.last_reward:.3f}, "
            f"held-out exact {self.exact[0]:.3f} -> {self.exact[-1]:.3f}, "
            f"mean age {fmean(self.column('train/avg_trajectory_age')):.2f}, "
            f"oldest {max(self.column('train/max_trajectory_age')):.0f}"
        )


def learn(recipe, folder, *overrides):
    with LiveRun(recipe, folder / "run", *overrides) as run:
        assert run.wait(LONGEST_RUN_S) == 0, run.output[-4000:]
        run.wait_for_nothing_left()
        return Learned(run.records())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_spelling_improves_on_words_never_seen(seed, tmp_path, capsys):
    learned = learn(SPELL, tmp_path, f"grpo.seed={seed}", f"policy.model_init.seed={seed}")
    with capsys.disabled():
        print("\n" + learned.told(f"spell, seed {seed}"))
    assert learned.last_reward - learned.first_reward >= 0.2
    assert learned.exact[-1] - learned.exact[0] >= 0.1
    ages = learned.column("train/avg_trajectory_age")
    assert max(learned.column("train/max_trajectory_age")) <= 1 and fmean(ages) > 0


@pytest.mark.parametrize("mode", SORT3)
def test_sorting_is_learned_from_random_weights(mode, tmp_path, capsys):
    learned = learn(SORT3[mode], tmp_path)
    with capsys.disabled():
        print("\n" + learned.told(f"sort3, {mode}"))
    assert learned.last_reward >= 0.8
    assert max(learned.column("train/max_trajectory_age")) <= (0 if mode == "sync" else 1)
    # On groups of the step's own weights trainer and engine agree in float32.
    fresh = [step for step in learned.steps if step["train/max_trajectory_age"] == 0]
    assert fresh
    assert max(step["train/gen_kl_error"] for step in fresh) <= 1e-5
    assert max(step["train/token_mult_prob_error"] for step in fresh) <= 1.001
