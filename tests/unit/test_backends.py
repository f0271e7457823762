"""Generation backends of other packages: found by entry point, synchronised as their capabilities say.

The package is tests/example_backend, installed as far as `importlib.metadata` can see.
"""

import asyncio
import logging
from pathlib import Path

import pytest

from megatron_grpo.backends import BackendSetting, check_capabilities, load_backend
from megatron_grpo.checkpoint.saving import NoCheckpoints
from megatron_grpo.config.rule_modes import backend_is_installed, installed_backends
from megatron_grpo.data.stream import PromptRow, PromptStream
from megatron_grpo.errors import ConfigError
from megatron_grpo.layout import Layout
from megatron_grpo.loop import Run, async_grpo_train
from megatron_grpo.replay.buffer import ReplayBuffer
from megatron_grpo.rollout.group import GroupRollout
from megatron_grpo.rollout.reward_values import Reward
from megatron_grpo.stopping import StopRequest
from megatron_grpo.types import Problem, Sampling
from megatron_grpo.weight_sync import quiet
from megatron_grpo.weight_sync.choose import choose_weight_sync
from tests.fakes import CharacterTokenizer, IdleTrainer, KeptReports, LocalCollector
from tests.unit.config.recipes import DISJOINT, found, recipe

EXAMPLE = Path(__file__).parents[1] / "example_backend"
NUM_STEPS, NUM_PROMPTS = 4, 3


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))


class Policy:
    """`PolicyRanks` without ranks; notes how many requests ran when the weights were taken."""

    def __init__(self):
        self.generator = None
        self.num_running = []

    async def call(self, function, *args):
        self.num_running.append(self.generator.num_running)
        return [function.__name__]


class LengthRewards:
    async def score(self, env_name, problem, responses):
        return tuple(Reward(value=float(index)) for index in range(len(responses)))


def backend(name, **changes):
    chosen = recipe(DISJOINT, {"policy.generation.backend": name, **changes})
    policy = Policy()
    made = load_backend(name)(
        BackendSetting(
            recipe=chosen,
            layout=Layout.from_recipe(chosen),
            options=chosen.policy.generation.backend_options or {},
            vocab_size=CharacterTokenizer.vocab_size,
            eos_id=CharacterTokenizer.eos_id,
            pad_id=CharacterTokenizer.pad_id,
            log_dir="logs",
            policy=policy,
        )
    )
    policy.generator = made.generator
    return made


async def train(made, *, in_flight):
    """Some steps of the real loop, collector and buffer; returns the records of the steps."""
    rows = [
        PromptRow(token_ids=tuple(range(2, 4 + 7 * n)), env_name="fake", problem=Problem(question="", answer=""))
        for n in range(6)
    ]
    replay = ReplayBuffer(
        capacity=2 * NUM_PROMPTS, num_prompts_per_step=NUM_PROMPTS, max_age=1, sample_timeout_s=9, num_steps=NUM_STEPS
    )
    stamps = made.engine.capabilities.tracks_versions
    sampling = Sampling(max_new_tokens=99)
    collector = LocalCollector(
        prompts=PromptStream(rows, num_prompts_per_step=NUM_PROMPTS, seed=0, num_epochs=None),
        rollout=GroupRollout(
            made.generator, LengthRewards(), CharacterTokenizer(), sampling, 2, engine_stamps_versions=stamps
        ),
        replay=replay,
        num_prompts_per_step=NUM_PROMPTS,
        max_age=1,
        num_steps=NUM_STEPS,
        max_failures=0,
        group_timeout_s=9,
    )
    sync = choose_weight_sync(
        collector=collector, engine=made.engine, transfer=made.transfer, in_flight=in_flight
    )
    trainer, reports = IdleTrainer(num_turns=3), KeptReports()
    await made.start()
    finished = await async_grpo_train(
        Run(
            start_step=0,
            num_steps=NUM_STEPS,
            replay=replay,
            collector=collector,
            weight_sync=sync,
            trainer=trainer,
            batcher=trainer,
            reporter=reports,
            validation_due=lambda finished: False,
            checkpoints=NoCheckpoints(),
            stop=StopRequest(),
        )
    )
    await made.close()
    assert finished == NUM_STEPS
    return reports.records


def run(name, *, in_flight):
    made = backend(name)
    records = asyncio.run(asyncio.wait_for(train(made, in_flight=in_flight), 20))
    assert made.versions == list(range(NUM_STEPS + 1)) == list(range(len(made.transfer.received)))
    assert made.transfer.received[0] == ["add_up"]
    return made.setting.policy.num_running, records


def test_a_backend_without_a_pause_hook_is_refitted_under_running_requests_and_warned_about_once(caplog):
    quiet._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        running, records = run("echo", in_flight=True)
        run("echo", in_flight=True)
    assert max(running) > 0
    assert [record.name for record in caplog.records] == ["megatron_grpo.weight_sync.quiet"]
    assert "EchoBackend" in caplog.text
    assert {record.values["train/max_token_age"] for record in records} <= {0.0, 1.0}


@pytest.mark.parametrize(("name", "in_flight"), [("echo", False), ("draining_echo", False), ("draining_echo", True)])
def test_nothing_runs_while_weights_change_where_the_flag_or_the_backend_asks_for_a_drain(name, in_flight, caplog):
    running, _ = run(name, in_flight=in_flight)
    assert set(running) == {0}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_backend_is_handed_its_options_unchanged():
    made = backend("echo", **{"policy.generation.backend_options": {"servers": ["a:1", "b:2"]}})
    assert made.setting.options == {"servers": ["a:1", "b:2"]}


def test_check_knows_the_backends_of_other_packages():
    assert {"megatron", "vllm", "echo", "draining_echo"} <= set(installed_backends())
    assert found(backend_is_installed, {"policy.generation.backend": "echo"}) == []


def test_an_unknown_backend_is_answered_with_the_installed_ones_and_the_way_to_add_one():
    with pytest.raises(ConfigError, match=r"'sglang' is not installed; .*megatron, vllm.*echo.*megatron_grpo\.generation"):
        load_backend("sglang")


def test_a_backend_that_cannot_be_imported_is_named_with_its_error():
    with pytest.raises(ConfigError, match=r"'not_there' .*echo_backend_that_is_not_there:Backend.*ModuleNotFoundError"):
        load_backend("not_there")


def test_the_recipe_must_place_a_backend_where_it_can_live():
    with pytest.raises(ConfigError, match=r"colocated\.enabled is true, but .* 'echo' has GPUs of its own"):
        check_capabilities("echo", backend("echo").capabilities, colocated=True)
    with pytest.raises(ConfigError, match="does not carry weights"):
        check_capabilities("sharing_echo", backend("sharing_echo").capabilities, colocated=True)
    check_capabilities("echo", backend("echo").capabilities, colocated=False)
    assert not recipe({"policy.generation.backend": "echo"}).policy.generation.colocated.enabled
