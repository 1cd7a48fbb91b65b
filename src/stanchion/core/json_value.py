"""The types of JSON values: all data of workflows is JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

__all__ = ["JsonObject", "JsonValue"]

if TYPE_CHECKING:
    JsonValue: TypeAlias = (
        "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
    )
    JsonObject: TypeAlias = dict[str, JsonValue]
else:
    # msgspec reads annotations at run time and has no recursive types. Whatever it decodes from
    # JSON is a JSON value.
    JsonValue = Any
    JsonObject = dict[str, Any]
