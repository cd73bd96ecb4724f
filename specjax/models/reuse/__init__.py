"""What a drafter does with the rows that verification rejected: one file per method.

Every method is a frozen dataclass, `types.Reuse`, that is also its JSON config. `NAMES` lists them;
a new one is added there and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.models.reuse.carryover import Carryover
from specjax.models.reuse.dflow import DFlow
from specjax.models.reuse.reanchor import ReAnchor
from specjax.models.reuse.retrace import ReTrace
from specjax.types import Reuse

NAMES: Mapping[str, type[Any]] = {
    "carryover": Carryover,
    "dflow": DFlow,
    "retrace": ReTrace,
    "reanchor": ReAnchor,
}


def make(name: str, /, **settings: Any) -> Reuse:
    """A method by its name.

    Raises:
      ValueError: an unknown name, setting or value.
    """
    if name not in NAMES:
        raise ValueError(f"reuse={name!r} is not one of {', '.join(NAMES)}")
    known = {field.name for field in dataclasses.fields(NAMES[name])}
    for setting in settings:
        if setting not in known:
            raise ValueError(f"reuse {name} has no setting {setting!r}")
    return NAMES[name](**settings)


def name_of(method: Reuse) -> str:
    """The name under which `make` makes it."""
    return next(name for name, kind in NAMES.items() if isinstance(method, kind))


def to_json(method: Reuse) -> dict[str, Any]:
    """A method as a JSON object: its name and settings."""
    settings: Any = dataclasses.asdict(method)  # type: ignore[call-overload]
    return {"method": name_of(method), **settings}


def from_json(raw: Mapping[str, Any]) -> Reuse:
    """The inverse of `to_json`; ValueError names what is wrong."""
    settings = dict(raw)
    return make(settings.pop("method", ""), **settings)
