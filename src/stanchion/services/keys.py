"""API keys: which role a key has, and for which tenant.

A key is ``sk_<id>_<secret>``. The store keeps, under the id, a hash of the secret: 256 random bits
cannot be guessed, so a fast hash is as good as a slow one. The secret itself is shown once, when
the key is created.

Records are cached for a little less than two seconds, so a revoked key stops working within two
seconds on every replica, and at once on the replica that revoked it. A record in use is read again
before it expires, so that requests do not wait for the store.

While the store fails, cached good keys go on working for five minutes. A key that is not cached
cannot be checked then: the answer is "unavailable", never "invalid". While the store is only slow,
a record older than two seconds is not used: a patient caller waits until the store has answered or
failed, and for any other the answer is "unavailable".

A key may have a name, which is then shown as the actor, and a time from which it no longer works.
The time of its last use is written in the background, at most once a minute, with the revision that
was read, so that the write never undoes a revocation.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

import msgspec

from stanchion.core.audit import AuditEntry, redacted, time_text
from stanchion.core.json_value import JsonObject
from stanchion.core.lease import Moment
from stanchion.core.model import Instant, TenantId
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendError, BackendUnavailable
from stanchion.ports.records import Document, Page
from stanchion.ports.store import Documents
from stanchion.services.limiter import retrieve
from stanchion.services.log import log_event
from stanchion.wire.admin import Role
from stanchion.wire.identifiers import ALL_TENANTS

_Answer = TypeVar("_Answer")

BELIEVED_MS: Final = 1_500
READ_AGAIN_MS: Final = 1_000
"""From this age on, a use of a cached record has it read again in the background."""
BELIEVED_WITHOUT_STORE_MS: Final = 5 * 60 * 1_000
_ASK_AGAIN_MS: Final = 1_000
"""Pause after a failure of the store: otherwise every request would wait for it."""
_SILENCE_S: Final = 0.2
"""How long a request with a cached record waits for the store."""
_BELIEVED_IN_SILENCE_MS: Final = 1_700
_GRACE_S: Final = 0.02
"""Time for a late event loop to deliver an answer that has already arrived."""
_USE_WRITTEN_MS: Final = 60_000
"""The time of a key's last use is written at most this often."""
_KNOWN_MAX: Final = 4_096
_UNKNOWN_MAX: Final = 1_024
"""Ids without a key are kept apart, so that guessed keys displace no good ones."""
_LOOKUPS_MAX: Final = 512
"""Look-ups at a time of ids that are not kept. Without a bound, guesses of keys could use up the
places for requests."""
_TRIES_MAX: Final = 10
"""Lost compare-and-set races in a row before ``revoke`` fails."""
_KIND: Final = "key"
_ANY: Final = ""
"""The name of the read that checks whether any key exists. No key has this id."""
_PAGE: Final = 1_000
_PAGES_LOOKED_AT_MAX: Final = 10
_PREFIX: Final = "sk"
_ID_CHARS: Final = 16
_KEY_CHARS_MAX: Final = 512


class ApiKeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is stored. ``hash`` is the hash of its secret."""

    hash: str
    role: Role
    tenant: str
    created_at: Instant
    created_by: str
    name: str | None = None
    note: str | None = None
    expires_at: Instant | None = None
    last_used_at: Instant | None = None
    revoked_at: Instant | None = None
    revoked_by: str | None = None


def end_of_key(record: ApiKeyRecord | None, now: Instant) -> str | None:
    """``None`` if a key works; otherwise what it is: ``gone``, ``revoked`` or ``expired``."""
    if record is None:
        return "gone"
    if record.revoked_at is not None:
        return "revoked"
    return "expired" if record.expires_at is not None and record.expires_at <= now else None


class NewKey(msgspec.Struct, frozen=True):
    """A key that was just created. ``key`` contains the secret, which is shown only once."""

    id: str
    key: str
    record: ApiKeyRecord


class KeyHolder(msgspec.Struct, frozen=True):
    """The role and tenant of a valid key."""

    role: Role
    tenant: str
    """``*``: every tenant."""
    actor: str
    key_id: str | None = None
    """``None`` without keys, and for the admin key of the process's environment."""


class TooManyLookups(BackendUnavailable):
    """Too many keys that this replica does not know are being looked up."""


class _Known(msgspec.Struct, frozen=True):
    record: ApiKeyRecord | None
    read_at: Moment
    revision: int = 0


_NOBODY_KNOWN: Final = _Known(None, Moment(-(10**15)))


class Keys:
    """The keys of a deployment, with this replica's cache of them."""

    def __init__(
        self, *, documents: Documents, clock: Clock, entropy: Entropy, admin_key: str | None
    ) -> None:
        self._documents = documents
        self._clock = clock
        self._entropy = entropy
        self._admin_hash = None if admin_key is None else _hash(admin_key)
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._unknown: OrderedDict[str, _Known] = OrderedDict()
        self._uses_written: OrderedDict[str, Instant] = OrderedDict()
        self._any: bool | None = True if admin_key is not None else None
        self._any_read_at = Moment(0)
        self._failed_at: Moment | None = None
        self._asking: dict[str, asyncio.Task[Any]] = {}
        self._lookups = 0

    @property
    def is_any_known(self) -> bool:
        """Whether keys are known to exist. ``False`` before the first read."""
        return self._any is True

    @property
    def is_none_known(self) -> bool:
        """Whether there were no keys within the last second, so that no request needs one now."""
        return self._any is False and self._clock.moment() - self._any_read_at < READ_AGAIN_MS

    def look_for_any(self) -> None:
        """Check in the background whether there are keys, at most once a second."""
        now = self._clock.moment()
        is_fresh = self._any is not None and now - self._any_read_at < READ_AGAIN_MS
        if not self._any and not is_fresh and not self._is_store_away(now):
            _ = self._ask(_ANY, lambda: self._read_any(now))

    async def configured(self, *, is_patient: bool = True) -> bool:
        """Whether there are keys, so that requests need one. Once true, it stays true.

        Raises ``BackendError``.
        """
        if self._any:
            return True
        now = self._clock.moment()
        age_ms = now - self._any_read_at
        if self._any is not None and (age_ms < BELIEVED_MS or self._is_store_away(now)):
            if age_ms >= READ_AGAIN_MS and not self._is_store_away(now):
                _ = self._ask(_ANY, lambda: self._read_any(now))
            return self._still_none(age_ms)
        try:
            within_s = _patience_s(None if self._any is None else age_ms, is_patient=is_patient)
            return await self._once(_ANY, lambda: self._read_any(now), within_s=within_s)
        except TimeoutError:
            return self._still_none(age_ms, _BELIEVED_IN_SILENCE_MS)
        except BackendError:
            self._failed_at = now
            if self._any is None:
                raise
            return self._still_none(age_ms)

    async def holder(self, key: str, *, is_patient: bool = True) -> KeyHolder | None:
        """The role and tenant of a key; ``None`` if it is invalid or revoked.

        Raises ``BackendError``, also ``TooManyLookups``.
        """
        if self._admin_hash is not None and hmac.compare_digest(_hash(key), self._admin_hash):
            return ADMIN_HOLDER
        prefix, _, rest = key.partition("_")
        key_id, _, secret = rest.partition("_")
        if prefix != _PREFIX or not _is_id(key_id) or not 0 < len(secret) <= _KEY_CHARS_MAX:
            return None
        record = await self._record(key_id, is_patient=is_patient)
        # Compared also if there is no such key, so that both answers take the same time.
        is_right = hmac.compare_digest(_hash(secret), _NO_HASH if record is None else record.hash)
        return self._holder(key_id, record) if is_right else None

    async def holder_by_id(self, key_id: str) -> KeyHolder | None:
        """The role and tenant of a key whose secret was checked before, when its session began.

        Raises ``BackendError``.
        """
        return self._holder(key_id, await self._record(key_id, is_patient=True))

    def admin_proof(self, secret: str) -> str | None:
        """A proof, made with ``secret``, of which admin key this process was given."""
        if self._admin_hash is None:
            return None
        return hmac.new(secret.encode(), self._admin_hash.encode(), "sha256").hexdigest()

    def _holder(self, key_id: str, record: ApiKeyRecord | None) -> KeyHolder | None:
        now = self._clock.now()
        if record is None or end_of_key(record, now) is not None:
            return None
        self._note_use(key_id, record, now)
        return KeyHolder(record.role, record.tenant, record.name or f"key:{key_id}", key_id)

    async def would_lock_out(self, *, role: Role, tenant: str, expires: bool = False) -> bool:
        """Whether this key, as the first one, would lock out its creator.

        From the first key on every request needs a key. A first key that cannot create others, or
        that expires, would leave a deployment without any such key.
        """
        is_master = role is Role.ADMIN and tenant == ALL_TENANTS and not expires
        return not is_master and not await self.configured()

    async def create(
        self,
        *,
        role: Role,
        tenant: str,
        note: str | None,
        actor: str,
        name: str | None = None,
        expires_at: Instant | None = None,
        audit: AuditEntry | None = None,
    ) -> NewKey:
        """Create a key. Its audit entry has everything but the secret."""
        key_id = self._entropy.token()[:_ID_CHARS]
        secret = self._entropy.token() + self._entropy.token()
        record = ApiKeyRecord(
            hash=_hash(secret),
            role=role,
            tenant=tenant,
            name=name,
            note=note,
            expires_at=expires_at,
            created_at=self._clock.now(),
            created_by=actor,
        )
        await self._write(key_id, record, read=0, audit=_audited(audit, key_id, None, record))
        self._any = True
        log_event(
            logging.INFO, "key_created", key=key_id, role=str(role), tenant=tenant, actor=actor
        )
        return NewKey(key_id, f"{_PREFIX}_{key_id}_{secret}", record)

    async def revoke(
        self, key_id: str, *, actor: str, audit: AuditEntry | None = None
    ) -> ApiKeyRecord | None:
        """Revoke a key; ``None`` if there is no such key. Revoking it again changes nothing."""
        for _ in range(_TRIES_MAX):
            record, revision = await self._read_now(key_id)
            if record is None or record.revoked_at is not None:
                return record
            now = self._clock.now()
            revoked = msgspec.structs.replace(record, revoked_at=now, revoked_by=actor)
            entry = _audited(audit, key_id, record, revoked)
            if await self._write(key_id, revoked, read=revision, audit=entry):
                log_event(logging.WARNING, "key_revoked", key=key_id, actor=actor)
                return revoked
        raise BackendUnavailable(f"others changed the key {_TRIES_MAX} times in a row")

    async def record(self, key_id: str) -> ApiKeyRecord | None:
        """A key as it is stored now."""
        return (await self._read_now(key_id))[0]

    async def _read_now(self, key_id: str) -> tuple[ApiKeyRecord | None, int]:
        """A key as it is stored now, and the revision of its document."""
        document = await self._documents.document(_KIND, key_id) if _is_id(key_id) else None
        if document is None:
            return None, 0
        return msgspec.convert(document.value, ApiKeyRecord), document.revision

    async def list(
        self, tenant: str | None, *, cursor: str | None, limit: int
    ) -> Page[tuple[str, ApiKeyRecord]]:
        """One tenant's keys, or all, by id.

        A call reads at most 10,000 keys, so a page may be short if most belong to other tenants.
        Otherwise there is a cursor only if the tenant has more keys. A key that cannot be read,
        because a newer version wrote it, is left out.
        """
        if tenant is None:
            page = await self._read_page(cursor, limit)
            return Page(_of_tenant(page.items, None), page.cursor)
        found: tuple[tuple[str, ApiKeyRecord], ...] = ()
        for _ in range(_PAGES_LOOKED_AT_MAX):
            page = await self._read_page(cursor, _PAGE)
            own = [
                place
                for place, (_, record) in enumerate(page.items)
                if record is not None and record.tenant == tenant
            ]
            left = limit - len(found)
            if len(own) > left:
                # There are more: the next page begins after the last key of this one.
                if left:
                    page = await self._read_page(cursor, own[left - 1] + 1)
                    found += _of_tenant(page.items, tenant)
                    cursor = page.cursor
                return Page(found, cursor)
            found += _of_tenant(page.items, tenant)
            cursor = page.cursor
            if cursor is None:
                break
        return Page(found, cursor)

    async def _read_page(
        self, cursor: str | None, limit: int
    ) -> Page[tuple[str, ApiKeyRecord | None]]:
        page = await self._documents.list_documents(_KIND, cursor=cursor, limit=limit)
        return Page(tuple((name, _readable(name, each)) for name, each in page.items), page.cursor)

    async def _record(self, key_id: str, *, is_patient: bool) -> ApiKeyRecord | None:
        now = self._clock.moment()
        known = self._known.get(key_id) or self._unknown.get(key_id, _NOBODY_KNOWN)
        if now - known.read_at < BELIEVED_MS:
            if now - known.read_at >= READ_AGAIN_MS and not self._is_store_away(now):
                _ = self._ask(key_id, lambda: self._read(key_id, now))
            return known.record
        if self._is_store_away(now):
            return self._last_word(known, now)
        if known.record is None and key_id not in self._asking:
            if self._lookups >= _LOOKUPS_MAX:
                raise TooManyLookups("too many unknown keys are being looked up")
            self._lookups += 1
            asking = self._ask(key_id, lambda: self._read(key_id, now))
            asking.add_done_callback(self._looked_up)
        try:
            age_ms = None if known.record is None else now - known.read_at
            within_s = _patience_s(age_ms, is_patient=is_patient)
            return await self._once(key_id, lambda: self._read(key_id, now), within_s=within_s)
        except TimeoutError:
            return self._last_word(known, now, _BELIEVED_IN_SILENCE_MS)
        except BackendError:
            self._failed_at = now
            return self._last_word(known, now)

    async def _read(self, key_id: str, now: Moment) -> ApiKeyRecord | None:
        record, revision = await self._read_now(key_id)
        self._failed_at = None
        # Its age counts from the request: a slow answer must not make an old record look fresh.
        self._remember(key_id, record, now, revision)
        return record

    async def _read_any(self, now: Moment) -> bool:
        page = await self._documents.list_documents(_KIND, limit=1)
        self._failed_at = None
        self._any, self._any_read_at = self._any or bool(page.items), now
        return self._any

    async def _once(
        self, name: str, ask: Callable[[], Coroutine[Any, Any, _Answer]], *, within_s: float | None
    ) -> _Answer:
        """Read once for all requests that need the same record at the same time."""
        asking = self._ask(name, ask)
        # Shielded: a cancelled request must not cancel the shared read.
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.shield(asking)
        except TimeoutError:
            # If the event loop was late, the answer may have arrived together with the time-out.
            if (await asyncio.wait({asking}, timeout=_GRACE_S))[0]:
                return asking.result()
            raise

    def _ask(
        self, name: str, ask: Callable[[], Coroutine[Any, Any, _Answer]]
    ) -> asyncio.Task[_Answer]:
        asking: asyncio.Task[_Answer] | None = self._asking.get(name)
        if asking is None:
            asking = self._asking[name] = asyncio.create_task(ask())
            asking.add_done_callback(lambda _: self._asking.pop(name))
            asking.add_done_callback(retrieve)
        return asking

    def _looked_up(self, _: asyncio.Task[Any]) -> None:
        self._lookups -= 1

    def _note_use(self, key_id: str, record: ApiKeyRecord, now: Instant) -> None:
        """Have the time of this use written in the background, unless a recent one was."""
        before = max(record.last_used_at or 0, self._uses_written.get(key_id, 0))
        known = self._known.get(key_id)
        is_behind = known is None or known.record is not record
        if now - before < _USE_WRITTEN_MS or is_behind or self._failed_at is not None:
            return
        assert known is not None
        revision = known.revision
        self._uses_written[key_id] = now
        if len(self._uses_written) > _KNOWN_MAX:
            self._uses_written.popitem(last=False)
        used = msgspec.structs.replace(record, last_used_at=now)
        # Not the key's id: that is the name of the read of the key.
        _ = self._ask(f"use of {key_id}", lambda: self._write_use(key_id, used, revision))

    async def _write_use(self, key_id: str, used: ApiKeyRecord, revision: int) -> None:
        # Refused if another replica has written a use since, or revoked the key: both are right.
        value = msgspec.to_builtins(used)
        await self._documents.put_document(_KIND, key_id, value, read=revision)

    async def _write(
        self, key_id: str, record: ApiKeyRecord, *, read: int, audit: AuditEntry | None
    ) -> bool:
        """Write a key; ``False`` if it has changed since it was read."""
        value = msgspec.to_builtins(record)
        written = await self._documents.put_document(_KIND, key_id, value, read=read, audit=audit)
        if written is None:
            return False
        self._known.pop(key_id, None)
        self._unknown.pop(key_id, None)
        self._remember(key_id, record, self._clock.moment(), written.revision)
        return True

    def _remember(
        self, key_id: str, record: ApiKeyRecord | None, now: Moment, revision: int
    ) -> None:
        newer = self._known.get(key_id) or self._unknown.get(key_id)
        if newer is not None and newer.read_at >= now:
            return
        kept, other, most = (
            (self._unknown, self._known, _UNKNOWN_MAX)
            if record is None
            else (self._known, self._unknown, _KNOWN_MAX)
        )
        other.pop(key_id, None)
        kept[key_id] = _Known(record, now, revision)
        kept.move_to_end(key_id)
        if len(kept) > most:
            kept.popitem(last=False)

    def _is_store_away(self, now: Moment) -> bool:
        return self._failed_at is not None and now - self._failed_at < _ASK_AGAIN_MS

    def _last_word(
        self, known: _Known, now: Moment, limit_ms: int = BELIEVED_WITHOUT_STORE_MS
    ) -> ApiKeyRecord | None:
        if known.record is None or now - known.read_at >= limit_ms:
            raise BackendUnavailable("the key cannot be checked while the store is unavailable")
        return known.record

    def _still_none(self, age_ms: int, limit_ms: int = BELIEVED_WITHOUT_STORE_MS) -> bool:
        if age_ms >= limit_ms:
            raise BackendUnavailable("whether there are keys cannot be checked")
        return False


def _audited(
    entry: AuditEntry | None, key_id: str, before: ApiKeyRecord | None, after: ApiKeyRecord
) -> AuditEntry | None:
    """The audit entry for a change of a key: what is shown of it, never its secret."""
    if entry is None:
        return None
    tenant = None if after.tenant == ALL_TENANTS else TenantId(after.tenant)
    return msgspec.structs.replace(
        entry,
        subject=f"key/{key_id}",
        tenant=tenant,
        before=None if before is None else _shown(before),
        after=_shown(after),
    )


def _shown(record: ApiKeyRecord) -> JsonObject:
    members: JsonObject = {
        "name": record.name,
        "role": record.role,
        "tenant": record.tenant,
        "note": record.note,
        "expires_at": time_text(record.expires_at),
        "revoked": record.revoked_at is not None,
        "key": record.hash,
    }
    return redacted(members, "key")


def _readable(key_id: str, document: Document) -> ApiKeyRecord | None:
    try:
        return msgspec.convert(document.value, ApiKeyRecord)
    except msgspec.ValidationError as error:
        log_event(logging.ERROR, "key_unreadable", key=key_id, error=str(error))
        return None


def _of_tenant(
    items: Iterable[tuple[str, ApiKeyRecord | None]], tenant: str | None
) -> tuple[tuple[str, ApiKeyRecord], ...]:
    """The keys of a tenant, or all, that can be read."""
    return tuple(
        (name, record)
        for name, record in items
        if record is not None and tenant in {None, record.tenant}
    )


def _patience_s(age_ms: int | None, *, is_patient: bool) -> float | None:
    """How long to wait for the store, given the cached record's age; ``None``: until it fails."""
    is_known = age_ms is not None and (age_ms < _BELIEVED_IN_SILENCE_MS or not is_patient)
    return _SILENCE_S if is_known else None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _is_id(text: str) -> bool:
    return 0 < len(text) <= _KEY_CHARS_MAX and text.isascii() and text.isalnum()


_NO_HASH: Final = "0" * 64
ADMIN_HOLDER: Final = KeyHolder(Role.ADMIN, ALL_TENANTS, "admin")
