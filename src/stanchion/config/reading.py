"""Reading: merges flags, environment, file and defaults, and reports every fault with its place."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import msgspec

from stanchion.config.addresses import is_nats, is_redis, wrong_url
from stanchion.config.options import FILE_SUFFIX, OPTIONS, PREFIX, Config, Option
from stanchion.core.faults import Fault, Near, listed, named

_BY_NAME: Final = {option.name: option for option in OPTIONS}
# Variables that clients read, and the one that names the file.
_NOT_OURS: Final = frozenset(
    PREFIX + name for name in ("URL", "API_KEY", "API_KEY_FILE", "TENANT", "CONFIG")
)
_SECRET_BYTES_MAX: Final = 64 * 1024
_OF_TESTS: Final = PREFIX + "TEST_"
# Kubernetes sets these in every pod beside a Service that is called "stanchion".
_SERVICE_LINK: Final = re.compile(r"STANCHION_(SERVICE_(HOST|PORT)(_.*)?|PORT_\d+_.*)")
_SERVICE_LINK_FIX: Final = (
    "Kubernetes sets it beside a Service called 'stanchion':"
    " give the pod 'enableServiceLinks: false'"
)


def config_file(
    flag: str | None, environ: Mapping[str, str], directory: Path
) -> Path | tuple[Fault, ...] | None:
    """The file to read: ``--config``, else STANCHION_CONFIG, else ./stanchion.toml if there is one.

    A file that was named and does not exist is a fault.
    """
    for place, name in (("--config", flag), ("STANCHION_CONFIG", environ.get("STANCHION_CONFIG"))):
        if name is not None:
            path = Path(name)
            return path if path.is_file() else (Fault(place, f"there is no file {name!r}"),)
    usual = directory / "stanchion.toml"
    return usual if usual.is_file() else None


def load(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None
) -> Config | tuple[Fault, ...]:
    """The configuration, or everything that is wrong with it.

    ``flags`` has what was given on the command line, by option name; ``None`` means not given.
    """
    reading = _Reading()
    if file is not None:
        reading.take_file(file)
    reading.take_environment(environ)
    reading.take_flags(flags)
    reading.take_data_dir(environ)
    if reading.faults:
        return tuple(reading.faults)
    # Each value fits its option; what remains is to check how they fit together.
    config = msgspec.convert(reading.values, Config)
    return tuple(_disagreements(config, reading.places)) or config


@dataclass(slots=True)
class _Reading:
    """Values, places and faults read so far. Later sources override earlier ones."""

    values: dict[str, object] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def take_file(self, file: Path) -> None:
        try:
            text = file.read_text(encoding="utf-8")
            document = tomllib.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            # Not only those of TOML: the parser leaves too long a number and too deep a list to
            # Python.
            reason = error.strerror if isinstance(error, OSError) else error
            self.faults.append(Fault(str(file), f"cannot be read: {reason}"))
            return
        for key, value in document.items():
            place = f"{file}:{_line_of(key, text)}: {key}"
            if key in _BY_NAME:
                self._take(_BY_NAME[key], value, place)
            else:
                hint = Near(key, _BY_NAME).hint()
                self.faults.append(Fault(place, f"no such setting{hint}"))

    def take_environment(self, environ: Mapping[str, str]) -> None:
        by_variable = {option.variable: option for option in OPTIONS}
        by_file = {option.file_variable: option for option in OPTIONS if option.is_secret}
        for variable in sorted(environ):
            if not variable.startswith(PREFIX) or variable in _NOT_OURS:
                continue
            if variable.startswith(_OF_TESTS):
                continue
            if variable in by_variable:
                self._take(by_variable[variable], environ[variable], variable, is_text=True)
            elif variable in by_file:
                self._take_secret(by_file[variable], environ)
            else:
                known = by_variable | by_file
                self.faults.append(Fault(variable, _unknown_variable(variable, known)))

    def _take_secret(self, option: Option, environ: Mapping[str, str]) -> None:
        value = secret_from(environ, option.variable)
        if isinstance(value, Fault):
            self.faults.append(value)
        elif value is not None:
            self._take(option, value, option.file_variable, is_text=True)

    def take_flags(self, flags: Mapping[str, object]) -> None:
        for name, value in flags.items():
            if value is not None:
                option = _BY_NAME[name]
                self._take(option, value, option.flag, is_text=isinstance(value, str))

    def take_data_dir(self, environ: Mapping[str, str]) -> None:
        """Set the data directory: the user's, unless another is configured. ``~`` is expanded."""
        home = environ.get("XDG_DATA_HOME", "")
        # By the XDG rule a relative path in this variable is ignored.
        usual = Path(home if home.startswith("/") else "~/.local/share", "stanchion")
        try:
            chosen = Path(str(self.values.get("data_dir", usual))).expanduser()
        except RuntimeError:
            place = self.places.get("data_dir", "--data-dir")
            self.faults.append(Fault(place, "this user has no home: give an absolute path"))
        else:
            self.values["data_dir"] = str(chosen)

    def _take(self, option: Option, value: object, place: str, *, is_text: bool = False) -> None:
        judged = _meant(option, value) if is_text else value
        wrong = _wrong(option, judged, place)
        if wrong is None:
            self.values[option.name] = judged
            self.places[option.name] = place
        else:
            self.faults.append(Fault(place, wrong))


def secret_from(environ: Mapping[str, str], variable: str) -> str | Fault | None:
    """The value of ``variable``, or the contents of the file that ``variable``_FILE names.

    Line breaks at the end of the file are not part of the value. A fault never contains the value.
    """
    file_variable = variable + FILE_SUFFIX
    path = environ.get(file_variable)
    if path is None:
        return environ.get(variable)
    if variable in environ:
        return Fault(file_variable, f"{variable} is set too: set {variable} or {file_variable}")
    try:
        with Path(path).open("rb") as file:
            content = file.read(_SECRET_BYTES_MAX + 1)
        value = content.decode().rstrip("\r\n")
    except OSError as error:
        return Fault(file_variable, f"the file {path!r} cannot be read: {error.strerror}")
    except ValueError:
        return Fault(file_variable, f"the file {path!r} is not UTF-8 text")
    if len(content) > _SECRET_BYTES_MAX:
        return Fault(file_variable, f"the file {path!r} has more than {_SECRET_BYTES_MAX} bytes")
    if not value:
        return Fault(file_variable, f"the file {path!r} is empty")
    return value


def _unknown_variable(variable: str, known: Mapping[str, Option]) -> str:
    if _SERVICE_LINK.fullmatch(variable):
        return f"no such setting. {_SERVICE_LINK_FIX}"
    return f"no such setting{Near(variable, known).hint()}"


def _meant(option: Option, value: object) -> object:
    """The text as a number or boolean, if the option is one; otherwise unchanged."""
    if option.kind == "switch" and isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.lower(), value)
    if not isinstance(value, str) or option.kind not in {"int", "seconds"}:
        return value
    try:
        return int(value) if re.fullmatch(r"-?[0-9]{1,18}", value) else float(value)
    except ValueError:
        return value


def _line_of(key: str, text: str) -> int:
    """The line of a top-level key, which ``tomllib`` does not report."""
    pattern = re.compile(rf"""\s*\[*\s*["']?{re.escape(key)}["']?\s*[=.\]]""")
    lines = enumerate(text.splitlines(), start=1)
    return next((number for number, line in lines if pattern.match(line)), 1)


# ── Checks ───────────────────────────────────────────────────────────────────────────────────────


def _wrong(option: Option, value: object, place: str) -> str | None:
    """The fault of one value, if any. Its text is repeated only where it cannot be a secret."""
    match option.kind:
        case "int" | "seconds":
            return _wrong_number(option, value)
        case "switch":
            return None if isinstance(value, bool) else "should be true or false"
        case "choice":
            if value in option.choices:
                return None
            hint = Near(value, option.choices).hint() if isinstance(value, str) else ""
            return f"should be {listed(option.choices)}{hint}"
        case "url" | "text":
            if not isinstance(value, str):
                return "should be text"
            if not value:
                return f"is empty: give a value, or leave {place.rpartition(' ')[2]} out"
            return wrong_url(option.name, value) if option.kind == "url" else _shape(option, value)


def _wrong_number(option: Option, value: object) -> str | None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    kind = "a whole number" if option.kind == "int" else "a number of seconds"
    if not (is_int or (option.kind == "seconds" and isinstance(value, float))):
        is_link = isinstance(value, str) and value.startswith("tcp://")
        hint = f". {_SERVICE_LINK_FIX}" if is_link else ""
        return f"should be {kind} from {option.least:g} to {option.most:.0f}{hint}"
    # Written as "not between", so that nan is a fault too.
    if not option.least <= cast("float", value) <= option.most:
        # Python refuses to write integers with thousands of digits.
        given = "" if isinstance(value, int) and abs(value) > _SHOWN_MAX else f", not {value}"
        return f"should be {kind} from {option.least:g} to {option.most:.0f}{given}"
    return None


_SHOWN_MAX: Final = 10**18


def _shape(option: Option, value: str) -> str | None:
    if re.fullmatch(option.pattern, value):
        return None
    return f"should be {option.form}"


def _disagreements(config: Config, places: Mapping[str, str]) -> Iterator[Fault]:
    """Faults of settings that do not fit together. The place is that of the setting to change."""

    def at(*names: str) -> str:
        return next((places[name] for name in names if name in places), "defaults")

    has_redis, has_nats = is_redis(config.store_url), is_nats(config.bus_url)
    if has_redis and not has_nats:
        yield Fault(
            at("bus", "store"),
            "a Redis store needs a bus that reaches every replica:"
            " add --bus nats://HOST:4222 (or STANCHION_BUS)",
        )
    if has_nats and not has_redis:
        yield Fault(
            at("bus"),
            f"one process alone uses {named(config.store_url.partition(':')[0])}, so a bus has"
            " no use: leave --bus out, or give --store redis://…",
        )
    if has_redis and config.locks_url == "memory:":
        yield Fault(
            at("locks"),
            "replicas share a Redis store, so they must share their locks:"
            " leave --locks out, or give --locks redis://…",
        )
    if config.retention_s < config.idempotency_ttl_s:
        yield Fault(
            at("retention_s", "idempotency_ttl_s"),
            f"runs would be removed after {config.retention_s:g} s, before their idempotency keys"
            f" end after {config.idempotency_ttl_s:g} s: make retention_s at least that long",
        )
