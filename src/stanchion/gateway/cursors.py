"""Cursors on the wire: sealed, so that a caller can neither read nor forge one.

A store's cursor names the last row that it read, and a store may have read more than the caller is
allowed to see. The gateway therefore encrypts and authenticates every cursor, and passes to the
store only cursors that it sealed itself. A cursor is bound to its list, the list's path and the
tenant: one of another list or tenant is refused like a forged one.

The seal is a synthetic-IV scheme (the construction of RFC 5297) on keyed BLAKE2b of ``hashlib``:
the tag authenticates context and text and is the nonce of the key stream. It needs no random nonce
and no counter, and the same position always gives the same cursor, as event ids require. Text is
padded, so that its length does not leak.

The key is a document in the store, created once and shared by all replicas. Each process reads it
once. A cursor that does not open is tried again with the key as it is stored now, in case a
failover of the store lost the first one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

import msgspec

from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendCorrupt
from stanchion.ports.records import BadCursor
from stanchion.ports.store import Documents

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
        return bytes(one ^ other for one, other in zip(text, stream, strict=False))


class Cursors:
    """Makes seals with the deployment's key."""

    def __init__(self, documents: Documents, entropy: Entropy) -> None:
        self._documents = documents
        self._entropy = entropy
        self._secret: str | None = None

    async def of(self, *context: str) -> CursorSeal:
        """The seal of one list. Raises ``BackendError`` if the key cannot be read."""
        return CursorSeal(self._secret or await self._read(), context)

    async def open(self, sealed: str, *context: str) -> str:
        """The store's cursor. Raises ``BadCursor`` and ``BackendError``."""
        try:
            return (await self.of(*context)).open(sealed)
        except BadCursor:
            before = self._secret
            if await self._read() == before:
                raise
            return (await self.of(*context)).open(sealed)

    async def _read(self) -> str:
        """Read the key from the store; create it if there is none."""
        known = await self._documents.document(_KIND, _NAME)
        if known is None:
            fresh = self._entropy.token() + self._entropy.token()
            known = await self._documents.put_document(_KIND, _NAME, fresh, read=0)
            if known is None:  # another replica was first
                known = await self._documents.document(_KIND, _NAME)
        if known is None or not isinstance(known.value, str):
            raise BackendCorrupt("the stored key for cursors is not text")
        self._secret = known.value
        return known.value
