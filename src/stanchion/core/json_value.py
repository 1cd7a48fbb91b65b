"""JSON values: the only shape in which a workflow's data travels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

__all__ = ["JsonObject", "JsonValue"]

if TYPE_CHECKING:
    JsonValue: TypeAlias = (
        "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
    )
    JsonObject: TypeAlias = dict[str, JsonValue]
else:
    # msgspec reads annotations at run time and has no recursive types. What it decodes from JSON is
    # a JSON value by nature.
    JsonValue = Any
    JsonObject = dict[str, Any]
