"""The optimizer of one rank: Megatron's distributed Adam over summed gradients, and its learning-rate schedule.

The schedule counts updates: update u (from 0) runs at the rate of position u.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ...errors import ConfigError, RunFailed

if TYPE_CHECKING:
    from ...config.schema import Recipe

KEYS = "policy.megatron_cfg"


def active_adam() -> str:
    """Whose Adam Megatron picked in this process: transformer_engine, apex or torch."""
    return megatron_optimizer.Adam.__module__.split(".")[0]


def data_parallel(chunks: Sequence[HybridModel], recipe: Recipe) -> list[DistributedDataParallel]:
    """Wrap each chunk so that gradients are summed over ranks; moves the parameters of a chunk into one buffer.

    Build it before an engine takes hold of the parameters.
    """
    return [_wrap(chunk, recipe) for chunk in chunks]


def _wrap(module: HybridModel, recipe: Recipe) -> DistributedDataParallel:
    megatron = recipe.policy.megatron_cfg
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=megatron.distributed_data_parallel_config.grad_reduce_in_fp32,
        use_distributed_optimizer=megatron.optimizer.use_distributed_optimizer,
        # overlapping gathers would leave a colocated engine with old shards: Megatron gathers at the next forward
        overlap_grad_reduce=False,
        overlap_param_gather=False,
    )
    layout = None
    if config.use_distributed_optimizer:
        layout = DistributedOptimizer.compute_full_param_layout(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            config.bucket_size,
            parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            config,
            parallel_state.get_expert_data_parallel_world_size(),
        )
    return DistributedDataParallel(module.config, config, module, full_param_layout=layout)


class PolicyOptimizer:
    """Adam over the gradients that the chunks of `model` have gathered, with clipping and a schedule."""

    def __init__(self, recipe: Recipe, model: Sequence[DistributedDataParallel]):
        self._recipe = recipe
        self._model = model
        self._clip = recipe.policy.megatron_cfg.optimizer.clip_grad
        self.reset()

    def reset(self) -> None:
        """Fresh moments and the schedule's first rate."""
        self.adam = _build_adam(self._recipe, self._model)
        self.schedule = _build_schedule(self._recipe, self.adam)

    @property
    def learning_rate(self) -> float:
        """The rate the next update runs at."""
        return next(group["lr"] for group in self.adam.param_groups)

    def zero_grad(self) -> None:
        for chunk in self._model:
            chunk.zero_grad_buffer()
        self.adam.zero_grad()

    def update(self) -> float:
        """One update at the schedule's rate. Returns the gradient norm before clipping.

        Raises RunFailed when that norm is not finite; the weights are untouched then.
        """
        norm = self._apply()
        self.schedule.step(1)
        return norm

    @property
    def position(self) -> int:
        """Updates the schedule has counted."""
        return self.schedule.num_steps

    def go_to(self, position: int) -> None:
        """The next update runs at the rate of `position`."""
        self.schedule.num_steps = 0
        self.schedule.step(position)

    def update_at(self, learning_rate: float) -> float:
        """One update at a given rate; the schedule does not move."""
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        return self._apply()

    @torch.no_grad()
    def _apply(self) -> float:
        self.adam.prepare_grads()
        norm = float(self.adam.get_grad_norm())
        if not math.isfinite(norm):
            raise RunFailed(
                f"the gradient norm is {norm}: the update was not applied. Usual causes: a learning rate that is too "
                f"high ({KEYS}.optimizer.lr = {self.learning_rate:g}), unbounded importance weights "
                "(loss_fn.truncated_importance_sampling_*), overflow in low precision"
            )
        if self._clip > 0:
            clip_grad_by_total_norm_fp32(self.adam.get_parameters(), self._clip, norm)
        self.adam.step_with_ready_grads()
        return norm


def _build_adam(recipe: Recipe, model: Sequence[DistributedDataParallel]) -> MegatronOptimizer:
    settings, dtype = recipe.policy.megatron_cfg.optimizer, model[0].config.params_dtype
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=settings.use_distributed_optimizer,
    )
    return get_megatron_optimizer(config, list(model), use_gloo_process_groups=False)


def _build_schedule(recipe: Recipe, adam: MegatronOptimizer) -> OptimizerParamScheduler:
    settings, plan = recipe.policy.megatron_cfg.optimizer, recipe.policy.megatron_cfg.scheduler
    decays = plan.lr_decay_style != "constant"
    if decays and plan.lr_warmup_iters >= plan.lr_decay_iters:
        raise ConfigError(
            f"{KEYS}.scheduler.lr_warmup_iters {plan.lr_warmup_iters} must be less than lr_decay_iters "
            f"{plan.lr_decay_iters} (both count updates)"
        )
    if decays and settings.min_lr > settings.lr:
        raise ConfigError(f"{KEYS}.optimizer.min_lr {settings.min_lr:g} must not exceed lr {settings.lr:g}")
    return OptimizerParamScheduler(
        adam,
        init_lr=min(plan.lr_warmup_init, settings.lr),
        max_lr=settings.lr,
        min_lr=min(settings.min_lr, settings.lr),
        lr_warmup_steps=plan.lr_warmup_iters,
        lr_decay_steps=plan.lr_decay_iters if decays else plan.lr_warmup_iters + 1,
        lr_decay_style=plan.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
