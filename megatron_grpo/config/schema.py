"""The typed recipe. The attribute path equals the key path, with one exception that pydantic forces on us:
`policy.model_config` is read as `recipe.policy.architecture`.

Owns names, types, ranges and plain defaults. What spans several keys lives in `rules`; defaults that depend on
another key are filled by `dependent` before validation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from .base import Count, CountOrZero, Finite, Fraction, Items, Name, Positive, PositiveOrZero, Section, Seed
from .dependent import fill
from .policy_schema import Policy

__all__ = ["Items", "Policy", "Recipe", "Section"]


class AsyncGrpo(Section):
    enabled: bool = False
    max_trajectory_age_steps: Count = 1
    max_generation_failures: CountOrZero = 0
    in_flight_weight_updates: bool = False
    recompute_kv_cache_after_weight_updates: bool = False


class RewardShaping(Section):
    enabled: bool = False
    overlong_buffer_length: CountOrZero = 128
    overlong_buffer_penalty: PositiveOrZero = 1.0
    max_response_length: Count = 512


class RewardScaling(Section):
    enabled: bool = False
    source_min: Finite = 0.0
    source_max: Finite = 1.0
    target_min: Finite = 0.0
    target_max: Finite = 1.0


class AdvantageEstimator(Section):
    """Second names of `grpo.normalize_rewards` and `grpo.use_leave_one_out_baseline`."""

    name: Literal["grpo"] = "grpo"
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = True


class Grpo(Section):
    num_prompts_per_step: Count = 32
    num_generations_per_prompt: Count = 16
    max_num_steps: Count = 1_000_000
    max_num_epochs: Count = 1
    max_rollout_turns: Count = 1
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = True
    overlong_filtering: bool = False
    val_period: CountOrZero = 10
    val_at_start: bool = False
    val_at_end: bool = False
    max_val_samples: Count = 256
    seed: Seed = 42
    use_dynamic_sampling: bool = False
    dynamic_sampling_max_gen_batches: Count = 10
    adv_estimator: AdvantageEstimator = AdvantageEstimator()
    reward_shaping: RewardShaping = RewardShaping()
    reward_scaling: RewardScaling = RewardScaling()
    async_grpo: AsyncGrpo = AsyncGrpo()


class LossFn(Section):
    reference_policy_kl_penalty: PositiveOrZero = 0.01
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    kl_input_clamp_value: Positive | None = 20.0
    kl_output_clamp_value: Positive | None = 10.0
    ratio_clip_min: Fraction = 0.2
    ratio_clip_max: PositiveOrZero = 0.2
    ratio_clip_c: Finite | None = None
    use_cispo: bool = False
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    truncated_importance_sampling_ratio: Positive | None = None
    truncated_importance_sampling_ratio_min: PositiveOrZero | None = None
    sequence_level_importance_ratios: bool = False
    token_level_loss: bool = True
    entropy_coef: PositiveOrZero = 0.0


class Checkpointing(Section):
    enabled: bool = False
    checkpoint_dir: Name = "results/grpo"
    metric_name: Name | None = "val:accuracy"
    higher_is_better: bool = True
    keep_top_k: Count | None = 3
    save_period: Count = 10
    checkpoint_must_save_by: Annotated[str, Field(pattern=r"^\d{2}:[0-2]\d:[0-5]\d:[0-5]\d$")] | None = None
    load_replay_buffer: bool = True


class DataSource(Section):
    """Where prompts come from: a file (`path`) or an environment's own generator (`env`, `num_rows`, `seed`)."""

    path: Name | None = None
    env: Name | None = None
    num_rows: Count | None = None
    seed: Seed = 42
    streaming: bool = False
    dataset_name: Name | None = None


class DataDefaults(Section):
    env_name: Name | None = None
    prompt_file: Name | None = None


class Data(Section):
    train: DataSource | None = None
    validation: DataSource | None = None
    default: DataDefaults = DataDefaults()
    shuffle: bool = True
    max_input_seq_length: Count | None = None


class EnvironmentBlock(Section):
    """One environment. Every key besides `target` and `num_workers` is an option of its class (`model_extra`)."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    target: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    num_workers: Count = 1

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class WandbLogger(Section):
    project: Name = "megatron-grpo"
    name: Name | None = None


class Logger(Section):
    log_dir: Name = "logs"
    num_val_samples_to_print: CountOrZero = 0
    tensorboard_enabled: bool = True
    wandb_enabled: bool = False
    wandb: WandbLogger = WandbLogger()


class Cluster(Section):
    accelerator: Literal["auto", "cuda", "cpu"] = "auto"
    num_nodes: Count = 1
    gpus_per_node: Count = 1
    segment_size: Count | None = None


class WarmStart(Section):
    """A supervised phase on the task's own solutions, before the first rollout."""

    num_steps: Count
    batch_size: Count = 64
    lr: Positive = 5e-3


class Timeouts(Section):
    """Deadlines in seconds."""

    group: Positive = 600.0
    reward: Positive = 60.0
    refit: Positive = 600.0
    sample: Positive = 3600.0
    actor_start: Positive = 600.0


class Recipe(Section):
    grpo: Grpo = Grpo()
    loss_fn: LossFn = LossFn()
    checkpointing: Checkpointing = Checkpointing()
    policy: Policy = Policy()
    data: Data = Data()
    env: dict[str, EnvironmentBlock] = Field(default_factory=dict)
    logger: Logger = Logger()
    cluster: Cluster = Cluster()
    warm_start: WarmStart | None = None
    timeouts: Timeouts = Timeouts()

    @model_validator(mode="before")
    @classmethod
    def _fill_dependent_defaults(cls, values: Any) -> Any:
        return fill(values) if isinstance(values, dict) else values
