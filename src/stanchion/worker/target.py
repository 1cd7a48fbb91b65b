"""Targets: ``module:app`` names a worker in a module."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Final

from stanchion.worker.errors import BadTarget
from stanchion.worker.worker import Worker

__all__ = ["load_worker"]

_DEFAULT_NAME: Final = "app"


def load_worker(target: str) -> Worker:
    """The worker that ``target`` names. Raises ``BadTarget`` with what to write instead.

    An error inside the module is its own, and is raised as it is.
    """
    module_name, _, name = target.partition(":")
    if module_name.endswith(".py") or "/" in module_name or not module_name:
        stem = module_name.removesuffix(".py").strip("/").replace("/", ".") or "worker"
        raise BadTarget(f"{target!r} names no module; write it as {stem}:{name or _DEFAULT_NAME}")
    here = os.getcwd()  # noqa: PTH109 - sys.path holds strings
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise BadTarget(
            f"there is no module {error.name!r} here; run the command where {error.name!r} can be"
            " imported, or install it"
        ) from None
    found = getattr(module, name or _DEFAULT_NAME, None)
    if isinstance(found, Worker):
        return found
    workers = sorted(key for key, value in vars(module).items() if isinstance(value, Worker))
    hint = (
        f"; write {module_name}:{workers[0]}" if workers else "; make one with stanchion.Worker()"
    )
    raise BadTarget(f"{name or _DEFAULT_NAME!r} in module {module_name!r} is no worker{hint}")
