"""Rewrites CUDA literals inside the functions of a module.

Megatron writes `device="cuda"` and `tensor.type() == "torch.cuda.FloatTensor"` in plain code. Changing the constants of
just those functions leaves torch itself untouched and costs nothing per call.
"""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType, ModuleType


def retarget(module: ModuleType) -> None:
    """Replace CUDA literals by CPU ones in every function and method defined in `module`.

    Raises LookupError when there is none: the module changed and the entry that named it is out of date.
    """
    changed = [_retarget_function(function) for function in _functions_of(module)]
    if not any(changed):
        raise LookupError(f"{module.__name__} has no CUDA literal to replace: another megatron-core than 0.19?")


def _functions_of(module: ModuleType) -> list[FunctionType]:
    owners = [module, *(v for v in vars(module).values() if inspect.isclass(v) and v.__module__ == module.__name__)]
    found = [inspect.unwrap(_plain(value)) for owner in owners for value in vars(owner).values()]
    return [f for f in found if isinstance(f, FunctionType) and f.__module__ == module.__name__]


def _plain(value: object) -> object:
    """The function behind a staticmethod, classmethod, property, cached function or decorator."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value


def _retarget_function(function: FunctionType) -> bool:
    code = _translate(function.__code__)
    if code is function.__code__:
        return False
    function.__code__ = code
    return True


def _translate(value):
    """`value` with every CUDA literal replaced; the same object when there is none."""
    if isinstance(value, str):
        if value == "cuda":
            return "cpu"
        return (
            value.replace("torch.cuda.", "torch.") if value.startswith("torch.cuda.") and "Tensor" in value else value
        )
    if isinstance(value, tuple):
        items = tuple(_translate(item) for item in value)
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if isinstance(value, CodeType):
        constants = _translate(value.co_consts)
        return value if constants is value.co_consts else value.replace(co_consts=constants)
    return value
