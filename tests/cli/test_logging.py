"""Log lines, for programs and for people."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from stanchion.cli.logging import log_to
from stanchion.services.log import log_event


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("stanchion")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], _, _ = before
    root.setLevel(before[1])
    ours.setLevel(before[2])
    logging.captureWarnings(capture=False)


def said(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_a_program_reads_one_object_a_line() -> None:
    stream = io.StringIO()
    log_to(stream, level="info", format="auto")
    log_event(
        logging.WARNING, "lock_release_failed", lease="run/7", error="nobody\nanswers", tries=2
    )
    [line] = said(stream)
    event = json.loads(line)
    assert event.pop("ts").endswith("Z")
    assert event == {
        "level": "WARN",
        "event": "lock_release_failed",
        "lease": "run/7",
        "error": "nobody\nanswers",
        "tries": 2,
    }


def test_a_person_reads_one_line_an_event() -> None:
    stream = Terminal()
    log_to(stream, level="info", format="auto")
    log_event(logging.ERROR, "run_lock_fallback", run_id="07-01h", error="no\x1b[2J answer")
    [line] = said(stream)
    assert line[13:] == r'ERROR run_lock_fallback  run_id=07-01h error="no\u001b[2J answer"'


def test_a_format_that_was_asked_for_is_used_wherever_it_goes() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    log_to(terminal, level="info", format="json")
    log_event(logging.INFO, "one")
    log_to(pipe, level="info", format="text")
    log_event(logging.INFO, "two")
    assert json.loads(terminal.getvalue())["event"] == "one"
    assert pipe.getvalue().endswith("INFO  two\n")


def test_a_field_never_hides_what_the_line_says() -> None:
    stream = io.StringIO()
    log_to(stream, level="info", format="json")
    logging.getLogger("stanchion").info("real", extra={"fields": {"event": "fake", "level": 1}})
    event = json.loads(stream.getvalue())
    assert (event["event"], event["level"]) == ("real", "INFO")
    assert (event["event_"], event["level_"]) == ("fake", 1)


def test_others_are_heard_from_warnings_up_and_named() -> None:
    stream = io.StringIO()
    log_to(stream, level="debug", format="json")
    logging.getLogger("uvicorn").info("chatter")
    logging.getLogger("uvicorn").warning("trouble %d", 7)
    logging.getLogger("stanchion.worker").debug("detail")
    events = [json.loads(line) for line in said(stream)]
    assert [(event["event"], event.get("logger")) for event in events] == [
        ("trouble 7", "uvicorn"),
        ("detail", None),
    ]


def test_below_its_level_nothing_is_said() -> None:
    stream = io.StringIO()
    log_to(stream, level="error", format="json")
    log_event(logging.WARNING, "unheard")
    logging.getLogger("uvicorn").warning("unheard")
    assert said(stream) == []


def test_an_exception_stays_on_its_line() -> None:
    stream = io.StringIO()
    log_to(stream, level="info", format="json")
    try:
        int("wrong")
    except ValueError:
        logging.getLogger("stanchion").exception("broken")
    [line] = said(stream)
    assert "ValueError: invalid literal" in json.loads(line)["exception"]


def test_what_json_cannot_say_is_said_as_text() -> None:
    stream = io.StringIO()
    log_to(stream, level="info", format="json")
    logging.getLogger("stanchion").info("odd", extra={"fields": {"what": {1}, "lone": "\ud800"}})
    event = json.loads(stream.getvalue())
    assert (event["what"], event["lone"]) == ("{1}", "\ud800")
