"""Reads what Python files import, without running them. Used by the tests of layers and of packaging."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
PACKAGE = "megatron_grpo"


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """`target` is absolute: `megatron_grpo.types`, `torch.nn`; `line` is where the import stands."""

    target: str
    line: int


def module_name(path: Path, root: Path = REPOSITORY) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_files(root: Path = REPOSITORY) -> list[Path]:
    return sorted((root / PACKAGE).rglob("*.py"))


def imports(source: str, module: str, *, is_package: bool = False) -> list[Import]:
    """Every import that can run, wherever it stands: top level, functions, `import_module("literal")`.

    Blocks under `if TYPE_CHECKING:` never run and are left out. Of `from a import b` the target is `a.b`: whether b is
    a module does not matter to who looks for a prefix.
    """
    package = module if is_package else module.rpartition(".")[0]
    return [found for node in _running_nodes(ast.parse(source)) for found in _imports_of(node, package)]


def _running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        children: list[ast.AST] = list(node.orelse)
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _running_nodes(child)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imports_of(node: ast.AST, package: str) -> Iterator[Import]:
    match node:
        case ast.Import(names=names):
            yield from (Import(target=name.name, line=node.lineno) for name in names)
        case ast.ImportFrom(module=origin, names=names, level=level):
            base = _absolute(origin, level, package)
            yield from (Import(target=f"{base}.{name.name}", line=node.lineno) for name in names)
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
            if ast.unparse(function).rpartition(".")[2] in ("import_module", "__import__"):
                yield Import(target=name, line=node.lineno)


def _absolute(origin: str | None, level: int, package: str) -> str:
    if level == 0:
        return origin or ""
    parents = package.split(".")
    base = parents[: len(parents) - (level - 1)]
    return ".".join([*base, origin] if origin else base)
