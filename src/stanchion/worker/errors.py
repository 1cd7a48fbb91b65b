"""Errors of the worker SDK, split by who acts.

What a handler raises, and the server's retry policy acts on::

    JobFailed           this attempt failed, with a code of its own; another may succeed
    └─ FinalError       every further attempt would fail as well

(any other exception counts as a ``JobFailed`` with the code ``job_failed``).

What ``job.check()`` raises, and an async handler finds as the argument of its ``CancelledError``;
the handler should clean up and stop::

    Cancelled           the job's run was cancelled
    LeaseLost           the lease is lost for another reason (``core.lease``)

Neither is a subclass of the other: ``except LeaseLost`` does not catch a cancel.

What a worker raises, and its operator acts on::

    WorkerRefused       the server refuses this worker: key, role, address or version
    BadTarget           ``module:app`` names no worker
"""

from __future__ import annotations

import re
from typing import Final

from stanchion.core.lease import FenceCause, LeaseLost

_CODE: Final = re.compile(r"[a-z][a-z0-9_.-]{0,63}")


class JobFailed(Exception):
    """Raise it in a handler: this attempt failed, and the code says how.

    ``message`` may be the exception that is the cause: its text is sent.
    """

    retryable = True

    def __init__(self, message: str | BaseException, *, code: str = "job_failed") -> None:
        if _CODE.fullmatch(code) is None:
            raise ValueError(
                f"{code!r} is no code: a small letter, then small letters, digits, '_', '-', '.'"
            )
        super().__init__(message)
        is_cause = isinstance(message, BaseException)
        self.message = str(message) or (type(message).__name__ if is_cause else "")
        self.code = code


class FinalError(JobFailed):
    """Raise it in a handler: the job failed, and another attempt would fail as well."""

    retryable = False


class Cancelled(Exception):
    """The job is to be stopped: its run was cancelled. No other worker gets it."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"the run of the job '{job_id}' was cancelled")
        self.job_id = job_id


def stop_error(job_id: str, cause: FenceCause) -> Cancelled | LeaseLost:
    """The error that tells a handler to stop."""
    return Cancelled(job_id) if cause is FenceCause.CANCELLED else LeaseLost(job_id, cause)


class WorkerRefused(Exception):
    """The server refuses this worker. A retry cannot help."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(
            f"the server refused this worker: {detail} ({status} {code}){_fix(status)}"
        )
        self.status = status
        self.code = code
        self.detail = detail


class BadTarget(Exception):
    """The given ``module:app`` names no worker."""


def _fix(status: int) -> str:
    match status:
        case 401:
            return "; give a valid key in STANCHION_API_KEY, or as api_key="
        case 403:
            return "; give a worker's key: stanchion key create --role worker --for TENANT"
        case 404 | 405:
            return "; check that the URL is that of a Stanchion server"
        case _:
            return ""
