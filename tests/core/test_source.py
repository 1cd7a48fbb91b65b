"""Source: both notations give the same plain trees, and nothing in a text can break the reader."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.faults import Fault, Findings
from stanchion.core.json_value import JsonValue
from stanchion.core.limits import JSON_DEPTH_MAX, WORKFLOW_FILE_BYTES_MAX
from stanchion.core.workflow_file.json_text import read_json
from stanchion.core.workflow_file.source import Format, Source, read_source
from stanchion.core.workflow_file.tree import NODES_MAX, Tree, Unreadable
from stanchion.core.workflow_file.yaml_text import read_yaml

LOADERS = [pytest.param(yaml.CSafeLoader, id="C"), pytest.param(yaml.SafeLoader, id="pure")]
FORMATS = ["yaml", "json"]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)


def read(text: bytes | str, notation: Format = "yaml") -> tuple[Source, tuple[Fault, ...]]:
    findings = Findings()
    source = read_source(text, notation, findings)
    return source, findings.faults(source.lines)


def tree_of(text: bytes | str, notation: Format = "yaml") -> JsonValue:
    source, faults = read(text, notation)
    assert faults == ()
    assert source.complete
    return source.tree


# ── Values ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("true", True),
        ("True", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("0", 0),
        ("-7", -7),
        ("+7", 7),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
        ("1.5", 1.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("12e3", 12_000.0),
        ("-1.5E-2", -0.015),
        ("yes", "yes"),
        ("on", "on"),
        ("No", "No"),
        ("y", "y"),
        ("nULL", "nULL"),
        ("010", "010"),
        ("0o17", "0o17"),
        ("0x1f", "0x1f"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-31", "2026-01-31"),
        ("=", "="),
        ("'5'", "5"),
        ('"true"', "true"),
        ("plain text", "plain text"),
    ],
)
@pytest.mark.parametrize("loader", LOADERS)
def test_yaml_words_stand_for_values_as_in_yaml_1_2(
    word: str, value: JsonValue, loader: type
) -> None:
    tree = Tree(Findings())
    read_yaml(f"a: {word}", tree, loader)

    assert tree.root == {"a": value}
    assert type(tree.root["a"]) is type(value)
    assert not tree.findings.noted


@given(values)
def test_json_is_read_as_the_standard_library_reads_it(value: JsonValue) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        tree = tree_of(text, "json") if text.strip() else None
        assert tree == value
        assert json.dumps(tree) == json.dumps(value)


@given(values)
def test_what_a_yaml_writer_writes_is_read_back(value: JsonValue) -> None:
    text = yaml.dump(value, Dumper=_Plain, sort_keys=False)

    tree = tree_of(text)

    assert tree == value
    assert json.dumps(tree) == json.dumps(value)


class _Plain(yaml.SafeDumper):
    """Quotes every text and never uses an alias, so that only the reader's rules are at work."""

    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


_Plain.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


def test_both_notations_know_the_line_of_everything() -> None:
    yaml_text = "a: 1\nb:\n  - x\n  - {c: 2}\n"
    json_text = '{"a": 1,\n"b":\n["x",\n{"c": 2}]}'

    assert read(yaml_text)[0].lines == {
        (): 1,
        ("a",): 1,
        ("b",): 2,
        ("b", 0): 3,
        ("b", 1): 4,
        ("b", 1, "c"): 4,
    }
    assert read(json_text, "json")[0].lines == read(yaml_text)[0].lines


def test_bytes_and_text_are_read_alike() -> None:
    assert tree_of("a: Grüße".encode()) == tree_of("a: Grüße") == {"a": "Grüße"}


def test_block_text_keeps_its_lines() -> None:
    assert tree_of("a: |\n  true\n  5\n") == {"a": "true\n5\n"}


# ── Repeated and strange keys ────────────────────────────────────────────────────────────────────


def test_of_a_repeated_key_the_first_value_stays_and_the_second_is_read_for_its_faults() -> None:
    source, faults = read("a: {x: 1}\na: {x: .nan, y: 2, y: 3}\nb: 4\n")

    assert source.complete
    assert source.tree == {"a": {"x": 1}, "b": 4}
    assert faults == (
        Fault("a", "repeated; first given in line 1", 2),
        Fault("a.x", "not a finite number", 2),
        Fault("a.y", "repeated; first given in line 2", 2),
    )


def test_a_key_that_is_no_text_is_taken_as_it_is_written() -> None:
    source, faults = read("1.50: a\ntrue: b\n~: c\n.nan: d\n!x e: f\n")

    assert source.tree == {"1.50": "a", "true": "b", "~": "c", ".nan": "d", "e": "f"}
    assert [fault.message for fault in faults] == [
        "a key must be text, not a number; put it in quotes",
        "a key must be text, not true; put it in quotes",
        "a key must be text, not null; put it in quotes",
        "not a finite number",
        'YAML tags are not allowed, and "!x" is one',
    ]


def test_the_key_named_by_a_number_and_by_its_text_is_one_key() -> None:
    _, faults = read('1: a\n"1": b\n')

    assert [fault.message for fault in faults] == [
        "a key must be text, not a number; put it in quotes",
        "repeated; first given in line 1",
    ]


# ── Limits ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("notation", FORMATS)
def test_nesting_is_allowed_up_to_its_limit(notation: Format) -> None:
    depth = JSON_DEPTH_MAX

    assert read("[" * depth + "]" * depth, notation)[1] == ()
    source, (fault,) = read("[" * (depth + 1) + "]" * (depth + 1), notation)
    assert fault == Fault("[0]" * depth, f"nested deeper than {depth} levels", 1)
    assert not source.complete


@pytest.mark.parametrize("notation", FORMATS)
def test_values_are_allowed_up_to_their_number(notation: Format) -> None:
    fits = "[" + "1," * (NODES_MAX - 2) + "1]"

    assert len(str(tree_of(fits, notation)).split(",")) == NODES_MAX - 1
    source, (fault,) = read("[1," + fits[1:], notation)
    assert fault == Fault("", f"more than {NODES_MAX} keys and values", 1)
    assert not source.complete


@pytest.mark.parametrize("notation", FORMATS)
def test_a_file_is_allowed_up_to_its_size(notation: Format) -> None:
    fits = '"' + "x" * (WORKFLOW_FILE_BYTES_MAX - 4) + 'ß"'
    too_large = f"{WORKFLOW_FILE_BYTES_MAX + 1} bytes long; at most {WORKFLOW_FILE_BYTES_MAX}"

    assert read(fits, notation)[1] == ()
    for text in (fits + " ", f"{fits} ".encode()):
        assert read(text, notation)[1] == (Fault("", f"{too_large} are allowed"),)


@pytest.mark.parametrize(
    "text",
    [
        "[" * WORKFLOW_FILE_BYTES_MAX,
        "{" * WORKFLOW_FILE_BYTES_MAX,
        '{"a":' * (WORKFLOW_FILE_BYTES_MAX // 5),
        "- " * (WORKFLOW_FILE_BYTES_MAX // 2),
        "? " * (WORKFLOW_FILE_BYTES_MAX // 2),
        "[&a " * (WORKFLOW_FILE_BYTES_MAX // 4),
        "9" * WORKFLOW_FILE_BYTES_MAX,
        "'" * (WORKFLOW_FILE_BYTES_MAX - 1),
        '"' + "\\u0041" * 40_000,
        "%TAG !a! b\n" * 20_000,
        "[" + "*a," * 80_000,
        "\n" * (WORKFLOW_FILE_BYTES_MAX - 1) + "%",
        "#" * WORKFLOW_FILE_BYTES_MAX,
        "a: " * (WORKFLOW_FILE_BYTES_MAX // 3),
        "\t" * WORKFLOW_FILE_BYTES_MAX,
    ],
    ids=lambda text: text[:6],
)
@pytest.mark.parametrize("notation", FORMATS)
def test_a_hostile_text_is_refused_at_once(text: str, notation: Format) -> None:
    _, faults = read(text, notation)

    assert faults


def test_a_billion_laughs_do_not_unfold() -> None:
    levels = "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9))

    source, faults = read("a0: &a0 [lol]\n" + levels)

    assert len(json.dumps(source.tree)) < 1_000
    assert len(faults) == 10 + 81


# ── Text that is none ────────────────────────────────────────────────────────────────────────────


BYTE_ORDER_MARK = Fault("", "begins with a byte order mark; save it as UTF-8 without one", 1)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"a: \xff", Fault("", "not UTF-8: byte 0xff at offset 3", 1)),
        (b"a: 1\nb: \xc3", Fault("", "not UTF-8: byte 0xc3 at offset 8", 2)),
        (
            b"\xef\xbb\xbf{}",
            Fault("", "begins with a byte order mark; save it as UTF-8 without one", 1),
        ),
        ("\ufeff{}", Fault("", "begins with a byte order mark; save it as UTF-8 without one", 1)),
        ("", Fault("", "the file is empty")),
        (" \n\t", Fault("", "the file is empty")),
    ],
)
@pytest.mark.parametrize("notation", FORMATS)
def test_what_is_no_text_is_refused_in_both_notations(
    text: bytes | str, fault: Fault, notation: Format
) -> None:
    assert read(text, notation)[1] == (fault,)


@pytest.mark.parametrize("char", "\x00\x08\x0b\x0c\x0e\x1b\x7f\x84\x86\x9f\ufeff\ufffe\ud800")
def test_yaml_refuses_characters_that_do_not_show(char: str) -> None:
    _, faults = read(f"a: 1\nb: x{char}y\n")

    code = f"U+{ord(char):04X}"
    assert faults == (Fault("", f"contains the character {code}, which YAML does not allow", 2),)


def test_json_refuses_half_a_character_pair_wherever_it_is() -> None:
    halves = [r'{"a": "\ud800"}', r'{"\udc00": 1}', '{"a": "\ud800"}', r'{"a": "\ud800A"}']
    wrong = "contains half of a surrogate pair, which is no character"

    assert [[fault.message for fault in read(text, "json")[1]] for text in halves] == [[wrong]] * 4
    assert tree_of(r'"\ud83d\ude00"', "json") == "😀"


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("escape", [r"\U00110000", r"\UFFFFFFFF", r"\ud800", r"\q", r"\x4"])
def test_a_yaml_escape_that_is_no_character_is_refused(escape: str, loader: type) -> None:
    tree = Tree(Findings())
    reasons: list[str] = []
    try:
        read_yaml(f'a: "{escape}"', tree, loader)
    except Unreadable as stop:
        reasons = [stop.reason]
    reasons += [fault.message for fault in tree.findings.faults()]

    assert len(reasons) == 1
    assert reasons[0].startswith(("not YAML: ", "contains half of a surrogate pair"))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_tab_is_named_by_both_parsers(loader: type) -> None:
    with pytest.raises(Unreadable) as stop:
        read_yaml("a:\n\tb: 1\n", Tree(Findings()), loader)

    assert (stop.value.reason, stop.value.line) == ("a tab where YAML allows only spaces", 2)


def test_a_fault_beyond_the_last_line_break_we_know_is_still_a_fault() -> None:
    # The parser counts U+2028 as a line break too, and reports a line that does not exist here.
    _, (fault,) = read("a: 'x\u2028y\u2028z")

    assert fault.message == "not YAML: column 2: found unexpected end of stream"


def test_json_takes_nothing_from_the_standard_library_but_escapes() -> None:
    tree = Tree(Findings())
    read_json(r'{"a\t": "\"\\\/\b\f\n\r\té"}', tree)

    assert tree.root == {"a\t": '"\\/\b\f\n\r\té'}


@given(st.binary(max_size=60) | st.text(max_size=60), st.sampled_from(FORMATS))
def test_reading_never_raises(text: bytes | str, notation: Format) -> None:
    source, faults = read(text, notation)

    assert source.complete or faults


@given(st.text("{}[]\",:\\'&*!|>-?#%@ \n\tab01.~<", max_size=40))
def test_the_pure_parser_never_raises_and_agrees_where_both_read(text: str) -> None:
    trees = []
    for loader in (yaml.CSafeLoader, yaml.SafeLoader):
        tree = Tree(Findings())
        try:
            read_yaml(text, tree, loader)
        except Unreadable:
            return
        trees.append(json.dumps(tree.root))
    assert trees[0] == trees[1]
