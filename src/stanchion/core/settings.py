"""Settings: what an operator may change at run time, and the document that stores it.

The settings apply to the whole deployment. Two of them may be overridden for a tenant: the strategy
of its admission gate, and the retry backoff at that gate.

A member that is absent from a document has its default. So documents of older versions stay valid,
and removing a member resets it. All faults of a document are reported together, each with its path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from stanchion.core import escalation, retry
from stanchion.core.escalation import Escalation
from stanchion.core.faults import Fault, Faults, Findings
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.lease import (
    DEFAULT_POLICIES,
    LeasePolicy,
    OnLockError,
    OnRenewalLost,
    TermS,
)
from stanchion.core.merge_patch import merged, note_unknown
from stanchion.core.model import Risk
from stanchion.core.retry import BackoffMsFrom1, BoundedJitter, Fixed
from stanchion.core.workflow_file.record import Member, Record
from stanchion.core.workflow_file.shape import Items, Word, number_of

Rhythm: TypeAlias = Fixed | BoundedJitter
"""How long to wait before the next attempt to acquire a contended lock."""


class Strategy(StrEnum):
    """How concurrent starts of one tenant are serialised."""

    ATOMIC = "atomic"
    """Only the atomic admission of the store decides, without a lock."""
    LOCK = "lock"
    """A lock per tenant serialises the callers in front of the same atomic admission."""


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the admission gate."""

    strategy: Strategy = Strategy.ATOMIC
    lock_ttl_s: TermS = 10
    lock_wait_s: Annotated[float, Meta(ge=0, le=60)] = 2
    """How long a start may wait in total; it is answered at most half a second later."""
    lock_retry: Rhythm = BoundedJitter(delay_ms=10, jitter_ms=5)

    @property
    def lock_ttl_ms(self) -> int:
        return round(self.lock_ttl_s * 1_000)

    @property
    def lock_wait_ms(self) -> int:
        return round(self.lock_wait_s * 1_000)


class AdmissionOverride(msgspec.Struct, frozen=True, kw_only=True):
    """The gate settings of one tenant; ``None`` keeps the value of the deployment."""

    strategy: Strategy | None = None
    lock_retry: Rhythm | None = None

    def over(self, admission: AdmissionSettings) -> AdmissionSettings:
        """The settings of the deployment with the overrides of this tenant."""
        return replace(
            admission,
            strategy=self.strategy or admission.strategy,
            lock_retry=self.lock_retry or admission.lock_retry,
        )


class LockBusy(msgspec.Struct, frozen=True, kw_only=True):
    """When to retry a run whose lock another replica has, or whose lock store is unavailable."""

    retry: Rhythm = BoundedJitter(delay_ms=500, jitter_ms=200)
    backend_error_delay_ms: BackoffMsFrom1 = 1_000


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings."""

    admission: AdmissionSettings = AdmissionSettings()
    lock_busy: LockBusy = LockBusy()
    policies: Mapping[Risk, LeasePolicy] = DEFAULT_POLICIES
    escalation: Escalation = Escalation()


DEFAULTS: Final = Settings()


def read_settings(document: JsonValue, *, run_lease_ttl_ms: int) -> Settings | Faults:
    """Parse a document, or return all its faults."""
    return _read(document, Findings(), run_lease_ttl_ms)


def patched(settings: Settings, patch: JsonValue, *, run_lease_ttl_ms: int) -> Settings | Faults:
    """The settings after a JSON merge patch, or its faults. A removed member gets its default."""
    document, findings = settings_document(settings), Findings()
    note_unknown(document, patch, findings)
    return _read(merged(document, patch), findings, run_lease_ttl_ms)


def _read(document: JsonValue, findings: Findings, run_lease_ttl_ms: int) -> Settings | Faults:
    settings = _SETTINGS.read(document, (), findings)
    if not isinstance(settings, Settings) or findings.noted:
        return findings.faults()
    admission, lock_busy = settings.admission, settings.lock_busy
    return (
        *_term_faults("admission.lock_retry", admission.lock_retry, admission.lock_ttl_ms),
        *_term_faults("lock_busy", lock_busy.retry, run_lease_ttl_ms),
    ) or settings


def _term_faults(place: str, rhythm: Rhythm, lock_ttl_ms: int) -> Faults:
    found = retry.faults(rhythm, lock_ttl_ms=lock_ttl_ms)
    return tuple(Fault(f"{place}.{fault.path}", fault.message) for fault in found)


# ── One tenant's override ────────────────────────────────────────────────────────────────────────


def effective_admission(settings: Settings, override: JsonValue) -> AdmissionSettings:
    """The gate settings of a tenant with this override.

    An invalid override is ignored: the settings of the deployment apply.
    """
    if override is None:
        return settings.admission
    read = _OVERRIDE.read(override, (), Findings())
    return (
        read.over(settings.admission) if isinstance(read, AdmissionOverride) else settings.admission
    )


def override_faults(settings: Settings, override: JsonValue) -> Faults:
    """All faults of a tenant's override; empty if it is valid."""
    if override is None:
        return ()
    findings = Findings()
    read = _OVERRIDE.read(override, ("admission",), findings)
    if not isinstance(read, AdmissionOverride):
        return findings.faults()
    if read.lock_retry is None:
        return ()
    return _term_faults("admission.lock_retry", read.lock_retry, settings.admission.lock_ttl_ms)


# ── Written down ─────────────────────────────────────────────────────────────────────────────────


def settings_document(settings: Settings) -> JsonObject:
    """The settings as a document with every member, defaults included."""
    admission, lock_busy, watch = settings.admission, settings.lock_busy, settings.escalation
    return {
        "admission": {
            "strategy": str(admission.strategy),
            "lock_ttl_s": _number(admission.lock_ttl_s),
            "lock_wait_s": _number(admission.lock_wait_s),
            "lock_retry": _written(admission.lock_retry),
        },
        "lock_busy": {
            **_written(lock_busy.retry),
            "backend_error_delay_ms": lock_busy.backend_error_delay_ms,
        },
        "policies": {
            str(risk): {
                "on_lock_error": str(policy.on_lock_error),
                "on_renewal_lost": str(policy.on_renewal_lost),
                "renewal_failures_max": policy.renewal_failures_max,
            }
            for risk, policy in settings.policies.items()
        },
        "escalation": {
            "fallbacks_per_s": _number(watch.fallbacks_per_s),
            "window_s": _number(watch.window_s),
            "closes": [str(risk) for risk in watch.closes],
            "dwell_s": _number(watch.dwell_s),
            "quiet_divisor": watch.quiet_divisor,
            "probes_min": watch.probes_min,
            "trips_per_day_max": watch.trips_per_day_max,
        },
    }


def settings_json_schema() -> JsonObject:
    """The JSON Schema (2020-12) of the document."""
    return _SETTINGS.schema()


def _written(rhythm: Rhythm) -> JsonObject:
    kind = "fixed" if isinstance(rhythm, Fixed) else "jitter"
    return {"kind": kind, "delay_ms": rhythm.delay_ms, "jitter_ms": rhythm.jitter_ms}


def _number(number: float) -> int | float:
    """Write a whole float as an integer: ``10``, not ``10.0``."""
    return int(number) if float(number).is_integer() else number


# ── Shapes: every member there is. The ranges are those that the values above state ─────────────

_Enum = TypeVar("_Enum", bound=StrEnum)
_KINDS: Final[Mapping[str, type[Rhythm]]] = {"fixed": Fixed, "jitter": BoundedJitter}


def _word(words: type[_Enum]) -> Word[_Enum]:
    return Word({word.value: word for word in words})


def _rhythm(
    default: Rhythm,
    kind: type[Rhythm] = BoundedJitter,
    delay_ms: int | None = None,
    jitter_ms: int | None = None,
) -> Rhythm:
    delay_ms = default.delay_ms if delay_ms is None else delay_ms
    # The default jitter must not make a short delay a fault.
    jitter_ms = min(default.jitter_ms, delay_ms) if jitter_ms is None else jitter_ms
    return kind(delay_ms, jitter_ms)


def _rhythm_faults(rhythm: Rhythm) -> Iterator[tuple[str, str]]:
    return ((fault.path, fault.message) for fault in retry.faults(rhythm))


def _rhythm_members() -> dict[str, Member]:
    return {
        "kind": Member(Word(_KINDS), "fixed: always delay_ms; jitter: up to jitter_ms off it."),
        "delay_ms": Member(number_of(BoundedJitter, "delay_ms"), "The delay before the next try."),
        "jitter_ms": Member(
            number_of(BoundedJitter, "jitter_ms"),
            "How far the delay may vary, up or down. Kept while fixed.",
        ),
    }


_LOCK_RETRY: Final[Record[Rhythm]] = Record(
    "lock_retry", _rhythm_members(), partial(_rhythm, DEFAULTS.admission.lock_retry), _rhythm_faults
)
_OVERRIDABLE: Final = {
    "strategy": Member(_word(Strategy), "atomic: one store step alone; lock: behind a lock."),
    "lock_retry": Member(_LOCK_RETRY, "How callers retry while another holds the lock."),
}
_OVERRIDE: Final = Record("a tenant's admission", _OVERRIDABLE, AdmissionOverride)
_ADMISSION: Final = Record(
    "admission",
    {
        **_OVERRIDABLE,
        "lock_ttl_s": Member(
            number_of(AdmissionSettings, "lock_ttl_s"), "The term after which a lock expires."
        ),
        "lock_wait_s": Member(
            number_of(AdmissionSettings, "lock_wait_s"), "How long a start may wait for the gate."
        ),
    },
    AdmissionSettings,
)


def _lock_busy(backend_error_delay_ms: int | None = None, **rhythm: Any) -> LockBusy:  # noqa: ANN401 - each was read by its shape
    default = DEFAULTS.lock_busy
    delay_ms = default.backend_error_delay_ms
    return LockBusy(
        retry=_rhythm(default.retry, **rhythm),
        backend_error_delay_ms=delay_ms
        if backend_error_delay_ms is None
        else backend_error_delay_ms,
    )


_LOCK_BUSY: Final = Record(
    "lock_busy",
    {
        **_rhythm_members(),
        "backend_error_delay_ms": Member(
            number_of(LockBusy, "backend_error_delay_ms"),
            "The delay while the lock store does not answer.",
        ),
    },
    _lock_busy,
    lambda lock_busy: _rhythm_faults(lock_busy.retry),
)
_POLICY: Final = {
    "on_lock_error": Member(_word(OnLockError), "When the lock store does not answer."),
    "on_renewal_lost": Member(_word(OnRenewalLost), "When a lease is no longer trusted."),
    "renewal_failures_max": Member(
        number_of(LeasePolicy, "renewal_failures_max"),
        "Failed renewals in a row that count as lost.",
    ),
}


def _policies(**given: LeasePolicy) -> Mapping[Risk, LeasePolicy]:
    chosen = {risk: given.get(risk.value, policy) for risk, policy in DEFAULT_POLICIES.items()}
    return MappingProxyType(chosen)


_POLICIES: Final = Record(
    "policies",
    {
        risk.value: Member(
            Record(f"the policy '{risk}'", _POLICY, partial(replace, policy)),
            f"Run leases of workflows with risk {risk}.",
        )
        for risk, policy in DEFAULT_POLICIES.items()
    },
    _policies,
)


_threshold: Final = partial(number_of, Escalation)
_ESCALATION: Final = Record(
    "escalation",
    {
        "fallbacks_per_s": Member(
            _threshold("fallbacks_per_s"), "The rate of fallbacks above which escalation trips."
        ),
        "window_s": Member(_threshold("window_s"), "For how long the rate must stay above."),
        "closes": Member(Items(_word(Risk), len(Risk)), "The classes that then fail closed."),
        "dwell_s": Member(
            _threshold("dwell_s"), "How long it must be quiet before they open again."
        ),
        "quiet_divisor": Member(
            _threshold("quiet_divisor"), "Quiet: a rate below the threshold divided by this."
        ),
        "probes_min": Member(
            _threshold("probes_min"), "Successful answers of the lock store needed as well."
        ),
        "trips_per_day_max": Member(
            _threshold("trips_per_day_max"), "More trips than this in a day latch the escalation."
        ),
    },
    Escalation,
    lambda read: ((fault.path, fault.message) for fault in escalation.faults(read)),
)
_SETTINGS: Final = Record(
    "the settings",
    {
        "admission": Member(_ADMISSION, "How starts are gated."),
        "lock_busy": Member(_LOCK_BUSY, "When a busy run is tried again."),
        "policies": Member(_POLICIES, "What a failing lock store means, by risk class."),
        "escalation": Member(_ESCALATION, "When failing open is no longer allowed."),
    },
    Settings,
)
