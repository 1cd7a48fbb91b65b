"""Sessions: a browser shows an API key once and is then recognised by a cookie.

A session's token is ``<id>_<secret>``. The store keeps a hash of the secret beside the keys, and
which key opened the session. Every use looks that key up as a request with the key would, so a
revoked or expired key ends its sessions within two seconds on every replica, and the role of the
key is the role of the session. A session ends after twelve hours, or when it is closed: then within
two seconds on the other replicas.

While the store fails, a session that was used in the last five minutes stays valid, as a key does.

Any client can send a cookie. So ids without a session are kept apart from sessions, which they
cannot displace, and few ids that are not kept are looked up at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import OrderedDict
from typing import Final

import msgspec

from stanchion.core.lease import Moment
from stanchion.core.model import Instant
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendError, BackendUnavailable
from stanchion.ports.records import Document
from stanchion.ports.store import Documents
from stanchion.services.keys import ADMIN_HOLDER, KeyHolder, Keys, TooManyLookups
from stanchion.services.limiter import retrieve

SESSION_MS: Final = 12 * 60 * 60 * 1000
_BELIEVED_MS: Final = 1_500
_BELIEVED_WITHOUT_STORE_MS: Final = 5 * 60 * 1_000
_ID_CHARS: Final = 16
_TOKEN_CHARS_MAX: Final = 200
_KNOWN_MAX: Final = 1_024
_LOOKUPS_MAX: Final = 64
"""Look-ups at a time of ids that are not known as sessions."""
_OF_ONE_KEY_MAX: Final = 50
"""Sessions of one key. The oldest is closed when another one is opened."""
_KIND: Final = "session"
_PAGE: Final = 1_000
_PAGES_MAX: Final = 10


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A session as it is stored."""

    hash: str
    """The hash of the token's secret."""
    key_id: str | None
    """The key that opened it; ``None`` for the admin key of the process's environment."""
    admin_proof: str | None = None
    created_at: Instant
    expires_at: Instant


class OpenSession(msgspec.Struct, frozen=True):
    """A valid session: the holder of its key, and the token that forms must carry."""

    holder: KeyHolder
    form_token: str


class _Known(msgspec.Struct, frozen=True):
    record: SessionRecord | None
    read_at: Moment


class Sessions:
    """The sessions of a deployment, with this replica's cache of them."""

    def __init__(self, keys: Keys, *, documents: Documents, clock: Clock, entropy: Entropy) -> None:
        self._keys = keys
        self._documents = documents
        self._clock = clock
        self._entropy = entropy
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._unknown: OrderedDict[str, _Known] = OrderedDict()
        self._looking: dict[str, asyncio.Task[SessionRecord | None]] = {}

    async def open(self, key: str) -> str | None:
        """Open a session for a key; returns its token, ``None`` if the key is not valid.

        Raises ``BackendError``.
        """
        holder = await self._keys.holder(key)
        if holder is None:
            return None
        session_id = self._entropy.token()[:_ID_CHARS]
        secret = self._entropy.token() + self._entropy.token()
        is_admin = holder is ADMIN_HOLDER
        key_id = None if is_admin else key.split("_", 2)[1]
        now = self._clock.now()
        await self._sweep(key_id, now)
        record = SessionRecord(
            hash=_hash(secret),
            key_id=key_id,
            admin_proof=self._keys.admin_proof(secret) if is_admin else None,
            created_at=now,
            expires_at=Instant(now + SESSION_MS),
        )
        value = msgspec.to_builtins(record)
        await self._documents.put_document(_KIND, session_id, value, read=0)
        self._remember(session_id, record, self._clock.moment())
        return f"{session_id}_{secret}"

    async def find(self, token: str) -> OpenSession | None:
        """The session of a token; ``None`` if it has ended or its key is no longer valid.

        Raises ``BackendError``.
        """
        session_id, _, secret = token.partition("_")
        if len(token) > _TOKEN_CHARS_MAX or not (session_id.isascii() and session_id.isalnum()):
            return None
        record = await self._record(session_id)
        if record is None or not hmac.compare_digest(_hash(secret), record.hash):
            return None
        if record.expires_at <= self._clock.now():
            return None
        holder = await self._holder(record, secret)
        return None if holder is None else OpenSession(holder, _form_token(secret))

    async def close(self, token: str) -> None:
        """End a session. Raises ``BackendError``."""
        if await self.find(token) is not None:
            session_id = token.partition("_")[0]
            await self._documents.delete_document(_KIND, session_id)
            self._known.pop(session_id, None)
            self._remember(session_id, None, self._clock.moment())

    async def _holder(self, record: SessionRecord, secret: str) -> KeyHolder | None:
        if record.key_id is not None:
            return await self._keys.holder_by_id(record.key_id)
        proof = self._keys.admin_proof(secret)
        if proof is None or record.admin_proof is None:
            return None
        return ADMIN_HOLDER if hmac.compare_digest(proof, record.admin_proof) else None

    async def _record(self, session_id: str) -> SessionRecord | None:
        now = self._clock.moment()
        known = self._known.get(session_id) or self._unknown.get(session_id)
        if known is not None and now - known.read_at < _BELIEVED_MS:
            return known.record
        try:
            return await self._look_up(session_id, is_known=session_id in self._known)
        except TooManyLookups:
            raise
        except BackendError:
            is_recent = known is not None and now - known.read_at < _BELIEVED_WITHOUT_STORE_MS
            if known is None or known.record is None or not is_recent:
                raise BackendUnavailable("the session cannot be checked now") from None
            return known.record

    async def _look_up(self, session_id: str, *, is_known: bool) -> SessionRecord | None:
        """Read the record, once for all requests that need it at the same time."""
        looking = self._looking.get(session_id)
        if looking is None:
            if not is_known and len(self._looking) >= _LOOKUPS_MAX:
                raise TooManyLookups("too many unknown sessions are being looked up")
            looking = self._looking[session_id] = asyncio.create_task(self._read(session_id))
            looking.add_done_callback(lambda _: self._looking.pop(session_id))
            looking.add_done_callback(retrieve)
        # Shielded: a cancelled request must not cancel the shared read.
        return await asyncio.shield(looking)

    async def _read(self, session_id: str) -> SessionRecord | None:
        now = self._clock.moment()
        document = await self._documents.document(_KIND, session_id)
        record = None if document is None else _readable(document)
        self._remember(session_id, record, now)
        return record

    def _remember(self, session_id: str, record: SessionRecord | None, now: Moment) -> None:
        known = self._known.get(session_id) or self._unknown.get(session_id)
        if known is not None and known.read_at > now:
            return
        kept, other = (
            (self._unknown, self._known) if record is None else (self._known, self._unknown)
        )
        other.pop(session_id, None)
        kept[session_id] = _Known(record, now)
        kept.move_to_end(session_id)
        if len(kept) > _KNOWN_MAX:
            kept.popitem(last=False)

    async def _sweep(self, key_id: str | None, now: Instant) -> None:
        """Delete sessions that have expired, and the key's oldest ones over its limit."""
        own: list[tuple[Instant, str]] = []
        cursor: str | None = None
        for _ in range(_PAGES_MAX):
            page = await self._documents.list_documents(_KIND, cursor=cursor, limit=_PAGE)
            for name, document in page.items:
                record = _readable(document)
                if record is None:
                    continue
                if record.expires_at <= now:
                    await self._documents.delete_document(_KIND, name)
                elif record.key_id == key_id:
                    own.append((record.created_at, name))
            cursor = page.cursor
            if cursor is None:
                break
        for _, name in sorted(own)[: max(0, len(own) - _OF_ONE_KEY_MAX + 1)]:
            await self._documents.delete_document(_KIND, name)


def _readable(document: Document) -> SessionRecord | None:
    """The session; ``None`` if a version wrote it that this one cannot read."""
    try:
        return msgspec.convert(document.value, SessionRecord)
    except msgspec.ValidationError:
        return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _form_token(secret: str) -> str:
    return hmac.new(secret.encode("utf-8", "surrogateescape"), b"form", "sha256").hexdigest()
