"""Foreign errors in our words, at the one edge where they come in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import nats.errors

from stanchion.ports.errors import (
    BackendError,
    BackendRefused,
    BackendTimeout,
    BackendUnavailable,
    sentence,
)

__all__ = ["translated"]

_NOT_LET_IN: Final = ("authorization", "authentication")
_FORBIDDEN: Final = "permissions violation"


@contextmanager
def translated(who: str) -> Iterator[None]:
    """Turn what the client library raises into the error tree of the ports."""
    try:
        yield
    except BackendError:
        raise
    except nats.errors.NoRespondersError as error:
        raise BackendUnavailable(
            f"{who} has no JetStream, or not yet: start nats-server with JetStream (-js), "
            "or wait until it has read its streams"
        ) from error
    except TimeoutError as error:
        raise BackendTimeout(f"{who} did not answer in time") from error
    except nats.errors.Error as error:
        raise _translate(who, error) from error
    except OSError as error:
        raise BackendUnavailable(f"{who} cannot be reached ({sentence(error)})") from error


def _translate(who: str, error: nats.errors.Error) -> BackendError:
    said = sentence(error)
    if any(word in said.lower() for word in _NOT_LET_IN):
        return BackendRefused(
            f"{who} does not let us in ({said}): give a user and a password, or a token, "
            "in the address, as in nats://user:password@host:4222"
        )
    if _FORBIDDEN in said.lower():
        return BackendRefused(
            f"{who} forbids what is needed ({said}): "
            "docs/how-to/nats.md lists what the account must be allowed to do"
        )
    return BackendUnavailable(f"{who} cannot be used now ({said})")
