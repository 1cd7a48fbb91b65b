"""Arguments of ``admit_alike.lua``: admissions of one tenant that begin alike.

What the runs have in common is sent once, with the places of what is their own. The script puts
ids, inputs and job numbers into the texts and writes records as the other admissions are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from stanchion.adapters.store.redis.encode import (
    about,
    base_of,
    changing_fields,
    sized,
    status_range,
    terms_of,
    to_json,
    workflow_range,
)
from stanchion.core.events import TimerFired
from stanchion.core.transition import DispatchJob, SetTimer
from stanchion.ports.records import Admission, AlikeStarts, StartTerms

_encode: Final = msgspec.json.Encoder().encode
_pack: Final = msgspec.msgpack.Encoder().encode


def encode_alike(
    starts: AlikeStarts,
    kinds: Sequence[tuple[object, ...]],
    *,
    follows: bool = False,
    is_opened: bool = False,
) -> list[str | bytes] | None:
    """The arguments of ``admit_alike.lua`` for admissions of one tenant, without the time limit.

    ``kinds`` are their jobs, from ``encode_kinds``; ``None`` if only some have a key.
    ``follows``: only if the last run of those before them was admitted. ``is_opened``: whether the
    timeline begins in the hash of its run, see ``timeline.lua``.
    """
    first = starts.first
    is_keyed, size = first.key is not None, len(first.fingerprint)
    rows: list[str | bytes] = []
    for _, key, fingerprint, given, works in starts.rows:
        if (key is not None) is not is_keyed or len(fingerprint) != size:
            return None
        rows.append(_encode(given))
        if key is not None:
            rows += (key, fingerprint)
        for work in works:
            rows.append(_encode(work))
    common = _common_of_alike(first, kinds, is_opened=is_opened)
    common |= {"count": len(starts), "follows": follows}
    return [_pack(common), *rows]


def _common_of_alike(
    first: Admission, kinds: Sequence[tuple[object, ...]], *, is_opened: bool
) -> dict[str, object]:
    """What runs that begin alike have in common: see ``admit_alike.lua``."""
    run, whose = first.run, sized(first.run.tenant)
    created = f"{run.created_at:016d}"
    place = created + run.id
    ranges = [
        status_range(run.tenant, run.status),
        status_range(None, run.status),
        workflow_range(run.tenant, run.workflow_id),
    ]
    # Of all constant members of a run only its id and its input are its own.
    empty = base_of(replace(run, input={})).removeprefix('{"id":"' + run.id)
    begins, _, ends = empty.partition('"input":{}')
    entries, lines = first.transition.timeline, to_json(first.transition.timeline)
    opening = ["opening", f"{len(entries)} {lines}"] if is_opened else []
    common = terms_of(run.tenant, StartTerms(first.definitions, first.budget))
    return common | {
        "is_keyed": first.key is not None,
        "whose": whose,
        "base": (begins + '"input":', ends),
        "fields": ["about", about(run), *changing_fields(run), *opening],
        "listed": ranges,
        "kept": _raw(_pack((ranges[2] + place,)).removesuffix(place.encode())),
        "id_chars": len(run.id),
        "stamp": f"{run.stamp.version} {run.fence} {run.stamp.nonce}",
        "record": (
            _raw(b"\x93" + _pack("0") + _head(first.fingerprint)),
            _raw(_head(run.id)),
        ),
        "jobs": kinds,
        "timers": [
            (
                each.timer.key,
                str(each.due),
                _raw(_pack((each.timer.step_id or "", to_json(TimerFired(timer=each.timer))))),
            )
            for each in first.transition.effects
            if isinstance(each, SetTimer)
        ],
        "timeline": False if is_opened else [to_json(entry) for entry in entries],
        "lines": lines,
        "created_at": created,
        "waiting": first.before is not None,
        "queue": ("", "", first.queue.on_full or False),
    }


def encode_kinds(first: Admission) -> list[tuple[object, ...]] | None:
    """What the jobs of runs that begin alike have in common, job by job; see ``admit_alike.lua``.

    ``None`` if the id of the first run is not where it is expected.
    """
    run, whose = first.run, sized(first.run.tenant)
    kinds: list[tuple[object, ...]] = []
    for effect in first.transition.effects:
        if not isinstance(effect, DispatchJob):
            continue
        job = effect.job
        # The record of ``part_jobs.lua``, around the number that the script gives the job.
        rest: tuple[object, ...] = (0, "", job.topic, job.step_id, False, "", job.tenant)
        rest = (*rest, job.attempt_timeout_ms or 0, 0, False)
        suffix = job.id.removeprefix(run.id)
        step = to_json(run.steps[job.step_id]).split(run.id)
        # With its id in the place of its input: it is the third one in the text.
        work = to_json(replace(job, input=run.id)).split(run.id)
        if len(step) != 2 or len(work) != 4 or not work[2].endswith('"input":"'):  # noqa: PLR2004
            return None
        work[2], work[3] = work[2].removesuffix('"'), work[3].removeprefix('"')
        kinds.append(
            (
                suffix,
                job.step_id,
                job.topic,
                sized(job.topic) + whose,
                _raw(_JOB_BEGINS),
                _raw(_pack(rest)[1:]),
                step,
                work,
            )
        )
    return kinds


def _head(text: str) -> bytes:
    """What MessagePack writes before the bytes of a text."""
    return _pack(text)[: -len(text.encode())] if text else _pack(text)


def _raw(value: bytes) -> msgspec.Raw:
    """Bytes as a text of MessagePack: Lua does not tell them apart."""
    size = len(value)
    head = b"\xd9%c" % size if size < 256 else b"\xda" + size.to_bytes(2, "big")  # noqa: PLR2004
    return msgspec.Raw(head + value)


_JOB_BEGINS: Final = bytes([0x90 + 14]) + _pack(("ready", 0, 0))[1:]
"""The record of a new job, a list of 14 values, up to its number."""
