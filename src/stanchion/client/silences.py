"""Silences: what went wrong on a connection, translated once, for both transports."""

from __future__ import annotations

import socket

from stanchion.client.exchange import NoReply, Silence
from stanchion.client.http1 import Address, Malformed

__all__ = ["TROUBLES", "not_answered", "not_connected"]

TROUBLES = (OSError, EOFError, Malformed)
"""Whatever a connection may raise. A ``TimeoutError`` and the errors of TLS are an ``OSError``."""


def not_connected(error: Exception, to: Address) -> NoReply:
    """Nothing was sent."""
    if hasattr(error, "verify_code"):  # ssl's, which only those who use TLS have imported
        return NoReply(Silence.UNTRUSTED, f"the certificate of {to.named} is not valid: {error}")
    match error:
        case TimeoutError():
            why = "not within the time"
        case socket.gaierror():
            why = "there is no such host"
        case ConnectionRefusedError():
            why = "refused; is the server running?"
        case _:
            why = str(error) or type(error).__name__
    return NoReply(Silence.UNREACHED, f"no connection to {to.named}: {why}")


def not_answered(error: Exception, to: Address) -> NoReply:
    """Something was sent, and perhaps done."""
    match error:
        case TimeoutError():
            return NoReply(Silence.TIMED_OUT, f"no answer from {to.named} within the time")
        case Malformed():
            return NoReply(Silence.MALFORMED, f"{to.named}: {error}")
        case _:
            return NoReply(Silence.BROKEN, f"the connection to {to.named} broke: {error}")
