"""Who may import whom. The table is the rule; a module without a row, or an import outside its row, fails."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.import_walk import PACKAGE, imports, module_name, package_files


@dataclass(frozen=True, slots=True)
class Row:
    """What a part may import: other parts by name, and libraries besides the standard one."""

    parts: str = ""
    libraries: str = ""


VALUES = "types errors"
PURE = f"{VALUES} interfaces config layout stages algorithms replay data batching conversion metrics"
TRANSFER = Row(
    f"{PURE} platform weight_sync weight_sync.seat weight_sync.joined_group weight_sync.gloo weight_sync.fingerprint"
    " weight_sync.places weight_sync.reshard",
    "torch megatron numpy",
)
STREAM = "weight_sync.wire weight_sync.stream weight_sync.stream_channels weight_sync.hf_model"
EVERYTHING = Row("*", "*")

TABLE = {
    "types": Row("", "numpy"),
    "errors": Row(),
    "interfaces": Row("types"),
    "layout": Row(VALUES),
    "stages": Row(VALUES),
    "config": Row(f"{VALUES} layout stages", "pydantic pydantic_core omegaconf yaml pyarrow"),
    "algorithms": Row(VALUES, "torch numpy"),
    "batching": Row(VALUES, "torch numpy"),
    "replay": Row(VALUES, "torch numpy"),
    "data": Row(f"{VALUES} interfaces", "numpy tokenizers transformers pyarrow jinja2"),
    "conversion": Row(VALUES, "torch numpy safetensors"),
    "metrics": Row(VALUES, "numpy tensorboard wandb"),
    "report": Row(f"{VALUES} metrics", "rich"),
    "stopping": Row(),
    "signals": Row(f"{VALUES} stopping"),
    "loop": Row(f"{PURE} stopping"),
    "backends": Row(PURE),
    "batcher": Row(PURE),
    "collector": Row(PURE),
    "rollout": Row(PURE, "numpy math_verify reasoning_gym"),
    "validation": Row(f"{PURE} rollout", "numpy"),  # scores held-out answers as rollouts are scored
    "weight_sync": Row(f"{PURE}"),
    "weight_sync.transfer": TRANSFER,
    "weight_sync.seat": Row(PURE),
    "weight_sync.joined_group": TRANSFER,
    "weight_sync.gloo": TRANSFER,
    "weight_sync.fingerprint": TRANSFER,
    "weight_sync.places": TRANSFER,
    "weight_sync.reshard": TRANSFER,
    "weight_sync.second_model": TRANSFER,
    "weight_sync.wire": Row(VALUES, "torch"),
    "weight_sync.stream": Row(f"{VALUES} weight_sync.wire weight_sync.fingerprint", "torch"),
    "weight_sync.stream_channels": Row("weight_sync weight_sync.stream weight_sync.joined_group", "torch vllm"),
    "weight_sync.hf_model": Row(PURE),
    "platform": Row(PURE, "torch numpy"),
    "engines": Row(),
    "engines.megatron": Row(
        f"{PURE} platform {STREAM}", "torch numpy megatron zmq transformer_engine apex flash_attn mamba_ssm causal_conv1d"
    ),
    "engines.vllm": Row(
        f"{PURE} platform {STREAM} weight_sync weight_sync.joined_group weight_sync.fingerprint", "torch numpy vllm"
    ),
    "checkpoint": Row(PURE, "torch numpy"),
    # The actor shells build what they host, so they see the engines; only they speak Ray.
    "ray_runtime": Row(
        f"{PURE} platform engines engines.megatron engines.vllm checkpoint collector rollout validation report"
        f" weight_sync weight_sync.transfer weight_sync.second_model weight_sync.seat {STREAM}",
        "ray numpy psutil",
    ),
    "check": Row(f"{VALUES} config layout", "rich"),
    "resume": Row(f"{VALUES} config data checkpoint"),
    "verify": Row(f"{VALUES} data"),
    "inspect_checkpoint": Row(f"{VALUES} data replay checkpoint"),
    "workload": EVERYTHING,
    "plan": Row(f"{VALUES} config layout backends checkpoint resume workload"),
    "assembly": EVERYTHING,
    "launch": EVERYTHING,
    "__main__": Row("errors check launch verify inspect_checkpoint"),
}
SPEAKS_RAY = ("ray_runtime", "assembly")


def part_of(module: str) -> str | None:
    """`megatron_grpo.config.load` -> `config`; None for the package itself or a name without a row."""
    names = module.split(".")[1:]
    prefixes = [".".join(names[:length]) for length in range(len(names), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in TABLE), None)


def layer_faults(source: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    part = part_of(module)
    if part is None:
        if module != PACKAGE:
            yield f"{module}: has no row in the table of layers"
        return
    row = TABLE[part]
    for found in imports(source, module, is_package=is_package):
        top = found.target.split(".")[0]
        if top == PACKAGE:
            other = part_of(found.target)
            if other not in (None, part) and row.parts != "*" and other not in row.parts.split():
                yield f"{module}:{found.line}: {part} may not import {other} ({found.target})"
        elif top not in sys.stdlib_module_names and row.libraries != "*" and top not in row.libraries.split():
            yield f"{module}:{found.line}: {part} may not import the library {top}"


def ray_faults(source: str, module: str) -> Iterator[str]:
    if part_of(module) in SPEAKS_RAY:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "remote":
            yield f"{module}:{node.lineno}: .remote( outside ray_runtime"
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("ray.get", "ray.wait", "ray.put"):
            yield f"{module}:{node.lineno}: {ast.unparse(node)} outside ray_runtime"


def files():
    return [pytest.param(path, id=module_name(path)) for path in package_files()]


@pytest.mark.parametrize("path", files())
def test_a_module_imports_only_what_its_layer_may(path):
    module = module_name(path)
    source = path.read_text()
    assert [*layer_faults(source, module, is_package=path.name == "__init__.py"), *ray_faults(source, module)] == []


BAD = '''
from __future__ import annotations
import asyncio, torch
from typing import TYPE_CHECKING
from . import replay, __version__
from .ray_runtime.clients import Client
if TYPE_CHECKING:
    from .launch import run
    import vllm
else:
    import megatron.core
def late():
    from megatron_grpo.launch import run
    import importlib
    importlib.import_module("vllm.worker")
    return handle.train.remote(ray.get(1))
'''


def test_the_checker_finds_every_kind_of_forbidden_import():
    assert list(layer_faults(BAD, "megatron_grpo.loop")) == [
        "megatron_grpo.loop:3: loop may not import the library torch",
        "megatron_grpo.loop:6: loop may not import ray_runtime (megatron_grpo.ray_runtime.clients.Client)",
        "megatron_grpo.loop:11: loop may not import the library megatron",
        "megatron_grpo.loop:13: loop may not import launch (megatron_grpo.launch.run)",
        "megatron_grpo.loop:15: loop may not import the library vllm",
    ]
    assert sorted(ray_faults(BAD, "megatron_grpo.loop")) == [
        "megatron_grpo.loop:16: .remote( outside ray_runtime",
        "megatron_grpo.loop:16: ray.get outside ray_runtime",
    ]


def test_the_checker_resolves_relative_imports_from_packages_and_modules():
    inside, outside = "from . import kl", "from ..rollout import group"
    fault = "algorithms may not import rollout (megatron_grpo.rollout.group)"
    for module, is_package in (("megatron_grpo.algorithms.loss", False), ("megatron_grpo.algorithms", True)):
        assert list(layer_faults(inside, module, is_package=is_package)) == []
        assert list(layer_faults(outside, module, is_package=is_package)) == [f"{module}:1: {fault}"]


def test_the_engines_do_not_know_each_other():
    module = "megatron_grpo.engines.megatron.worker"
    fault = "engines.megatron may not import engines.vllm (megatron_grpo.engines.vllm.engine)"
    assert list(layer_faults("from ..vllm import engine", module)) == [f"{module}:1: {fault}"]


def test_the_checker_asks_for_a_row_for_every_new_module():
    assert list(layer_faults("", "megatron_grpo.helpers")) == [
        "megatron_grpo.helpers: has no row in the table of layers"
    ]


def test_ray_calls_are_at_home_in_ray_runtime():
    assert list(ray_faults(BAD, "megatron_grpo.ray_runtime.clients")) == []


HEAVY = {"ray", "megatron", "vllm", "torch", "transformers"}


@pytest.mark.parametrize(
    ("module", "kept_out"),
    [
        ("config.load", HEAVY),
        ("layout", HEAVY),
        ("check", HEAVY),
        ("__main__", HEAVY),
        ("loop", HEAVY),
        ("collector", HEAVY - {"torch"}),
        ("replay.buffer", HEAVY - {"torch"}),
        ("data.stream", HEAVY - {"torch"}),
        ("metrics", HEAVY),
        ("report.reporter", HEAVY),
    ],
)
def test_importing_a_pure_part_loads_no_heavy_library(module, kept_out):
    code = f"import sys, {PACKAGE}.{module}; print(*sorted(set({sorted(kept_out)!r}) & sys.modules.keys()))"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == []
