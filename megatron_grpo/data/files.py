"""Rows of JSONL and Parquet files, each with the place it came from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError

_MAX_REPORTED = 20


class _BrokenLine(Exception):
    """What is wrong with one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRow:
    """`where` is "FILE line 16" (1-based; Parquet: "FILE row 16"), for messages."""

    where: str
    values: Mapping[str, Any]


def read_rows(path: Path) -> list[FileRow]:
    """Every row. DataError when the file cannot be read, is of an unknown kind, or has broken lines (all are named)."""
    readers: dict[str, Callable[[Path], list[FileRow]]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}; use {' or '.join(readers)}")
    try:
        return readers[path.suffix](path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_jsonl(path: Path) -> list[FileRow]:
    rows, broken = [], []
    for number, line in _lines(path):
        where = f"{path} line {number}"
        try:
            rows.append(FileRow(where=where, values=_object(line)))
        except _BrokenLine as error:
            broken.append(f"{where}: {error}")
    if broken:
        rest = len(broken) - _MAX_REPORTED
        raise DataError(broken[:_MAX_REPORTED] + ([f"{path}: {rest} more broken lines"] if rest > 0 else []))
    return rows


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    # Bytes, because str.splitlines also splits at U+2028, which JSON strings may contain.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, line


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise _BrokenLine(f"not valid JSON: {error.msg} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise _BrokenLine(f"not valid UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise _BrokenLine("nested too deeply") from error
    if not isinstance(value, dict):
        raise _BrokenLine(f"a {type(value).__name__}, not a JSON object")
    return value


def _read_parquet(path: Path) -> list[FileRow]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow, which is missing: pip install pyarrow") from error
    try:
        records = parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error
    return [FileRow(where=f"{path} row {number}", values=values) for number, values in enumerate(records, start=1)]
