"""Problems: a server's refusal in one sentence, with the code to end with and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stanchion.cli.endings import Ending, Exit

__all__ = ["ending_of"]

_EXITS: Final = {404: Exit.NOT_FOUND, 429: Exit.FULL}
_SERVER_ERROR_MIN: Final = 500

_LISTS: Final = {
    "/v1/runs": "stanchion run list",
    "/v1/workflows": "stanchion workflow list",
    "/v1/admin/keys": "stanchion key list",
    "/v1/admin/leases": "stanchion lease list",
    "/v1/admin/dead-letters": "stanchion dead-letter list",
}
"""Where to look for what was not found, by the path that was asked."""

_FIXES: Final = {
    "forbidden": "use a key with a role that may do this: stanchion key create --role …",
    "max_concurrent_runs_reached": "wait for a run to end, or raise the cap:"
    " stanchion tenant set NAME --max-concurrent-runs N",
    "job_throttled": "submit more slowly, or raise the rate:"
    " stanchion tenant set NAME --job-rate R",
    "idempotency_mismatch": "this key was used for another request: give a new --idempotency-key",
    "gate_busy": "somebody holds the admission lock: stanchion lease list",
    "gate_unavailable": "look at the server's /readyz and at its store and lock server",
    "limit_check_failed": "look at the server's /readyz and at its store",
    "store_unavailable": "look at the server's /readyz and at its store",
    "locks_unavailable": "look at the server's /readyz and at its lock server",
    "draining": "this server is stopping: ask another one",
    "internal": "look for the request id in the server's log",
}


def ending_of(document: object, *, status: int, path: str, has_key: bool) -> Ending:
    """The ending for a problem document; for anything else, as well as it can be said."""
    problem: Mapping[str, Any] = document if isinstance(document, dict) else {}
    is_broken = status >= _SERVER_ERROR_MIN
    exit_code = Exit.UNAVAILABLE if is_broken else _EXITS.get(status, Exit.FAILED)
    code = str(problem.get("code", ""))
    return Ending(
        _message(problem, code),
        exit_code,
        faults=_faults(problem.get("errors")),
        fix=_fix(code, path, has_key=has_key),
        problem=dict(problem),
        may_have_happened=is_broken,
    )


def _message(problem: Mapping[str, Any], code: str) -> str:
    text = str(problem.get("detail") or problem.get("title") or "the server refused")
    parts = [f"{text} ({code})" if code else text]
    limit, active = problem.get("limit"), problem.get("active")
    if limit is not None and active is not None:
        parts.append(f"{active} of {limit} runs are active")
    retry_after_ms = problem.get("retry_after_ms")
    if isinstance(retry_after_ms, int | float):
        parts.append(f"ask again in {retry_after_ms / 1000:.1f} s")
    if code == "internal":
        parts.append(f"request id {problem.get('request_id')}")
    return "; ".join(parts)


def _faults(errors: object) -> list[str]:
    if not isinstance(errors, list):
        return []
    return [_fault(error) for error in errors if isinstance(error, dict)]


def _fault(error: Mapping[str, Any]) -> str:
    line, path, message = error.get("line"), error.get("path"), error.get("message", "")
    place = ": ".join(part for part in (f"line {line}" if line else "", str(path or "")) if part)
    return f"{place}: {message}" if place else str(message)


def _fix(code: str, path: str, *, has_key: bool) -> str | None:
    if code == "unauthenticated":
        if has_key:
            return "the key is unknown or revoked: check --api-key or STANCHION_API_KEY"
        return "this server wants a key: give --api-key or STANCHION_API_KEY"
    if code == "not_found":
        near = max((each for each in _LISTS if path.startswith(each)), key=len, default=None)
        return f"see what there is: {_LISTS[near]}" if near else None
    return _FIXES.get(code)
