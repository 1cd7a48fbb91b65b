"""Settings: read, written, patched and overridden without loss, and refused with every reason."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stanchion.core.escalation import Escalation
from stanchion.core.faults import Fault
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.lease import LeasePolicy, OnLockError, OnRenewalLost
from stanchion.core.merge_patch import changed_paths, merged
from stanchion.core.model import Risk
from stanchion.core.retry import BoundedJitter, Fixed
from stanchion.core.settings import (
    DEFAULTS,
    AdmissionSettings,
    LockBusy,
    Rhythm,
    Settings,
    Strategy,
    effective_admission,
    override_faults,
    patched,
    read_settings,
    settings_document,
    settings_json_schema,
)

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
RUN_LEASE_TTL_MS = 30_000

# The outside contract, to the letter; what it leaves out has the defaults of the escalation.
CONTRACT: JsonObject = msgspec.json.decode("""
{"admission": {"strategy": "atomic", "lock_ttl_s": 10, "lock_wait_s": 2,
               "lock_retry": {"kind": "jitter", "delay_ms": 10, "jitter_ms": 5}},
 "lock_busy": {"kind": "jitter", "delay_ms": 500, "jitter_ms": 200, "backend_error_delay_ms": 1000},
 "policies": {
   "low": {"on_lock_error": "fail_open", "on_renewal_lost": "continue", "renewal_failures_max": 3},
   "standard": {"on_lock_error": "fail_open", "on_renewal_lost": "continue",
                "renewal_failures_max": 3},
   "high": {"on_lock_error": "fail_closed", "on_renewal_lost": "fence", "renewal_failures_max": 3},
   "critical": {"on_lock_error": "fail_closed", "on_renewal_lost": "fence",
                "renewal_failures_max": 1}},
 "escalation": {"fallbacks_per_s": 0.1, "window_s": 300, "closes": ["high", "standard"],
                "dwell_s": 600, "quiet_divisor": 5, "probes_min": 3, "trips_per_day_max": 2}}
""")


def read(document: JsonValue, run_lease_ttl_ms: int = RUN_LEASE_TTL_MS) -> Settings:
    settings = read_settings(document, run_lease_ttl_ms=run_lease_ttl_ms)
    assert isinstance(settings, Settings), settings
    return settings


def patch(change: JsonValue, settings: Settings = DEFAULTS) -> Settings | tuple[Fault, ...]:
    return patched(settings, change, run_lease_ttl_ms=RUN_LEASE_TTL_MS)


def good(change: JsonValue, settings: Settings = DEFAULTS) -> Settings:
    answer = patch(change, settings)
    assert isinstance(answer, Settings), answer
    return answer


def refused(change: JsonValue) -> dict[str, str]:
    answer = patch(change)
    assert isinstance(answer, tuple), answer
    return {fault.path: fault.message for fault in answer}


# ── The document ─────────────────────────────────────────────────────────────────────────────────


def test_the_defaults_are_those_of_the_contract() -> None:
    document = settings_document(DEFAULTS)
    # As text, so that the order of members and 10 instead of 10.0 count as well.
    assert msgspec.json.encode(document) == msgspec.json.encode(CONTRACT)


def test_whatever_is_absent_has_its_default() -> None:
    assert read({}) == DEFAULTS
    assert read({"admission": {}, "policies": {"low": {}}, "lock_busy": {}}) == DEFAULTS


RHYTHMS: st.SearchStrategy[Rhythm] = st.integers(0, 20_000).flatmap(
    lambda delay_ms: st.builds(
        lambda kind, jitter_ms: kind(delay_ms, jitter_ms),
        st.sampled_from([Fixed, BoundedJitter]),
        st.integers(0, min(delay_ms, 99)),
    )
)
SETTINGS = st.builds(
    Settings,
    admission=st.builds(
        AdmissionSettings,
        strategy=st.sampled_from(Strategy),
        lock_ttl_s=st.floats(0.1, 3_600),
        lock_wait_s=st.floats(0, 60),
        lock_retry=RHYTHMS,
    ),
    lock_busy=st.builds(LockBusy, retry=RHYTHMS, backend_error_delay_ms=st.integers(1, 1_000_000)),
    policies=st.fixed_dictionaries(
        {
            risk: st.builds(
                LeasePolicy,
                st.sampled_from(OnLockError),
                st.sampled_from(OnRenewalLost),
                st.integers(1, 100),
            )
            for risk in Risk
        }
    ),
    escalation=st.builds(
        Escalation,
        fallbacks_per_s=st.floats(0.001, 1_000_000),
        window_s=st.floats(1, 86_400),
        closes=st.lists(st.sampled_from(Risk), unique=True).map(tuple),
        dwell_s=st.floats(0, 86_400),
        quiet_divisor=st.integers(1, 1_000),
        probes_min=st.integers(0, 1_000),
        trips_per_day_max=st.integers(0, 1_000),
    ),
)


@given(SETTINGS)
def test_what_is_written_down_is_read_back(settings: Settings) -> None:
    text = msgspec.json.encode(settings_document(settings))
    assert read(msgspec.json.decode(text)) == settings


@given(SETTINGS, SETTINGS)
def test_one_document_as_a_patch_turns_any_other_into_it(one: Settings, other: Settings) -> None:
    assert patch(settings_document(other), one) == other


# ── Patches ──────────────────────────────────────────────────────────────────────────────────────


def test_kind_alone_goes_to_fixed_and_back() -> None:
    fixed = good({"lock_busy": {"kind": "fixed"}, "admission": {"lock_retry": {"kind": "fixed"}}})
    assert fixed.lock_busy.retry == Fixed(500, 200)
    assert fixed.admission.lock_retry == Fixed(10, 5)
    assert good({"lock_busy": {"kind": "jitter"}}, fixed).lock_busy == DEFAULTS.lock_busy


def test_a_patch_changes_what_it_names_and_nothing_else() -> None:
    changed = good({"policies": {"low": {"on_lock_error": "fail_closed"}}})
    low = LeasePolicy(OnLockError.FAIL_CLOSED, OnRenewalLost.CONTINUE, 3)
    assert changed == replace(DEFAULTS, policies={**DEFAULTS.policies, Risk.LOW: low})


def test_null_resets_a_member_and_all_that_is_in_it() -> None:
    changed = good(
        {"admission": {"strategy": "lock", "lock_wait_s": 5}, "escalation": {"closes": []}}
    )
    assert good({"admission": {"lock_wait_s": None}}, changed).admission == AdmissionSettings(
        strategy=Strategy.LOCK
    )
    assert good({"admission": None, "escalation": None}, changed) == DEFAULTS


def test_a_jitter_that_nobody_gave_never_makes_a_delay_too_short() -> None:
    changed = good({"admission": {"lock_retry": {"delay_ms": 3, "jitter_ms": None}}})
    assert changed.admission.lock_retry == BoundedJitter(3, 3)


@pytest.mark.parametrize(
    ("change", "path", "message"),
    [
        ([], "", "must be an object, not a list"),
        (None, "", "must be an object, not null"),
        ({"nonsense": 1}, "nonsense", "not a member of the settings"),
        ({"nonsense": None}, "nonsense", "is not there to be removed"),
        ({"admision": None}, "admision", "did you mean 'admission'?"),
        ({"admission": {"ttl": None}}, "admission.ttl", "is not there to be removed"),
        ({"admission": 7}, "admission", "must be an object, not a number"),
        ({"admission": {"strategy": "optimist"}}, "admission.strategy", "atomic or lock"),
        ({"admission": {"strategy": True}}, "admission.strategy", "atomic or lock, not true"),
        ({"admission": {"lock_ttl_s": 0}}, "admission.lock_ttl_s", "from 0.1 to 3600"),
        ({"admission": {"lock_ttl_s": 3601}}, "admission.lock_ttl_s", "from 0.1 to 3600"),
        ({"admission": {"lock_wait_s": -0.1}}, "admission.lock_wait_s", "from 0 to 60"),
        ({"admission": {"lock_wait_s": 60.5}}, "admission.lock_wait_s", "from 0 to 60"),
        ({"admission": {"lock_wait_s": float("nan")}}, "admission.lock_wait_s", "from 0 to 60"),
        ({"admission": {"lock_wait_s": "2"}}, "admission.lock_wait_s", "a number, not text"),
        (
            {"admission": {"lock_retry": {"kind": "exponential"}}},
            "admission.lock_retry.kind",
            "fixed or jitter",
        ),
        (
            {"admission": {"lock_retry": {"delay_ms": 4}}},
            "admission.lock_retry.jitter_ms",
            "exceeds delay_ms",
        ),
        (
            {"admission": {"lock_retry": {"delay_ms": 1.5}}},
            "admission.lock_retry.delay_ms",
            "must be an integer",
        ),
        (
            {"admission": {"lock_ttl_s": 1, "lock_retry": {"delay_ms": 5000, "jitter_ms": 1000}}},
            "admission.lock_retry.jitter_ms",
            "below the lock's term of 1000 ms",
        ),
        ({"lock_busy": {"jitter_ms": 501}}, "lock_busy.jitter_ms", "exceeds delay_ms"),
        (
            {"lock_busy": {"delay_ms": 60_000, "jitter_ms": 30_000}},
            "lock_busy.jitter_ms",
            "below the lock's term of 30000 ms",
        ),
        (
            {"lock_busy": {"kind": "fixed", "jitter_ms": 501}},
            "lock_busy.jitter_ms",
            "exceeds delay_ms",
        ),
        (
            {"lock_busy": {"backend_error_delay_ms": 0}},
            "lock_busy.backend_error_delay_ms",
            "from 1 to",
        ),
        ({"policies": {"extreme": {}}}, "policies.extreme", "low, standard, high or critical"),
        (
            {"policies": {"low": {"on_lock_error": "shrug"}}},
            "policies.low.on_lock_error",
            "fail_open or fail_closed",
        ),
        (
            {"policies": {"high": {"renewal_failures_max": 0}}},
            "policies.high.renewal_failures_max",
            "from 1 to 100",
        ),
        ({"escalation": {"closes": ["high", "high"]}}, "escalation.closes", "names a class twice"),
        ({"escalation": {"closes": ["none"]}}, "escalation.closes[0]", "low, standard, high"),
        ({"escalation": {"fallbacks_per_s": 0}}, "escalation.fallbacks_per_s", "from 0.001 to"),
        ({"escalation": {"window_s": 0.9}}, "escalation.window_s", "from 1 to 86400"),
        ({"escalation": {"dwell_s": -1}}, "escalation.dwell_s", "from 0 to 86400"),
        ({"escalation": {"quiet_divisor": 0}}, "escalation.quiet_divisor", "from 1 to 1000"),
        ({"escalation": {"probes_min": -1}}, "escalation.probes_min", "from 0 to 1000"),
        (
            {"escalation": {"trips_per_day_max": 1001}},
            "escalation.trips_per_day_max",
            "from 0 to 1000",
        ),
    ],
)
def test_what_is_wrong_is_named_by_its_path(change: JsonValue, path: str, message: str) -> None:
    faults = refused(change)
    assert list(faults) == [path]
    assert message in faults[path]


def test_every_fault_is_told_at_once() -> None:
    assert set(
        refused(
            {
                "typo": None,
                "admission": {"lock_wait_s": 61, "strategy": "x"},
                "policies": {"low": {"renewal_failures_max": 101}},
                "escalation": {"closes": "all"},
            }
        )
    ) == {
        "typo",
        "admission.lock_wait_s",
        "admission.strategy",
        "policies.low.renewal_failures_max",
        "escalation.closes",
    }


def test_the_run_leases_term_bounds_the_busy_jitter() -> None:
    document: JsonObject = {"lock_busy": {"delay_ms": 900, "jitter_ms": 900}}
    assert read(document, 901).lock_busy.retry == BoundedJitter(900, 900)
    assert isinstance(read_settings(document, run_lease_ttl_ms=900), tuple)


# ── Merge patches (RFC 7396, appendix A) ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("document", "change", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_a_patch_is_merged_as_the_standard_says(
    document: JsonValue, change: JsonValue, result: JsonValue
) -> None:
    before = msgspec.json.encode(document)
    assert merged(document, change) == result
    assert msgspec.json.encode(document) == before


def test_the_places_that_changed_are_the_smallest_ones() -> None:
    one: JsonObject = {"a": {"b": 1, "c": [1]}, "d": 2, "e": {"f": 1}}
    other: JsonObject = {"a": {"b": 1, "c": [2]}, "d": 2, "g": 3}
    assert changed_paths(one, other) == (("a", "c"), ("e",), ("g",))
    assert changed_paths(one, one) == ()


# ── One tenant's override ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (None, AdmissionSettings(lock_wait_s=7)),
        ({}, AdmissionSettings(lock_wait_s=7)),
        ({"strategy": "lock"}, AdmissionSettings(lock_wait_s=7, strategy=Strategy.LOCK)),
        (
            {"lock_retry": {"kind": "fixed", "delay_ms": 30}},
            AdmissionSettings(lock_wait_s=7, lock_retry=Fixed(30, 5)),
        ),
        # Written by hand or by another version: then the deployment's own word holds.
        ({"strategy": "lock", "novelty": 1}, AdmissionSettings(lock_wait_s=7)),
        ("lock", AdmissionSettings(lock_wait_s=7)),
    ],
)
def test_a_tenant_overrides_strategy_and_rhythm(
    override: JsonValue, expected: AdmissionSettings
) -> None:
    settings = good({"admission": {"lock_wait_s": 7}})
    assert effective_admission(settings, override) == expected


def test_times_of_the_lock_are_whole_milliseconds_to_whoever_waits() -> None:
    admission = good({"admission": {"lock_ttl_s": 1.2345, "lock_wait_s": 0.0006}}).admission
    assert (admission.lock_ttl_ms, admission.lock_wait_ms) == (1_234, 1)


def test_a_tenant_can_leave_the_lock_of_the_deployment() -> None:
    settings = good({"admission": {"strategy": "lock", "lock_retry": {"kind": "fixed"}}})
    effective = effective_admission(settings, {"strategy": "atomic"})
    assert (effective.strategy, effective.lock_retry) == (Strategy.ATOMIC, Fixed(10, 5))


@pytest.mark.parametrize(
    ("override", "paths"),
    [
        (None, []),
        ({}, []),
        ({"strategy": "atomic", "lock_retry": {"kind": "jitter"}}, []),
        ({"strategy": "none"}, ["admission.strategy"]),
        ({"lock_ttl_s": 3}, ["admission.lock_ttl_s"]),
        ({"lock_retry": {"delay_ms": 1, "jitter_ms": 2}}, ["admission.lock_retry.jitter_ms"]),
        (
            {"lock_retry": {"delay_ms": 10_000, "jitter_ms": 10_000}},
            ["admission.lock_retry.jitter_ms"],
        ),
        ([], ["admission"]),
    ],
)
def test_an_overrides_faults_are_named_by_their_path(override: JsonValue, paths: list[str]) -> None:
    assert [fault.path for fault in override_faults(DEFAULTS, override)] == paths


# ── The reference ────────────────────────────────────────────────────────────────────────────────


def leaves(schema: JsonValue, path: str = "") -> dict[str, JsonObject]:
    """Every member that is no object itself, by its path, with its schema."""
    assert isinstance(schema, dict)
    if "properties" not in schema:
        return {path: schema}
    inner = schema["properties"]
    assert isinstance(inner, dict)
    found: dict[str, JsonObject] = {}
    for name, each in inner.items():
        found |= leaves(each, f"{path}.{name}" if path else name)
    return found


def at(document: JsonValue, path: str) -> JsonValue:
    for name in path.split("."):
        assert isinstance(document, dict)
        document = document[name]
    return document


def allowed(schema: JsonObject) -> str:
    """The range as the reference writes it."""
    if "enum" in schema:
        words = schema["enum"]
        assert isinstance(words, list)
        return ", ".join(f"`{word}`" for word in words)
    if schema["type"] == "array":
        return "list of risk classes"
    kind = "integer" if schema["type"] == "integer" else "number"
    low, high = schema["minimum"], schema["maximum"]
    assert isinstance(low, int | float)
    assert isinstance(high, int | float)
    return f"{kind}, {low:,} to {high:,}"


def test_the_reference_states_every_member_with_its_range_and_default() -> None:
    rows = re.findall(
        r"^\| `([\w.]+)` \| ([^|]+) \| `([^|]+)` \|",
        REFERENCE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    stated = {path: (written.strip(), default) for path, written, default in rows}
    document = settings_document(DEFAULTS)
    actual = {
        path: (allowed(schema), msgspec.json.encode(at(document, path)).decode())
        for path, schema in leaves(settings_json_schema()).items()
    }
    assert stated == actual


def test_the_examples_of_the_reference_are_good() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    whole, *patches = (msgspec.json.decode(block) for block in blocks)
    assert read(whole) == DEFAULTS
    assert [type(patch(change)) for change in patches] == [Settings] * len(patches)
