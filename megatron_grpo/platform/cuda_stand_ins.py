"""Stand-ins for `torch.cuda` on a host without CUDA: the values `platform.cpu` puts in place.

Order has no meaning here: work on the CPU is done when the call returns, so streams do nothing.
"""

from __future__ import annotations

from collections import defaultdict

import torch

HOST = torch.device("cpu")


class Stream:
    """A queue that is always empty. All streams are the same one."""

    def __init__(self, *args, **kwargs):
        self.device = HOST
        self.cuda_stream = 0

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        return False

    def __eq__(self, other):
        return isinstance(other, Stream)

    def __hash__(self):
        return 0

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass


_ONLY_STREAM = Stream()


def _host_device(*args, **kwargs) -> torch.device:
    return HOST


def _nothing(*args, **kwargs) -> None:
    return None


def _the_stream(*args, **kwargs) -> Stream:
    return _ONLY_STREAM


def _get_rng_state(*args, **kwargs) -> torch.Tensor:
    return torch.default_generator.get_state()


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _no_memory_used(*args, **kwargs) -> dict[str, int]:
    return defaultdict(int)


def _unchanged(tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    return tensor


class UnpinnedTorch:
    """The module `torch` without page-locked memory: only factories that Megatron asks for `pin_memory=True`."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def empty(*args, pin_memory: bool = False, **kwargs):
        return torch.empty(*args, **kwargs)

    @staticmethod
    def empty_like(*args, pin_memory: bool = False, **kwargs):
        return torch.empty_like(*args, **kwargs)

    @staticmethod
    def full(*args, pin_memory: bool = False, **kwargs):
        return torch.full(*args, **kwargs)


STAND_INS = {
    # tensors are created on and moved to device=torch.cuda.current_device() all over Megatron
    "current_device": _host_device,
    # gradient-norm and barrier code of training, engine steps, refits, checkpoints
    "synchronize": _nothing,
    # streams of the text generation controller and of the refit's gloo copies
    "Stream": Stream,
    # gradient buckets (finish_grad_sync), sampled tokens of the engine, refits
    "current_stream": _the_stream,
    # DynamicInferenceEngine.suspend and resume log how much they released
    "memory_stats": _no_memory_used,
    # The RNG tracker: model_parallel_cuda_manual_seed, fork() around the attention dropout. Without `manual_seed` all
    # of its states are the same, silently: torch queues the seed until CUDA is initialised.
    "manual_seed": _seed,
    "get_rng_state": _get_rng_state,
    "random.get_rng_state": _get_rng_state,
}

TENSOR_METHODS = {
    # DynamicInferenceContext with kv_cache_management_mode offload
    "pin_memory": _unchanged,
    # DistributedOptimizer.get_parameter_state_dp_zero: moments gathered for a checkpoint
    "cuda": _unchanged,
}
