"""What a server is told, and what it answers when it was told wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from stanchion.config import (
    OPTIONS,
    Config,
    Option,
    config_file,
    is_loopback,
    load,
)
from stanchion.services.engine import Terms

HOME = {"XDG_DATA_HOME": "/data"}
KEY = "sk_admin_0123456789abcdef"


def loaded(
    flags: dict[str, object] | None = None,
    environ: dict[str, str] | None = None,
    file: Path | None = None,
) -> Config:
    config = load(flags or {}, HOME | (environ or {}), file)
    assert isinstance(config, Config), config
    return config


def faults(
    flags: dict[str, object] | None = None,
    environ: dict[str, str] | None = None,
    file: Path | None = None,
) -> list[str]:
    found = load(flags or {}, HOME | (environ or {}), file)
    assert isinstance(found, tuple), found
    return [str(fault) for fault in found]


def toml(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "stanchion.toml"
    file.write_text(text, encoding="utf-8")
    return file


# ── Who wins ─────────────────────────────────────────────────────────────────────────────────────


def test_without_a_word_it_is_sqlite_on_loopback() -> None:
    config = loaded()
    assert (config.host, config.port) == ("127.0.0.1", 8420)
    assert config.store_url == "sqlite:/data/stanchion/stanchion.db"
    assert (config.locks_url, config.bus_url) == ("memory:", "local:")
    assert (config.run_lease_ttl_s, config.job_lease_ttl_s) == (30.0, 60.0)


def test_a_flag_wins_over_the_environment_that_over_the_file_that_over_the_default(
    tmp_path: Path,
) -> None:
    file = toml(tmp_path, "port = 1\nmax_deliveries = 1\ndrain_s = 1\n")
    environ = {"STANCHION_PORT": "2", "STANCHION_MAX_DELIVERIES": "2"}
    config = loaded({"port": "3"}, environ, file)
    assert (config.port, config.max_deliveries, config.drain_s) == (3, 2, 1.0)
    assert config.poison_failures_max == 5
    assert config.tenant_work_percent == 25


def test_every_setting_is_an_option() -> None:
    assert [option.name for option in OPTIONS] == list(Config.__struct_fields__)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_can_be_set_in_the_environment_and_in_the_file(
    option: Option, tmp_path: Path
) -> None:
    name = option.name
    value = EXAMPLES[name]
    text = str(value)
    rest = {} if name != "bus" else {"store": "redis://cache"}
    literal = f'"{value}"' if isinstance(value, str) else text.lower()
    by_environment = loaded(dict(rest), {f"STANCHION_{name.upper()}": text})
    by_file = loaded(dict(rest), file=toml(tmp_path, f"{name} = {literal}\n"))
    assert getattr(by_environment, name) == getattr(by_file, name) == value
    assert getattr(Config(), name) != value


EXAMPLES: dict[str, object] = {
    "host": "::1",
    "port": 0,
    "store": "memory:",
    "locks": "redis+sentinel://one,two/main",
    "bus": "nats://bell:4222",
    "data_dir": "/srv/stanchion",
    "namespace": "staging_2",
    "run_lease_ttl_s": 0.5,
    "job_lease_ttl_s": 3600,
    "admin_key": KEY,
    "drill_reports": "/srv/drills",
    "metrics_open": True,
    "metrics_port": 9464,
    "metrics_host": "::1",
    "idempotency_ttl_s": 1,
    "retention_s": 86_400,
    "audit_retention_s": 86_400,
    "max_deliveries": 1000,
    "poison_failures_max": 1,
    "tenant_work_percent": 100,
    "drain_s": 0,
    "log_level": "debug",
    "log_format": "json",
}


def test_locks_are_with_a_redis_store_unless_told_otherwise() -> None:
    flags: dict[str, object] = {"store": "redis+cluster://a:1,b:2", "bus": "nats://bell"}
    assert loaded(flags).locks_url == "redis+cluster://a:1,b:2"
    assert loaded(flags | {"locks": "redis://c"}).locks_url == "redis://c"
    assert loaded({"locks": "redis://c"}).locks_url == "redis://c"


def test_home_is_written_out_wherever_the_path_was_given(tmp_path: Path) -> None:
    config = loaded(file=toml(tmp_path, 'data_dir = "~/here"\n'))
    assert config.data_dir == str(Path.home() / "here")
    assert loaded(environ={"XDG_DATA_HOME": "relative"}).data_dir == str(
        Path.home() / ".local/share/stanchion"
    )


@pytest.mark.parametrize(
    "name", ["STANCHION_URL", "STANCHION_API_KEY", "STANCHION_TENANT", "STANCHION_TEST_SCALE"]
)
def test_variables_of_clients_and_of_tests_are_none_of_a_servers_business(name: str) -> None:
    assert loaded(environ={name: "x"}) == loaded()


# ── What is wrong, and where ─────────────────────────────────────────────────────────────────────

FLAG_FAULTS: list[tuple[dict[str, object], str]] = [
    ({"port": "eighty"}, "--port: should be a whole number from 0 to 65535"),
    ({"port": "65536"}, "--port: should be a whole number from 0 to 65535, not 65536"),
    ({"port": "-1"}, "--port: should be a whole number from 0 to 65535, not -1"),
    ({"port": "80.5"}, "--port: should be a whole number from 0 to 65535"),
    ({"port": "1_000"}, "--port: should be a whole number from 0 to 65535"),
    (
        {"run_lease_ttl_s": "nan"},
        "--run-lease-ttl-s: should be a number of seconds from 0.1 to 3600, not nan",
    ),
    (
        {"job_lease_ttl_s": "inf"},
        "--job-lease-ttl-s: should be a number of seconds from 0.1 to 3600, not inf",
    ),
    (
        {"run_lease_ttl_s": "0.09"},
        "--run-lease-ttl-s: should be a number of seconds from 0.1 to 3600, not 0.09",
    ),
    ({"max_deliveries": "0"}, "--max-deliveries: should be a whole number from 1 to 1000, not 0"),
    ({"host": "http://here"}, "--host: should be a host name or an IP address"),
    ({"host": ""}, "--host: is empty: give a value, or leave --host out"),
    ({"namespace": "a{b}"}, "--namespace: should be 1 to 64 letters, digits, '_' or '-'"),
    ({"log_level": "warn"}, "--log-level: should be debug, info, warning or error; did you mean"),
    ({"log_format": "xml"}, "--log-format: should be auto, json or text"),
    ({"store": "postgres://x"}, "--store: should be sqlite:PATH, redis://…, redis+cluster://…,"),
    ({"store": "sqlit:x"}, "did you mean"),
    ({"store": "sqlite:"}, "--store: names no file: write sqlite:PATH"),
    ({"store": "sqlite::memory:"}, "--store: sqlite has no store in memory: use memory:"),
    ({"store": "memory:x"}, "--store: should be sqlite:PATH"),
    ({"store": "redis:6379"}, "--store: names no host: write redis://HOST:PORT"),
    ({"store": "redis://"}, "--store: names no host: write redis://HOST:PORT"),
    ({"store": "redis+cluster://a,,b"}, "--store: names no host"),
    ({"store": "redis://[::1"}, "--store: names no host"),
    ({"locks": "sqlite:x"}, "--locks: a server keeps no leases in SQLite: leave --locks out"),
    ({"bus": "redis://x"}, "--bus: should be local: or nats://…"),
    ({"bus": "nats://"}, "--bus: names no host: write nats://HOST:PORT"),
    (
        {"store": "redis://x"},
        "--store: a Redis store needs a bus that reaches every replica: add --bus nats://HOST:4222",
    ),
    ({"store": "rediss://x", "bus": "local:"}, "--bus: a Redis store needs a bus"),
    (
        {"bus": "nats://x"},
        "--bus: one process alone uses 'sqlite', so a bus has no use: leave --bus out",
    ),
    ({"bus": "nats://x", "store": "memory:"}, "--bus: one process alone uses 'memory'"),
    (
        {"store": "redis://x", "bus": "nats://x", "locks": "memory:"},
        "--locks: replicas share a Redis store, so they must share their locks",
    ),
    (
        {"retention_s": "3600"},
        "before their idempotency keys end after 86400 s: make retention_s at least that long",
    ),
]


@pytest.mark.parametrize(("flags", "said"), FLAG_FAULTS, ids=[str(case[0]) for case in FLAG_FAULTS])
def test_a_wrong_flag_is_refused_with_its_place(flags: dict[str, object], said: str) -> None:
    [fault] = faults(flags)
    assert said in fault


ENVIRONMENT_FAULTS = [
    ("STANCHION_PROT", "1", "STANCHION_PROT: no such setting; did you mean 'STANCHION_PORT'?"),
    ("STANCHION_ELSE", "1", "STANCHION_ELSE: no such setting"),
    ("STANCHION_PORT", "", "STANCHION_PORT: should be a whole number from 0 to 65535"),
    (
        "STANCHION_STORE",
        "",
        "STANCHION_STORE: is empty: give a value, or leave STANCHION_STORE out",
    ),
    ("STANCHION_ADMIN_KEY", "", "STANCHION_ADMIN_KEY: is empty"),
    ("STANCHION_METRICS_OPEN", "perhaps", "STANCHION_METRICS_OPEN: should be true or false"),
    ("STANCHION_ADMIN_KEY", "short", "STANCHION_ADMIN_KEY: should be 16 to 255 visible ASCII"),
    ("STANCHION_ADMIN_KEY", KEY + " x", "STANCHION_ADMIN_KEY: should be 16 to 255 visible"),
    ("STANCHION_PORT", "tcp://10.0.0.1:8420", "give the pod 'enableServiceLinks: false'"),
    ("STANCHION_SERVICE_HOST", "10.0.0.1", "give the pod 'enableServiceLinks: false'"),
    ("STANCHION_PORT_8420_TCP_ADDR", "x", "give the pod 'enableServiceLinks: false'"),
]


@pytest.mark.parametrize(("name", "value", "said"), ENVIRONMENT_FAULTS)
def test_a_wrong_variable_is_refused_with_its_name(name: str, value: str, said: str) -> None:
    [fault] = faults(environ={name: value})
    assert fault.startswith(name)
    assert said in fault


# ── Secrets from files ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("admin_key", KEY),
        ("store", "redis://:pw@cache/0"),
        ("locks", "redis://:pw@locks/0"),
        ("bus", "nats://me:pw@bell:4222"),
    ],
)
def test_a_secret_can_come_from_a_file(name: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(value + "\n", encoding="utf-8")
    environ = {"STANCHION_STORE": "redis://cache/0", "STANCHION_BUS": "nats://bell:4222"}
    environ.pop(f"STANCHION_{name.upper()}", None)
    config = loaded(environ=environ | {f"STANCHION_{name.upper()}_FILE": str(file)})
    assert getattr(config, name) == value


def test_exactly_the_settings_that_may_hold_a_password_can_come_from_a_file() -> None:
    secret = {option.name for option in OPTIONS if option.is_secret}
    assert secret == {"admin_key", "store", "locks", "bus"}
    [fault] = faults(environ={"STANCHION_PORT_FILE": "/nowhere"})
    assert fault.startswith("STANCHION_PORT_FILE: no such setting")


def test_a_secret_given_twice_is_refused_with_both_names(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY, encoding="utf-8")
    [fault] = faults(environ={"STANCHION_ADMIN_KEY": KEY, "STANCHION_ADMIN_KEY_FILE": str(file)})
    assert fault == (
        "STANCHION_ADMIN_KEY_FILE: STANCHION_ADMIN_KEY is set too:"
        " set STANCHION_ADMIN_KEY or STANCHION_ADMIN_KEY_FILE"
    )


SECRET_FILES: list[tuple[bytes | None, str]] = [
    (None, "cannot be read: No such file or directory"),
    (b"", "is empty"),
    (b"\n", "is empty"),
    (b"\xff" * 20, "is not UTF-8 text"),
    (b"k" * 70_000, "has more than 65536 bytes"),
]


@pytest.mark.parametrize(("content", "said"), SECRET_FILES, ids=[each[1] for each in SECRET_FILES])
def test_a_file_that_is_no_secret_is_refused_with_its_path(
    content: bytes | None, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    [fault] = faults(environ={"STANCHION_ADMIN_KEY_FILE": str(file)})
    assert fault == f"STANCHION_ADMIN_KEY_FILE: the file {str(file)!r} {said}"


def test_a_wrong_value_in_a_file_is_refused_without_repeating_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("hunter2", encoding="utf-8")
    [fault] = faults(environ={"STANCHION_ADMIN_KEY_FILE": str(file)})
    assert fault.startswith("STANCHION_ADMIN_KEY_FILE: should be 16 to 255 visible ASCII")
    assert "hunter2" not in fault


FILE_FAULTS = [
    ("\nprot = 1\n", ":2: prot: no such setting; did you mean 'port'?"),
    ("# port\nport = true\n", ":2: port: should be a whole number"),
    ('port = "80"\n', ":1: port: should be a whole number from 0 to 65535"),
    ("port = 8.0\n", ":1: port: should be a whole number"),
    ("host = 1\n", ":1: host: should be text"),
    ("[server]\nport = 1\n", ":1: server: no such setting"),
    ('log_level = ["info"]\n', ":1: log_level: should be debug, info, warning or error"),
    ("port = \n", ": cannot be read: Invalid value (at line 1"),
    ("port = 1\nport = 2\n", ": cannot be read: Cannot overwrite a value"),
    ("retention_s = 5\n", ":1: retention_s: runs would be removed after 5 s"),
]


@pytest.mark.parametrize(("text", "said"), FILE_FAULTS, ids=[case[0] for case in FILE_FAULTS])
def test_a_wrong_file_is_refused_with_the_line(text: str, said: str, tmp_path: Path) -> None:
    file = toml(tmp_path, text)
    [fault] = faults(file=file)
    assert fault.startswith(f"{file}{said}"), fault


def test_bytes_that_are_no_text_are_a_fault_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "stanchion.toml"
    file.write_bytes(b'host = "\xff"')
    [fault] = faults(file=file)
    assert fault.startswith(f"{file}: cannot be read: ")


@pytest.mark.parametrize(
    "text",
    [f"port = {'9' * 5_000}", f"port = 0x{'f' * 5_000}", f"port = {'[' * 5_000}"],
    ids=["digits", "hexadecimal", "depth"],
)
def test_a_value_that_python_cannot_read_is_a_fault_of_the_file(text: str, tmp_path: Path) -> None:
    file = toml(tmp_path, text)
    [fault] = faults(file=file)
    assert fault.startswith((f"{file}: cannot be read: ", f"{file}:1: port: should be a whole"))
    assert len(fault) < 300


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    found = faults({"port": "x"}, {"STANCHION_HOST": ""}, toml(tmp_path, "prot = 1\n"))
    assert [fault.partition(": ")[0].rpartition("/")[2] for fault in found] == [
        "stanchion.toml:1",
        "STANCHION_HOST",
        "--port",
    ]


# ── The file to read ─────────────────────────────────────────────────────────────────────────────


def test_the_flag_names_the_file_before_the_variable_and_that_before_the_usual_one(
    tmp_path: Path,
) -> None:
    usual = toml(tmp_path, "")
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.touch()
    two.touch()
    environ = {"STANCHION_CONFIG": str(two)}
    assert config_file(str(one), environ, tmp_path) == one
    assert config_file(None, environ, tmp_path) == two
    assert config_file(None, {}, tmp_path) == usual
    assert config_file(None, {}, tmp_path / "elsewhere") is None


def test_a_file_that_was_named_and_is_not_there_is_a_fault(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.toml")
    for flag, environ, place in (
        (missing, {}, "--config"),
        (None, {"STANCHION_CONFIG": missing}, "STANCHION_CONFIG"),
    ):
        found = config_file(flag, environ, tmp_path)
        assert isinstance(found, tuple)
        assert str(found[0]) == f"{place}: there is no file {missing!r}"


# ── Secrets and hosts ────────────────────────────────────────────────────────────────────────────


def test_the_text_of_a_configuration_shows_no_key_and_no_password() -> None:
    config = loaded(
        {"store": "redis://user:p@ss@cache:6379/1", "bus": "nats://token@bell"},
        {"STANCHION_ADMIN_KEY": KEY},
    )
    for text in (repr(config), str(config), f"{config}"):
        assert "p@ss" not in text
        assert "token" not in text
        assert KEY not in text
        assert "redis://***@cache:6379/1" in text
    assert "admin_key=None" in repr(Config())


def test_a_wrong_value_that_may_be_a_secret_is_not_repeated() -> None:
    for environ in (
        {"STANCHION_ADMIN_KEY": "hunter2"},
        {"STANCHION_STORE": "hunter2"},
        {"STANCHION_PORT": "hunter2"},
        {"STANCHION_BUS": "natz://hunter2@bell"},
    ):
        assert all("hunter2" not in fault for fault in faults(environ=environ))


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("LOCALHOST", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("0.0.0.0", False),  # noqa: S104 - nothing listens there, that is the point
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("example.com", False),
        ("", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local


def test_an_engine_without_terms_has_those_of_a_server_without_options() -> None:
    config, terms = Config(), Terms()
    assert terms.run_lease_ttl_ms == config.run_lease_ttl_s * 1000
    assert terms.job_lease_ttl_ms == config.job_lease_ttl_s * 1000
    assert terms.retention_ms == config.retention_s * 1000
    assert terms.max_deliveries == config.max_deliveries
    assert terms.poison_failures_max == config.poison_failures_max
    assert terms.tenant_work.share == config.tenant_work_percent / 100
