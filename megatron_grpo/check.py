"""`check RECIPE`: everything about a run that can be known before it starts. Imports neither ray, torch nor megatron.

Standard output gets the findings, standard error the problems, one a line. Exit 0: the recipe is valid; 2: it is not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from .config.derived import Derived, derive
from .config.installed import ActiveKernels, active_kernels, vllm_fault
from .config.load import LoadedRecipe, load_recipe
from .config.yaml_source import to_yaml
from .errors import ConfigError
from .layout import Layout, World


def run_check(path: str, overrides: Sequence[str] = (), *, as_json: bool = False, strict: bool = False) -> int:
    """Validate one recipe and print what it comes to. `strict`: a key without effect is an error."""
    try:
        loaded = load_recipe(path, overrides)
        layout = Layout.from_recipe(loaded.recipe)
    except ConfigError as error:
        return _refuse(path, error.problems, as_json=as_json)
    if strict and loaded.ineffective:
        return _refuse(path, loaded.ineffective, as_json=as_json)
    megatron = loaded.recipe.policy.megatron_cfg
    kernels = active_kernels(loaded.recipe.cluster.accelerator, megatron.layer_spec)
    derived = derive(loaded.recipe, layout, loaded.facts.train_rows)
    if as_json:
        print(json.dumps(_as_record(loaded, layout, derived, kernels), indent=2))
    else:
        print("\n".join(_as_text(loaded, layout, derived, kernels)))
    return 0


def _refuse(path: str, problems: Sequence[str], *, as_json: bool) -> int:
    print(f"error: recipe {path} is not valid: {len(problems)} problem(s)", file=sys.stderr)
    for problem in problems:
        print(f"  {' '.join(problem.split())}", file=sys.stderr)
    if as_json:
        print(json.dumps({"valid": False, "recipe": path, "errors": list(problems)}, indent=2))
    return 2


def _as_record(
    loaded: LoadedRecipe, layout: Layout, derived: Iterable[Derived], kernels: ActiveKernels
) -> dict[str, Any]:
    return {
        "valid": True,
        "recipe": str(loaded.path),
        "resolved": loaded.resolved,
        "layout": {
            "train": asdict(layout.train),
            "generation": asdict(layout.generation) if layout.generation else None,
            "engine": asdict(layout.engine),
            "colocated": layout.generation is None,
            "idle_gpus": layout.num_idle,
        },
        "derived": [asdict(number) for number in derived],
        "kernels": asdict(kernels),
        "warnings": list(loaded.warnings),
        "notes": list(loaded.notes),
    }


def _as_text(loaded: LoadedRecipe, layout: Layout, derived: Iterable[Derived], kernels: ActiveKernels) -> Iterator[str]:
    yield f"recipe {loaded.path} is valid"
    yield "\nresolved recipe"
    yield _indent(to_yaml(loaded.resolved))
    yield "layout"
    yield from _world_lines("training", layout.train)
    if layout.generation is None and layout.engine == layout.train:
        yield "  generation shares the training ranks and their weights (colocated)"
    elif layout.generation is None:
        yield "  generation shares the training ranks (colocated) with a model of its own, resharded after every step:"
        yield from _world_lines("generation", layout.engine)
    else:
        yield from _world_lines("generation", layout.generation)
    if layout.num_idle:
        yield f"  {layout.num_idle} GPUs stay idle"
    yield "\nbatch arithmetic and derived sizes"
    for number in derived:
        yield f"  {number.name:<32} {'unknown' if number.value is None else number.value:>9}   = {number.formula}"
    yield f"\nwould run here on {kernels.accelerator}: {kernels.layer_spec} layers, {kernels.fused_adam}"
    if loaded.recipe.policy.generation.backend == "vllm" and (fault := vllm_fault()):
        yield f"would not run here: {fault}"
    for headline, lines in (("warnings", loaded.warnings), ("not available yet (train refuses)", loaded.notes)):
        if lines:
            yield f"\n{headline}"
            yield from (f"  {' '.join(line.split())}" for line in lines)


def _indent(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())


def _world_lines(name: str, world: World) -> Iterator[str]:
    sizes = f"TP {world.tp}, PP {world.pp}, CP {world.cp}, EP {world.ep}, DP {world.dp}"
    sequence = ", sequence parallel" if world.sequence_parallel else ""
    yield f"  {name}: {world.size} rank(s), {sizes}{sequence}"
    for rank in world.ranks:
        yield (
            f"    rank {rank.rank:<4} node {rank.node:<3} gpu {rank.gpu:<3} "
            f"tp {rank.tp:<3} pp {rank.pp:<3} cp {rank.cp:<3} dp {rank.dp:<3} ep {rank.ep}"
        )
