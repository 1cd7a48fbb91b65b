"""Values are frozen: what one caller was given, no other can change."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import msgspec
import pytest

import stanchion

PACKAGES = ("client", "core", "leases", "ports", "services", "wire", "worker")
CHANGED = frozenset({"GateCall", "GateWindow", "KnownRun"})
"""These are state of their owner, and not values that are passed on."""


def public_structs(package: str) -> Iterator[type[msgspec.Struct]]:
    root = importlib.import_module(f"{stanchion.__name__}.{package}")
    for found in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
        for name, value in vars(importlib.import_module(found.name)).items():
            is_struct = isinstance(value, type) and issubclass(value, msgspec.Struct)
            if is_struct and value.__module__ == found.name and not name.startswith("_"):
                yield value


@pytest.mark.parametrize("package", PACKAGES)
def test_public_values_are_frozen(package: str) -> None:
    structs = list(public_structs(package))
    assert structs
    loose = {each.__name__ for each in structs if not each.__struct_config__.frozen}
    assert loose <= CHANGED
