"""Log lines: one JSON object per line for programs, or one readable line per event for people.

    {"ts": "2026-11-15T19:00:00.123Z", "level": "WARN", "event": "lock_release_failed", …fields}

An event's name is the record's message (see ``services.log``), with its fields in ``extra``. Lines
of other libraries have their text as ``event`` and their name as ``logger``.

``raise_open_files_limit`` is here too, for the processes that log: servers and workers.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

from stanchion.cli.text import cell, printable

_LEVELS = {"WARNING": "WARN"}
_OURS = "stanchion"


def log_to(stream: TextIO, *, level: str, format: str) -> None:  # noqa: A002 - the option's name
    """Send every log line of this process there. ``auto``: text on a terminal, else JSON."""
    is_text = stream.isatty() if format == "auto" else format == "text"
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextLines() if is_text else JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Other libraries log too much at "info".
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger(_OURS).setLevel(level.upper())
    logging.captureWarnings(capture=True)


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files to the hard limit.

    The usual soft limit of 1,024 is for programs that call ``select``. Each connection is a file.
    """
    try:
        import resource  # noqa: PLC0415 - not on every platform
    except ModuleNotFoundError:
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems refuse the hard limit that they report: then the old one stays.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class JsonLines(logging.Formatter):
    """One object per line. A field whose name is taken gets an underscore."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": _time(record),
            "level": _LEVELS.get(record.levelname, record.levelname),
            "event": record.getMessage(),
        }
        if not _is_ours(record):
            line["logger"] = record.name
        for name, value in _fields(record).items():
            line[name if name not in line else f"{name}_"] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """``19:00:00.123 WARN  lock_release_failed  lease=run/7 error="no answer"``."""

    def format(self, record: logging.LogRecord) -> str:
        level = _LEVELS.get(record.levelname, record.levelname)
        event = printable(record.getMessage())
        name = "" if _is_ours(record) else f"{record.name}: "
        fields = "".join(f" {key}={_value(value)}" for key, value in _fields(record).items())
        text = f"{_time(record)[11:23]} {level:5} {name}{event}{' ' if fields else ''}{fields}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name == _OURS or record.name.startswith(_OURS + ".")


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


def _value(value: object) -> str:
    text = cell(value) if isinstance(value, str | int | float | None) else printable(str(value))
    return f'"{text}"' if " " in text else text
