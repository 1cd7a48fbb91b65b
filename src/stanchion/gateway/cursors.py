"""Cursors on the wire: sealed, so that a caller can neither read nor forge one.

A store's cursor names the last row that it read, and a store may have read more than the caller is
allowed to see. The gateway therefore encrypts and authenticates every cursor, and passes to the
store only cursors that it sealed itself. A cursor is bound to its list, the list's path and the
tenant: one of another list or tenant is refused like a forged one.

The seal is a synthetic-IV scheme (the construction of RFC 5297) on keyed BLAKE2b of ``hashlib``:
the tag authenticates context and text and is the nonce of the key stream. It needs no random nonce
and no counter, and the same position always gives the same cursor, as event ids require. Text is
padded, so that its length does not leak.

The key is a document in the store, created once and shared by all replicas. A failover of the store
may lose it just after its creation, and another replica may then create another. So a process
trusts the key that it has read for five seconds, tries a cursor that does not open again with the
key as it is stored now, and writes its own key back if the store has none. A cursor that was sealed
with a lost key, before the failover or in the five seconds after it, may be refused.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

import msgspec

from stanchion.core.lease import Moment
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendCorrupt
from stanchion.ports.records import BadCursor
from stanchion.ports.store import Documents

KEY_TRUSTED_MS: Final = 5_000
"""A key older than this is read again before a cursor is sealed with it."""
_KIND: Final = "secret"
_NAME: Final = "cursors"
_TAG_BYTES: Final = 16
_BLOCK_BYTES: Final = hashlib.blake2b().digest_size
_PAD_BYTES: Final = 32
_AUTHENTICATE: Final = b"cursor tag"
_ENCRYPT: Final = b"cursor stream"


class CursorSeal:
    """Seals and opens the cursors of one list, with a key and the list's name."""

    def __init__(self, secret: str, context: Sequence[str]) -> None:
        self._key = hashlib.blake2b(secret.encode()).digest()
        self._context = msgspec.json.encode(context)

    def seal(self, cursor: str) -> str:
        """Encrypt a cursor; the result is safe in a URL."""
        text = cursor.encode()
        text += bytes(-len(text) % _PAD_BYTES)
        tag = self._tag(text)
        sealed = tag + self._mask(tag, text)
        return base64.urlsafe_b64encode(sealed).decode().rstrip("=")

    def open(self, sealed: str) -> str:
        """The cursor that ``seal`` was given. Raises ``BadCursor`` for any other text."""
        try:
            raw = base64.b64decode(sealed + "=" * (-len(sealed) % 4), altchars=b"-_", validate=True)
        except ValueError:
            raise BadCursor(sealed) from None
        if base64.urlsafe_b64encode(raw).decode().rstrip("=") != sealed:
            raise BadCursor(sealed)  # unused bits of the last character are set
        tag, masked = raw[:_TAG_BYTES], raw[_TAG_BYTES:]
        text = self._mask(tag, masked)
        if not hmac.compare_digest(self._tag(text), tag):
            raise BadCursor(sealed)
        return text.rstrip(b"\0").decode()

    def _tag(self, text: bytes) -> bytes:
        tag = hashlib.blake2b(digest_size=_TAG_BYTES, key=self._key, person=_AUTHENTICATE)
        # The length separates context from text.
        tag.update(len(self._context).to_bytes(8, "big") + self._context + text)
        return tag.digest()

    def _mask(self, tag: bytes, text: bytes) -> bytes:
        stream = b"".join(
            hashlib.blake2b(
                tag + number.to_bytes(8, "big"), key=self._key, person=_ENCRYPT
            ).digest()
            for number in range(-(-len(text) // _BLOCK_BYTES))
        )
        masked = int.from_bytes(text) ^ int.from_bytes(stream[: len(text)])
        return masked.to_bytes(len(text))


class Cursors:
    """Makes seals with the deployment's key."""

    def __init__(self, documents: Documents, entropy: Entropy, clock: Clock) -> None:
        self._documents = documents
        self._entropy = entropy
        self._clock = clock
        self._secret: str | None = None
        self._read_at = Moment(0)

    async def of(self, *context: str) -> CursorSeal:
        """The seal of one list. Raises ``BackendError`` if the key cannot be read."""
        # Again if the answer itself is too old: this process may have been paused meanwhile.
        while self._secret is None or self._clock.moment() - self._read_at >= KEY_TRUSTED_MS:
            await self._read()
        return CursorSeal(self._secret, context)

    async def open(self, sealed: str, *context: str) -> str:
        """The store's cursor. Raises ``BadCursor`` and ``BackendError``."""
        before = self._secret or await self._read()
        try:
            return CursorSeal(before, context).open(sealed)
        except BadCursor:
            now = await self._read()
            if now == before:
                raise
            return CursorSeal(now, context).open(sealed)

    async def _read(self) -> str:
        """Read the key from the store; write one if there is none."""
        asked_at = self._clock.moment()
        known = await self._documents.document(_KIND, _NAME)
        if known is None:
            # Cursors that this process has sealed stay valid if its key is written back.
            wanted = self._secret or self._entropy.token() + self._entropy.token()
            known = await self._documents.put_document(_KIND, _NAME, wanted, read=0)
            if known is None:  # another replica was first
                known = await self._documents.document(_KIND, _NAME)
        if known is None or not isinstance(known.value, str):
            raise BackendCorrupt("the stored key for cursors is not text")
        self._secret, self._read_at = known.value, asked_at
        return known.value
