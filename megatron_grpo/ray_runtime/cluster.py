"""Starts or joins Ray and says where each worker runs. Owns the cluster's life; knows nothing of training."""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import ConfigError

log = logging.getLogger(__name__)

# What every worker process needs before its first import. One thread each: ranks share the cores of a small machine.
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # megatron's fused functions would start inductor on a CPU
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron: orders communication kernels before compute
    "TOKENIZERS_PARALLELISM": "false",
}


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Join the cluster at RAY_ADDRESS, or start a private one on this machine's loopback and end it afterwards."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with _joined() if os.environ.get("RAY_ADDRESS") else _private_cluster():
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _joined() -> Iterator[None]:
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.WARNING)
    log.info("joined the Ray cluster at %s", os.environ["RAY_ADDRESS"])
    yield


@contextmanager
def _private_cluster() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="megatron_grpo_") as folder, _private_token(Path(folder)):
        ray.init(
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=None if _has_gpus() else 512 << 20,
            _node_ip_address="127.0.0.1",
        )
        yield


@contextmanager
def _private_token(folder: Path) -> Iterator[None]:
    """A local Ray turns token authentication on by itself; this keeps its token out of the home directory."""
    if {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        yield
        return
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_TOKEN_PATH"]
        os.environ.pop("RAY_AUTH_MODE", None)  # Ray set it when it found the token


def _has_gpus() -> bool:
    return Path("/proc/driver/nvidia").exists()


def reserve(bundles: Sequence[int], *, use_gpus: bool, timeout_s: float) -> PlacementGroup | None:
    """A bundle of so many GPUs per worker, packed node by node. ConfigError when the cluster is too small.

    CPU ranks need no reservation: they are small and share the cores (returns None).
    """
    if not use_gpus:
        return None
    available = int(ray.cluster_resources().get("GPU", 0))
    if available < sum(bundles):
        raise ConfigError(
            f"the recipe asks for {sum(bundles)} GPUs (cluster.num_nodes x cluster.gpus_per_node) "
            f"but the Ray cluster has {available}; lower them or start more nodes"
        )
    group = placement_group([{"GPU": gpus, "CPU": 1} for gpus in bundles], strategy="PACK")
    ray.get(group.ready(), timeout=timeout_s)
    return group


def worker_options(group: PlacementGroup | None, bundle: int, num_gpus: int = 1) -> dict[str, Any]:
    """Actor options of the worker in `bundle`, all of whose GPUs Ray puts into CUDA_VISIBLE_DEVICES."""
    env = dict(WORKER_ENV)
    if group is None:
        env["CUDA_VISIBLE_DEVICES"] = ""
        return {"num_cpus": 0, "runtime_env": {"env_vars": env}}
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    return {"num_cpus": 1, "num_gpus": num_gpus, "scheduling_strategy": strategy, "runtime_env": {"env_vars": env}}
