"""What we use of other packages beyond their documented interfaces: it is there, and pinned.

Classes of ours that extend a class of nats-py or uvicorn override or use names that a new release
may remove without notice. Each of these packages has an upper bound, and this test names what is
gone when the bound is raised.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import tomllib
from pathlib import Path

import pytest
import uvicorn
from nats.aio.client import Client
from packaging.requirements import Requirement
from redis.asyncio.cluster import ClusterNode, NodesManager
from redis.asyncio.connection import RedisSSLContext, SSLConnection
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stanchion.adapters.bus.nats import connection
from stanchion.gateway import protocol, server

_EXTENDED = [
    (connection._Client, Client),  # noqa: SLF001 - it is about what is private
    (protocol.GuardedProtocol, HttpToolsProtocol),
    (protocol._Flow, FlowControl),  # noqa: SLF001 - as above
    (server._Server, uvicorn.Server),  # noqa: SLF001 - as above
]
_PINNED = ("nats-py", "redis", "uvicorn")


def _tree(of: type) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(of)))


def _used(of: type, owner: str) -> set[str]:
    """The attributes of ``self`` or of ``super()`` that a class mentions."""
    return {
        node.attr
        for node in ast.walk(_tree(of))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == owner
    }


def _defined(of: type) -> set[str]:
    """What a class has itself: methods, annotated names, and what is assigned to ``self``."""
    names = set()
    for node in ast.walk(_tree(of)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case _:
                """It defines nothing."""
    return names


def _inherited(of: type) -> set[str]:
    return {name for base in of.__mro__[:-1] for name in _defined(base) | set(vars(base))}


@pytest.mark.parametrize(("ours", "theirs"), _EXTENDED, ids=lambda each: each.__name__)
def test_every_name_of_the_extended_class_is_still_there(ours: type, theirs: type) -> None:
    needed = (_used(ours, "self") - _defined(ours)) | _used(ours, "super()")
    assert needed
    gone = needed - _inherited(theirs) - set(dir(object))
    assert not gone, f"{theirs.__module__}.{theirs.__name__} has lost {sorted(gone)}"


def test_what_redis_py_lends_without_documenting_it_is_still_there() -> None:
    parameters = inspect.signature(NodesManager).parameters
    assert {"startup_nodes", "require_full_coverage", "connection_kwargs"} <= set(parameters)
    assert {"initialize", "aclose", "slots_cache"} <= set(dir(NodesManager))
    assert {"host", "port"} <= set(dir(ClusterNode))
    assert callable(RedisSSLContext.get)
    assert isinstance(SSLConnection().ssl_context, RedisSSLContext)


@pytest.mark.parametrize("package", _PINNED)
def test_such_a_package_has_an_upper_bound(package: str) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    extras = project["project"]["optional-dependencies"].values()
    [needed] = {line for some in extras for line in some if Requirement(line).name == package}
    assert any(bound.operator == "<" for bound in Requirement(needed).specifier), needed
