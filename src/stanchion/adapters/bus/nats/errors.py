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

_NOT_LET_IN: Final = ("authorization", "authentication", "permissions violation")


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
    except nats.errors.AuthorizationError as error:
        raise _refused(who, error) from error
    except nats.errors.Error as error:
        if any(word in str(error).lower() for word in _NOT_LET_IN):
            raise _refused(who, error) from error
        raise BackendUnavailable(f"{who} cannot be used now ({sentence(error)})") from error
    except OSError as error:
        raise BackendUnavailable(f"{who} cannot be reached ({sentence(error)})") from error


def _refused(who: str, error: Exception) -> BackendRefused:
    return BackendRefused(
        f"{who} does not let us in ({sentence(error)}): give a user and a password, or a token, "
        "in the address, as in nats://user:password@host:4222"
    )
