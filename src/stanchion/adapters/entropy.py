"""The operating system's chance."""

from __future__ import annotations

import secrets
from typing import Final

__all__ = ["SystemEntropy"]

_UNIT_BITS: Final = 53
"""As many as a float has digits: every value below one is hit exactly, and one itself never."""
_TOKEN_BYTES: Final = 16


class SystemEntropy:
    """Chance that nobody can foresee."""

    def unit(self) -> float:
        return secrets.randbits(_UNIT_BITS) / (1 << _UNIT_BITS)

    def token(self) -> str:
        return secrets.token_hex(_TOKEN_BYTES)
