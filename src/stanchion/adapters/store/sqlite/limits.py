"""Tokens of topic limits in SQLite: see ``ports.store.Tokens``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.store.sqlite.codec import SQL
from stanchion.core.model import Instant
from stanchion.core.topic_limits import (
    PoolUse,
    TokenGrant,
    TokenPool,
    TokenRenewal,
    grant_tokens,
    retry_after_ms,
)


def take_tokens(db: Database, pool: TokenPool, tokens: Sequence[str], *, ttl_ms: int) -> TokenGrant:
    """See ``ports.store.Tokens.take_tokens``."""
    now = db.now()
    db.run(SQL["drop_expired_tokens"], now=now)
    running = _running(db, pool, now)
    granted: list[str] = []
    new: list[str] = []
    for token in dict.fromkeys(tokens):
        number = _number(db, pool, token)
        if number is None:
            new.append(token)
        else:
            _extend(db, pool, number, token, Instant(now + ttl_ms))
            granted.append(token)
    used_until_ms = _used_until(db, pool)
    grant = grant_tokens(pool, len(new), running=running, used_until_ms=used_until_ms, now=now)
    if grant.count and pool.rate_per_s is not None:
        db.run(SQL["set_limit_rate"], pool=pool.name, used_until_ms=grant.used_until_ms)
    for token in new[: grant.count]:
        db.run(SQL["add_token"], pool=pool.name, token=token, expires_at=now + ttl_ms)
        granted.append(token)
    running += grant.count
    return TokenGrant(tuple(granted), now, running, grant.is_rate_spent, grant.retry_after_ms)


def renew_tokens(
    db: Database, pool: TokenPool, tokens: Mapping[str, str], *, ttl_ms: int
) -> TokenRenewal:
    """See ``ports.store.Tokens.renew_tokens``."""
    now = db.now()
    db.run(SQL["drop_expired_tokens"], now=now)
    renewed = [
        name for held, name in tokens.items() if _renew(db, pool, held, name, Instant(now + ttl_ms))
    ]
    return TokenRenewal(frozenset(renewed), now)


def release_tokens(
    db: Database, pool: TokenPool, tokens: Collection[str], *, is_unused: bool = False
) -> int:
    """See ``ports.store.Tokens.release_tokens``."""
    now = db.now()
    released = sum(
        db.changed(SQL["remove_token"], pool=pool.name, token=token, now=now) for token in {*tokens}
    )
    if released and is_unused and pool.rate_per_s is not None:
        used_until_ms = _used_until(db, pool) - released * 1000 / pool.rate_per_s
        db.run(SQL["set_limit_rate"], pool=pool.name, used_until_ms=used_until_ms)
    return released


def pool_uses(db: Database, pools: Sequence[TokenPool]) -> tuple[PoolUse, ...]:
    """See ``ports.store.Tokens.pool_uses``."""
    now = db.now()
    return tuple(
        PoolUse(_running(db, pool, now), retry_after_ms(pool, _used_until(db, pool), now), now)
        for pool in pools
    )


def _renew(db: Database, pool: TokenPool, held: str, name: str, expires_at: Instant) -> bool:
    """Extend a token that was found under one of its names, or take it; whether it was possible."""
    number = _number(db, pool, held)
    if number is not None and held != name:
        # Another replica may have taken one under the new name.
        db.run(SQL["remove_token"], pool=pool.name, token=name, now=db.now())
        _extend(db, pool, number, name, expires_at)
        return True
    if number is None and held != name:
        number = _number(db, pool, name)
    if number is None:
        if _exceeds(db, pool, 1):
            return False
        db.run(SQL["add_token"], pool=pool.name, token=name, expires_at=expires_at)
        return True
    # Counted only after the limit was lowered: it reads all tokens that were taken before.
    if _exceeds(db, pool, 0) and _is_beyond(db, pool, number):
        return False
    _extend(db, pool, number, name, expires_at)
    return True


def _number(db: Database, pool: TokenPool, token: str) -> int | None:
    found = db.first(SQL["find_token"], pool=pool.name, token=token)
    return None if found is None else found[0]


def _exceeds(db: Database, pool: TokenPool, more: int) -> bool:
    """Whether the tokens and so many more are more than the limit."""
    limit = pool.max_running
    return limit is not None and _running(db, pool, db.now()) + more > limit


def _is_beyond(db: Database, pool: TokenPool, number: int) -> bool:
    found = db.first(SQL["count_tokens_before"], pool=pool.name, number=number)
    assert found is not None
    return pool.max_running is not None and found[0] >= pool.max_running


def _extend(db: Database, pool: TokenPool, number: int, name: str, expires_at: Instant) -> None:
    db.run(SQL["extend_token"], pool=pool.name, number=number, token=name, expires_at=expires_at)


def _running(db: Database, pool: TokenPool, now: Instant) -> int:
    found = db.first(SQL["count_tokens"], pool=pool.name, now=now)
    assert found is not None
    count: int = found[0]
    return count


def _used_until(db: Database, pool: TokenPool) -> float:
    found = None
    if pool.rate_per_s is not None:
        found = db.first(SQL["show_limit_rate"], pool=pool.name)
    return 0.0 if found is None else found[0]
