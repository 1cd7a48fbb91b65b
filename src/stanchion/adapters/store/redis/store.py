"""The store in Redis: Redis 6.2 or newer, Valkey, and clusters of either.

Every method that writes is one Lua script on keys of one shard, so it is atomic. Its durability
depends on the settings of the server: ``docs/how-to/redis-durability.md``.
"""

from __future__ import annotations

import logging
from typing import Final

from stanchion.adapters.redis.address import read_url
from stanchion.adapters.redis.client import RedisClient
from stanchion.adapters.redis.startup import claim_format, examine
from stanchion.adapters.store.redis.admission import RedisAdmissions
from stanchion.adapters.store.redis.audit import RedisAuditLog, RedisReceipts
from stanchion.adapters.store.redis.definitions import (
    RedisDefinitions,
    RedisDocuments,
    RedisReplicas,
    RedisTenants,
    finish_sharing,
)
from stanchion.adapters.store.redis.encode import COMMON_TAG, StoreKeys, format_text
from stanchion.adapters.store.redis.housekeeping import RedisHousekeeping, RedisLetters, adopt_runs
from stanchion.adapters.store.redis.jobs import RedisJobs, RedisTokens
from stanchion.adapters.store.redis.outbox import RedisOutbox
from stanchion.adapters.store.redis.runs import RedisRuns
from stanchion.adapters.store.redis.shards import Rounds, Shards
from stanchion.adapters.system import SystemEntropy
from stanchion.core.model import SHARDS
from stanchion.core.upgrade import LEVEL
from stanchion.ports.entropy import Entropy

_DAY_MS: Final = 86_400_000
_AUDIT_TTL_MS: Final = 90 * _DAY_MS
_FORMATS: Final = tuple(map(format_text, range(LEVEL, 0, -1)))
"""The format of a new store first, then those of older versions."""
_log = logging.getLogger(__name__)


class RedisStore(
    RedisAdmissions,
    RedisRuns,
    RedisJobs,
    RedisTokens,
    RedisOutbox,
    RedisDefinitions,
    RedisTenants,
    RedisDocuments,
    RedisReplicas,
    RedisLetters,
    RedisHousekeeping,
    RedisAuditLog,
    RedisReceipts,
):
    """See ``ports.store.Store``. Open it with ``RedisStore.open``."""

    def __init__(self, shards: Shards, warnings: tuple[str, ...]) -> None:
        super().__init__(shards)
        self.warnings = warnings
        """Warnings about the settings of the servers."""

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        namespace: str = "stanchion",
        key_ttl_ms: int = _DAY_MS,
        audit_ttl_ms: int = _AUDIT_TTL_MS,
        timeout_s: float = 2.0,
        entropy: Entropy | None = None,
    ) -> RedisStore:
        """Connect and check the servers. Raises ``BackendError``.

        ``key_ttl_ms``: how long a key is kept after its run ended. ``audit_ttl_ms``: how long an
        audit entry is kept. ``timeout_s``: how long a call may take.
        """
        chance = entropy or SystemEntropy()
        keys = StoreKeys(namespace)
        client = RedisClient(read_url(url), timeout_s=timeout_s, entropy=chance)
        try:
            warnings = await examine(client)
            found = await claim_format(client, keys.format, COMMON_TAG, *_FORMATS)
        except BaseException:
            await client.close()
            raise
        for warning in warnings:
            _log.warning("store_settings", extra={"fields": {"warning": warning}})
        if found != _FORMATS[0]:
            hint = "when no older process is left: stanchion upgrade finish"
            _log.warning("upgrade_unfinished", extra={"fields": {"format": found, "hint": hint}})
        rounds = Rounds(first_shard=int(chance.unit() * SHARDS))
        shards = Shards(
            client,
            keys,
            rounds,
            key_ttl_ms,
            audit_ttl_ms,
            has_new_formats=found == _FORMATS[0],
        )
        try:
            adopted = await adopt_runs(shards)
            await finish_sharing(shards)
        except BaseException:
            await client.close()
            raise
        if adopted:
            _log.info("store_upgraded", extra={"fields": {"runs": adopted}})
        return cls(shards, warnings)
