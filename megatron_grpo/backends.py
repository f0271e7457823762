"""What a generation backend of another package implements, and how it is found: docs/backends.md.

Pure: knows entry points and protocols, no engine. The built-in Megatron backend implements the same `Backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from .config.rule_modes import BACKEND_GROUP, installed_backends
from .config.schema import Recipe
from .errors import ConfigError
from .interfaces import Engine, EngineCapabilities, Generator, WeightTransfer
from .layout import Layout

_COLOCATED = "policy.generation.colocated.enabled"


class PolicyRanks(Protocol):
    """The trainer's processes, for a transfer that takes weights out of them."""

    async def call(self, function: Callable[..., Any], *args: Any) -> Sequence[Any]:
        """Run `function(module, *args)` on every rank at once, on the thread that owns its collectives.

        `module` is the rank's Megatron module: its shard of the model. The function travels by pickle; answers come
        in rank order. A failing rank's error is raised, naming it.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSetting:
    """All that a backend is given. `options` is `policy.generation.backend_options`, unchanged."""

    recipe: Recipe
    layout: Layout
    options: Mapping[str, Any]
    vocab_size: int
    eos_id: int
    pad_id: int
    log_dir: str
    policy: PolicyRanks


class Backend(Protocol):
    """One generation engine and the way weights reach it.

    `engine` and `transfer` are used in the driver, `generator` in the collector's process, where it arrives by pickle:
    it holds an actor handle or an address, not the engine. `transfer` is never called where waking carries weights.
    """

    engine: Engine
    generator: Generator
    transfer: WeightTransfer

    async def start(self) -> None:
        """Called once, after the trainer's models are built and warmed up, within `timeouts.actor_start`."""
        ...

    async def close(self) -> None:
        """End what `start` started, also after a failure. Safe when nothing was started."""
        ...


BackendFactory = Callable[[BackendSetting], Backend]  # what the entry point names; must not start anything


def load_backend(name: str) -> BackendFactory:
    """The factory that another package registers. ConfigError: none has this name, or it cannot be imported."""
    found = {entry.name: entry for entry in entry_points(group=BACKEND_GROUP)}
    if name not in found:
        raise ConfigError(
            f"policy.generation.backend: {name!r} is not installed; installed backends: "
            f"{', '.join(installed_backends())}; a package adds one through the entry point group {BACKEND_GROUP!r}"
        )
    try:
        return found[name].load()
    except Exception as error:  # importing runs the package's code, which may fail in any way
        raise ConfigError(
            f"policy.generation.backend: {name!r} is registered as {found[name].value}, which cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error


def check_capabilities(name: str, capabilities: EngineCapabilities, *, colocated: bool) -> None:
    """Raise ConfigError where the recipe's placement is not the one the backend was made for."""
    if colocated != capabilities.blocks_training:
        kind = "shares the trainer's GPUs" if capabilities.blocks_training else "has GPUs of its own"
        wanted = str(capabilities.blocks_training).lower()
        raise ConfigError(
            f"{_COLOCATED} is {str(colocated).lower()}, but the generation backend {name!r} {kind}: "
            f"set {_COLOCATED}={wanted}"
        )
    if capabilities.blocks_training and not capabilities.wake_carries_weights:
        raise ConfigError(
            f"the generation backend {name!r} shares the trainer's GPUs but does not carry weights when it wakes: "
            "no weight update is made for that"
        )
