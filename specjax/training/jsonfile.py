"""JSON objects as frozen dataclasses; every error names the dotted path of what is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal


def read(kind: Any, value: Any, path: str = "") -> Any:
    """`value` of a JSON file as `kind`, the type annotation of a config.

    Raises:
      ValueError: an unknown or missing key, a value of another type or one that its dataclass
        refuses, by its dotted name, which begins with `path`.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return read(next(a for a in arguments if a is not type(None)), value, path)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{path} = {value!r} is not one of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple:
        return _read_tuple(arguments, value, path)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, path)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{path} = {value!r} must be {kind.__name__}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{path} must be a finite number, not {value}")
    return value


def _read_tuple(kinds: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    """A list of any length, or, of pairs, an object of names; or a list as long as `kinds`."""
    pair = typing.get_args(kinds[0])
    if isinstance(value, dict) and len(pair) == 2 and typing.get_origin(kinds[0]) is tuple:
        return tuple((name, read(pair[1], item, f"{path}.{name}")) for name, item in value.items())
    if not isinstance(value, list):
        raise ValueError(f"{path} = {value!r} must be a list")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(value) != len(kinds):
        raise ValueError(f"{path} = {value!r} must have {len(kinds)} entries, not {len(value)}")
    entries = enumerate(zip(kinds, value, strict=True))
    return tuple(read(kind, item, f"{path}.{i}") for i, (kind, item) in entries)


def _read_dataclass(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{path or 'the config'} = {value!r} must be an object")
    known = {entry.name: entry for entry in dataclasses.fields(kind)}
    annotations = typing.get_type_hints(kind)
    unknown = sorted(set(value) - set(known))
    here = f"{path}." if path else ""
    if unknown:
        raise ValueError(f"{here}{unknown[0]} is unknown; known are {', '.join(known)}")
    for name, entry in known.items():
        optional = (entry.default, entry.default_factory) != (dataclasses.MISSING,) * 2
        if name not in value and not optional:
            raise ValueError(f"{here}{name} is missing")
    values = {name: read(annotations[name], value[name], here + name) for name in value}
    try:
        return kind(**values)
    except ValueError as error:  # begins with the name of the field
        raise ValueError(f"{here}{error}") from None


def change(raw: dict[str, Any], assignment: str) -> None:
    """Applies "optimizer.learning_rate=1e-3" to a JSON object, in place.

    Raises:
      ValueError: no name=value, or a name that cannot be in the object.
    """
    path, sign, text = assignment.partition("=")
    if not sign:
        raise ValueError(f"--set {assignment}: write it as name=value, such as steps=100")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text  # a bare word is a string
    *parents, last = path.split(".")
    where: Any = raw
    for key in parents:
        where = (
            _item(where, key, assignment) if isinstance(where, list) else where.setdefault(key, {})
        )
        if not isinstance(where, dict | list):
            raise ValueError(f"--set {assignment}: {key} holds no further names")
    if isinstance(where, list):
        _item(where, last, assignment)
        where[int(last)] = value
    else:
        where[last] = value


def _item(values: list[Any], key: str, assignment: str) -> Any:
    if not key.isdecimal() or int(key) >= len(values):
        raise ValueError(
            f"--set {assignment}: {key} is not one of the entries 0 to {len(values) - 1}"
        )
    return values[int(key)]
