"""What an answer means: its class, the server's word, and the error that the caller gets."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import pytest

from stanchion.client import errors
from stanchion.client.errors import (
    CallFailed,
    GaveUpBecause,
    InvalidRequest,
    answer_of,
    failure,
    retry_after_ms,
)
from stanchion.core.model import Instant
from stanchion.core.retry import Answer, RetryClass
from stanchion.transport.messages import HttpReply, Request
from tests.client.scripted import DEAD, full, problem

WALL = Instant(1_784_117_600_000)  # 2026-07-15 12:13:20 UTC
REQUEST = Request(
    name="start",
    method="POST",
    path="/",
    headers=(("Authorization", "Bearer sk_secret"), ("Idempotency-Key", "k1")),
    timeout_s=1,
    is_repeatable=True,
)


def failed(outcome: HttpReply) -> CallFailed:
    return failure(REQUEST, outcome, attempts=1, gave_up=GaveUpBecause.NOT_RETRYABLE, wall=WALL)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "malformed_json", errors.InvalidRequest),
        (401, "unauthenticated", errors.Unauthenticated),
        (403, "forbidden", errors.Forbidden),
        (404, "not_found", errors.NotFound),
        (405, "method_not_allowed", errors.CallRefused),
        (409, "conflict", errors.Conflict),
        (413, "body_too_large", errors.InvalidRequest),
        (422, "invalid_request", errors.InvalidRequest),
        (422, "idempotency_mismatch", errors.IdempotencyMismatch),
        (429, "max_concurrent_runs_reached", errors.TenantFull),
        (429, "budget_exhausted", errors.BudgetExhausted),
        (429, "job_throttled", errors.Throttled),
        (500, "internal", errors.ServerUnavailable),
        (503, "gate_busy", errors.ServerUnavailable),
        (302, "some_code", errors.UnexpectedAnswer),
    ],
)
def test_every_answer_has_its_error(status: int, code: str, kind: type[CallFailed]) -> None:
    error = failed(problem(status, code, request_id="q7"))
    assert type(error) is kind
    assert (error.code, error.facts.status, error.facts.request_id) == (code, status, "q7")
    assert code in str(error)
    assert error.idempotency_key == "k1"
    assert "sk_secret" not in f"{error} {error!r} {REQUEST!r}"


def test_errors_are_split_by_who_acts() -> None:
    tree: dict[type[CallFailed], set[type[CallFailed]]] = {
        errors.TryLater: {errors.TenantFull, errors.BudgetExhausted, errors.Throttled},
        errors.ServerUnavailable: set(),
        errors.CallRefused: {
            errors.InvalidRequest,
            errors.IdempotencyMismatch,
            errors.NotFound,
            errors.Conflict,
        },
        errors.AccessDenied: {errors.Unauthenticated, errors.Forbidden},
        errors.UnexpectedAnswer: set(),
        errors.WaitTimeout: set(),
    }
    assert set(CallFailed.__subclasses__()) == set(tree)
    for branch, leaves in tree.items():
        assert set(branch.__subclasses__()) == leaves
    drawn = errors.__doc__ or ""
    every: list[type[CallFailed]] = [CallFailed, *tree, *chain.from_iterable(tree.values())]
    assert [each for each in every if each.__name__ not in drawn] == []


def test_faults_are_listed_in_the_message_the_first_few() -> None:
    faults = [{"path": f"steps.s{n}", "message": "is wrong"} for n in range(5)]
    error = failed(problem(422, "invalid_workflow", errors=faults))
    assert isinstance(error, InvalidRequest)
    assert [each.path for each in error.errors] == [f"steps.s{n}" for n in range(5)]
    assert "steps.s2: is wrong; and 2 more" in str(error)
    assert "steps.s3" not in str(error)
    told = failed(problem(422, "invalid_workflow", errors=faults, detail="5 faults: is wrong"))
    assert str(told) == "start: 5 faults: is wrong (422 invalid_workflow)"


def test_an_error_survives_the_way_between_processes() -> None:
    error = failed(full(2500))
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own, as between processes
    assert type(copy) is type(error)
    assert (str(copy), copy.facts) == (str(error), error.facts)
    assert copy.retry_after_s == 2.5


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"code": 7}', b"\xff", b'{"errors": 1}'])
def test_a_proxys_page_is_judged_by_its_status(body: bytes) -> None:
    reply = HttpReply(503, {"retry-after": "3"}, body)
    assert answer_of(reply, WALL).retry_class is RetryClass.UNAVAILABLE
    assert answer_of(reply, WALL).retry_after_ms == 3000
    error = failed(reply)
    assert isinstance(error, errors.ServerUnavailable)
    assert "503" in str(error)


@pytest.mark.parametrize(
    ("headers", "body_ms", "expected_ms"),
    [
        ({}, None, 0),
        ({"retry-after": "7"}, None, 7000),
        ({"retry-after": " 7 "}, None, 7000),
        ({"retry-after": "7"}, 6123, 6123),  # The body is exact, the header is its ceiling.
        ({"retry-after": "7"}, 0, 0),
        ({"retry-after": "7"}, -5, 0),
        ({"retry-after": "-7"}, None, 0),
        ({"retry-after": "soon"}, None, 0),
        ({"retry-after": "1.5"}, None, 0),
        ({"retry-after": "9" * 400}, None, 10**12),
        ({"retry-after": "Wed, 15 Jul 2026 12:13:30 GMT"}, None, 10_000),
        ({"retry-after": "Wed, 15 Jul 2026 12:13:10 GMT"}, None, 0),
        # By the server's own clock, if it shows it.
        (
            {
                "retry-after": "Wed, 15 Jul 2026 13:00:05 GMT",
                "date": "Wed, 15 Jul 2026 13:00:00 GMT",
            },
            None,
            5000,
        ),
        ({"retry-after": "Wed, 99 Jul 2026 12:13:30 GMT"}, None, 0),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT", "date": "x"}, None, 10**12),
    ],
)
def test_the_servers_word_is_read_in_all_its_forms(
    headers: dict[str, str], body_ms: int | None, expected_ms: int
) -> None:
    reply = HttpReply(429, headers, full(body_ms).body)
    assert retry_after_ms(reply, WALL) == expected_ms


def test_no_answer_says_so_and_whether_it_was_sent() -> None:
    error = failure(REQUEST, DEAD, attempts=8, gave_up=GaveUpBecause.ATTEMPTS_SPENT, wall=WALL)
    assert str(error) == "start: no connection: refused, after 8 tries"
    assert not error.facts.may_have_run


def test_an_exhausted_budget_says_what_is_left_and_is_retried_only_if_that_can_help() -> None:
    members: dict[str, Any] = {
        "budget": "tokens",
        "limit": 100,
        "used": 70,
        "reserved": 20,
        "resets_at": "2026-11-17T00:00:00Z",
    }
    reply = problem(429, "budget_exhausted", retry_class=None, retry_after_ms=30_000, **members)
    error = failed(reply)
    assert isinstance(error, errors.BudgetExhausted)
    assert (error.budget, error.limit, error.used, error.reserved) == ("tokens", 100, 70, 20)
    assert error.resets_at == datetime(2026, 11, 17, tzinfo=UTC)
    assert answer_of(reply, WALL) == Answer(None)
    again = problem(429, "budget_exhausted", retry_class="quota", retry_after_ms=900, **members)
    assert answer_of(again, WALL) == Answer(RetryClass.QUOTA, 900)
