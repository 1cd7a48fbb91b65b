"""How workflows, tenants and documents are read back from Redis."""

from __future__ import annotations

from typing import Any

import msgspec

from stanchion.adapters.store.redis.codec import checked
from stanchion.core.model import Instant
from stanchion.core.workflow import Workflow
from stanchion.ports.records import Document, StoredWorkflow, Tenant

__all__ = ["Config", "read_document", "read_tenant", "read_workflow"]


class _Version(msgspec.Struct, frozen=True, array_like=True):
    created_at: Instant
    workflow: str


class Config(msgspec.Struct, frozen=True, array_like=True):
    """A tenant's configuration, with the two numbers that ``admit.lua`` compares in front."""

    limit: int | bool
    rate: float | bool
    tenant: str


_version_decoder = msgspec.msgpack.Decoder(_Version)
_config_decoder = msgspec.msgpack.Decoder(Config)
_workflow_decoder = msgspec.json.Decoder(Workflow)
_tenant_decoder = msgspec.json.Decoder(Tenant)


@checked
def read_workflow(packed: bytes, version: int) -> StoredWorkflow:
    """One version of a workflow."""
    frame = _version_decoder.decode(packed)
    return StoredWorkflow(_workflow_decoder.decode(frame.workflow), version, frame.created_at)


class _Document(msgspec.Struct, frozen=True, array_like=True):
    revision: int
    value: str


_json_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_document_decoder = msgspec.msgpack.Decoder(_Document)


@checked
def read_document(packed: bytes) -> Document:
    """A document with its revision."""
    frame = _document_decoder.decode(packed)
    return Document(_json_decoder.decode(frame.value), frame.revision)


@checked
def read_tenant(packed: bytes) -> Tenant:
    """A tenant's configuration."""
    return _tenant_decoder.decode(_config_decoder.decode(packed).tenant)
