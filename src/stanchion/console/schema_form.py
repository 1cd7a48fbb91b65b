"""Forms from a JSON Schema: fields to fill in, and the posted form back as JSON.

A string, number, integer, boolean, choice, list of scalars and an object of these, one level deep,
get fields of their own; everything else is a box for JSON. The server still checks the value
against the schema: ``parse_form`` finds only what cannot be read at all, and ``faults_by_field``
puts the server's faults beside the fields that they are about.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec
from markupsafe import Markup

from stanchion.console.text import visible
from stanchion.console.typed import WronglyTyped, typed_integer, typed_json, typed_number
from stanchion.core.faults import Fault
from stanchion.core.json_value import JsonObject, JsonValue

FieldKind: TypeAlias = Literal[
    "text", "long_text", "integer", "number", "boolean", "choice", "list", "json", "group"
]
PREFIX: Final = "value"
"""The name of the whole value in a form; a member's name adds a dot and its own."""
FIELDS_MAX: Final = 100
_SHORT_TEXT: Final = 200
_LISTED: Final = frozenset({"string", "integer", "number"})
_COMPOSED: Final = frozenset({"$ref", "anyOf", "oneOf", "allOf", "not", "if", "patternProperties"})


class FormField(msgspec.Struct, frozen=True, kw_only=True):
    """One input of a form, or a group of them."""

    name: str
    """Of the input: unique within its form."""
    path: tuple[str, ...]
    """Where its value belongs."""
    label: str
    kind: FieldKind
    is_required: bool = False
    is_nullable: bool = False
    description: str = ""
    default: JsonValue | msgspec.UnsetType = msgspec.UNSET
    choices: tuple[JsonValue, ...] = ()
    item_type: str = "string"
    """Of a list: the type of its entries."""
    schema: JsonObject = {}
    """For the bounds."""
    fields: tuple[FormField, ...] = ()


# ── A schema's fields ────────────────────────────────────────────────────────────────────────────


def form_fields(schema: JsonObject | None, prefix: str = PREFIX) -> tuple[FormField, ...]:
    """The fields for a value of this schema; one box for JSON where it describes no members."""
    whole = FormField(
        name=prefix,
        path=(),
        label=f"{prefix.capitalize()} (JSON)",
        kind="json",
        is_required=True,
        description=_text((schema or {}).get("description")),
        default=(schema or {}).get("default", {}),
    )
    if schema is None or not 0 < len(_properties(schema)) <= FIELDS_MAX:
        return (whole,)
    found = _members(schema, prefix, (), is_top=True)
    inputs = [each.name for field in found for each in (*field.fields, field)]
    # The member "a.b" would have the name of the member "b" of "a".
    return found if len(set(inputs)) == len(inputs) else (whole,)


def _properties(schema: JsonObject) -> JsonObject:
    """The members that an object of this schema may have; none if it describes them otherwise."""
    found = schema.get("properties")
    if schema.get("type", "object") != "object" or _COMPOSED & schema.keys():
        return {}
    return found if isinstance(found, dict) else {}


def _members(
    schema: JsonObject, prefix: str, path: tuple[str, ...], *, is_top: bool
) -> tuple[FormField, ...]:
    required = schema.get("required")
    named = frozenset(required) if isinstance(required, list) else frozenset()
    return tuple(
        _field(member, prefix, (*path, name), is_required=name in named, is_top=is_top)
        for name, member in _properties(schema).items()
    )


def _field(
    schema: JsonValue, prefix: str, path: tuple[str, ...], *, is_required: bool, is_top: bool
) -> FormField:
    found: JsonObject = schema if isinstance(schema, dict) else {}
    kind, is_nullable = _kind(found, is_top=is_top)
    name = f"{prefix}.{path[-1]}"
    items = found.get("items")
    item_type = items.get("type") if isinstance(items, dict) else None
    return FormField(
        name=name,
        path=path,
        label=_text(found.get("title")) or path[-1],
        kind=kind,
        is_required=is_required,
        is_nullable=is_nullable,
        description=_text(found.get("description")),
        default=found.get("default", msgspec.UNSET),
        choices=tuple(_choices(found)),
        item_type=_text(item_type) or "string",
        schema=found,
        fields=_members(found, name, path, is_top=False) if kind == "group" else (),
    )


def _kind(schema: JsonObject, *, is_top: bool) -> tuple[FieldKind, bool]:
    if _COMPOSED & schema.keys():
        return "json", False
    if "const" in schema or _choices(schema):
        return "choice", False
    named = schema.get("type")
    types = [each for each in named if each != "null"] if isinstance(named, list) else [named]
    is_nullable = isinstance(named, list) and "null" in named
    if len(types) != 1:
        return "json", False
    match types[0]:
        case "string":
            length = schema.get("maxLength")
            is_short = "format" in schema or (isinstance(length, int) and length <= _SHORT_TEXT)
            return ("text" if is_short else "long_text"), is_nullable
        case "integer" | "number" | "boolean" as kind:
            return kind, is_nullable
        case "array" if _is_list(schema.get("items")):
            return "list", is_nullable
        case "object" if is_top and _properties(schema) and not is_nullable:
            return "group", False
        case _:
            return "json", False


def _is_list(items: JsonValue) -> bool:
    return isinstance(items, dict) and items.get("type") in _LISTED and not _COMPOSED & items.keys()


def _choices(schema: JsonObject) -> list[JsonValue]:
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return found if isinstance(found, list) else []


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else ""


# ── A posted form as JSON ────────────────────────────────────────────────────────────────────────


class _Absent:
    """The member is left out."""


_ABSENT: Final = _Absent()


def parse_form(
    fields: Sequence[FormField], posted: Mapping[str, Sequence[str]]
) -> tuple[JsonValue, dict[str, str]]:
    """The value, and what is wrong by the name of a field. With faults the value is incomplete."""
    faults: dict[str, str] = {}
    if len(fields) == 1 and not fields[0].path:
        value = _read_one(fields[0], posted, faults)
        return ({} if isinstance(value, _Absent) else value), faults
    return _read_all(fields, posted, faults), faults


def _read_all(
    fields: Sequence[FormField], posted: Mapping[str, Sequence[str]], faults: dict[str, str]
) -> JsonObject:
    found: JsonObject = {}
    for field in fields:
        value = _read_one(field, posted, faults)
        if not isinstance(value, _Absent):
            found[field.path[-1]] = value
    return found


def _read_one(
    field: FormField, posted: Mapping[str, Sequence[str]], faults: dict[str, str]
) -> JsonValue | _Absent:
    if field.kind == "group":
        inner: dict[str, str] = {}
        members = _read_all(field.fields, posted, inner)
        is_left_out = not field.is_required and not any(
            "".join(posted.get(each.name, ())).strip() for each in field.fields
        )
        if is_left_out:
            return _ABSENT
        faults.update(inner)
        return members
    texts = posted.get(field.name, ())
    text = texts[-1].replace("\r\n", "\n") if texts else ""
    try:
        return _read(field, text)
    except WronglyTyped as error:
        faults[field.name] = str(error)
        return _ABSENT


def _read(field: FormField, text: str) -> JsonValue | _Absent:
    if field.kind == "boolean" and field.is_required and not field.is_nullable:
        return text == "true"
    if not text.strip():
        return _empty(field, text)
    match field.kind:
        case "text" | "long_text":
            return text
        case "integer" | "number" as kind:
            return _number(text.strip(), kind)
        case "boolean":
            return text == "true"
        case "choice":
            return _chosen(field, text)
        case "list":
            return _list(field, text)
        case "json":
            return typed_json(text)
        case "group":
            return _ABSENT  # read by its members


def _empty(field: FormField, text: str) -> JsonValue | _Absent:
    """What an empty input means: a text may be empty, everything else is absent."""
    if field.is_required and field.is_nullable:
        return None
    if not field.is_required:
        return text if text and field.kind in ("text", "long_text") else _ABSENT
    if field.kind in ("text", "long_text"):
        return text
    if field.kind == "list":
        return []
    raise WronglyTyped("must be filled in")


def _number(text: str, kind: str) -> JsonValue:
    return typed_integer(text) if kind == "integer" else typed_number(text)


def _chosen(field: FormField, text: str) -> JsonValue:
    for number, choice in enumerate(field.choices):
        if text == str(number):
            return choice
    raise WronglyTyped("must be one of the choices")


def _list(field: FormField, text: str) -> JsonValue:
    lines = [line for line in text.split("\n") if line.strip()]
    found: list[JsonValue] = []
    if field.item_type == "string":
        found.extend(lines)
        return found
    for number, line in enumerate(lines, 1):
        try:
            found.append(_number(line.strip(), field.item_type))
        except WronglyTyped as error:
            raise WronglyTyped(f"line {number}: {error}") from None
    return found


def faults_by_field(
    fields: Sequence[FormField], faults: Iterable[Fault], root: str = ""
) -> tuple[dict[str, str], list[str]]:
    """The server's faults by the name of their field, and those that belong to none.

    ``root`` is what the paths of the faults begin with: ``input`` for ``input.question``.
    """
    placed: dict[str, str] = {}
    rest: list[str] = []
    flat = [each for field in fields for each in (*field.fields, field)]
    for fault in faults:
        path = fault.path.removeprefix(root).removeprefix(".") if root else fault.path
        for field in flat:
            own = ".".join(field.path)
            if path == own or path.startswith((f"{own}.", f"{own}[")) or not field.path:
                inner = path.removeprefix(own).removeprefix(".")
                words = f"{inner}: {fault.message}" if inner else fault.message
                placed[field.name] = "; ".join(filter(None, (placed.get(field.name), words)))
                break
        else:
            rest.append(f"{fault.path}: {fault.message}")
    return placed, rest


# ── A form as HTML ───────────────────────────────────────────────────────────────────────────────


def values_of(fields: Sequence[FormField], value: JsonValue) -> dict[str, list[str]]:
    """What the inputs show for a value, in the form in which a browser would post it."""
    shown: dict[str, list[str]] = {}
    for field in fields:
        found = value if not field.path else _UNSET
        if field.path and isinstance(value, dict):
            found = value.get(field.path[-1], _UNSET)
        if field.kind == "group":
            shown.update(values_of(field.fields, found))
        elif found is not _UNSET:
            shown[field.name] = [_written(field, found)]
    return shown


_UNSET: Final[Any] = msgspec.UNSET


def _written(field: FormField, value: JsonValue) -> str:
    match field.kind:
        case "choice":
            found = [str(n) for n, each in enumerate(field.choices) if each == value]
            return found[0] if found else ""
        case "list" if isinstance(value, list):
            return "\n".join(each if isinstance(each, str) else json.dumps(each) for each in value)
        case "json":
            return json.dumps(value, indent=2, ensure_ascii=False)
        case _ if value is None:
            return ""
        case _:
            return value if isinstance(value, str) else json.dumps(value)


def form_html(
    fields: Sequence[FormField],
    posted: Mapping[str, Sequence[str]] | None = None,
    faults: Mapping[str, str] | None = None,
    *,
    scope: str = "form",
) -> Markup:
    """The fields as HTML, with what was typed and what was wrong with it.

    ``scope`` begins the ids of its elements: it tells two forms of one page apart.
    """
    shown = {} if posted is None else posted
    drawn = [
        _group(field, shown, faults or {}, scope, is_fresh=posted is None)
        if field.kind == "group"
        else _input(field, shown, faults or {}, scope, is_fresh=posted is None)
        for field in fields
    ]
    return Markup("\n").join(drawn)


def _group(
    field: FormField,
    posted: Mapping[str, Sequence[str]],
    faults: Mapping[str, str],
    scope: str,
    *,
    is_fresh: bool,
) -> Markup:
    inner = [_input(each, posted, faults, scope, is_fresh=is_fresh) for each in field.fields]
    hint = Markup('<p class="hint">{}</p>').format(visible(field.description))
    return Markup('<fieldset class="sgroup"><legend>{}{}</legend>{}{}{}</fieldset>').format(
        visible(field.label),
        "" if field.is_required else Markup(' <span class="optional">optional</span>'),
        hint if field.description else "",
        _fault(faults.get(field.name), f"{scope}-{field.name}-fault"),
        Markup().join(inner),
    )


def _input(
    field: FormField,
    posted: Mapping[str, Sequence[str]],
    faults: Mapping[str, str],
    scope: str,
    *,
    is_fresh: bool,
) -> Markup:
    texts = posted.get(field.name, ())
    text = texts[-1] if texts else ""
    if is_fresh and field.default is not msgspec.UNSET:
        text = _written(field, field.default)
    fault, place = faults.get(field.name), _id(scope, field)
    hints = [field.description, *_bounds(field)]
    hint = "; ".join(visible(each) for each in hints if each)
    about = " ".join(
        name for name, is_there in ((f"{place}-hint", hint), (f"{place}-fault", fault)) if is_there
    )
    attributes = Markup(' id="{}" name="{}"').format(place, field.name)
    if about:
        attributes += Markup(' aria-describedby="{}"').format(about)
    if fault:
        attributes += Markup(' aria-invalid="true"')
    label = Markup('<label for="{}">{}{}</label>').format(
        place,
        visible(field.label),
        "" if field.is_required else Markup(' <span class="optional">optional</span>'),
    )
    return Markup('<div class="sfield f-{}">{}{}{}{}</div>').format(
        field.kind.replace("_", "-"),
        label,
        _control(field, text, attributes),
        Markup('<p class="hint" id="{}-hint">{}</p>').format(place, hint) if hint else "",
        _fault(fault, f"{place}-fault"),
    )


def _id(scope: str, field: FormField) -> str:
    """An id without spaces, which a list of ids is separated by."""
    return "-".join(f"{scope}-{field.name}".split())


def _control(field: FormField, text: str, attributes: Markup) -> Markup:
    match field.kind:
        case "text" | "integer" | "number":
            return Markup("<input{}{} value={}>").format(
                attributes, _kind_attributes(field), Markup('"{}"').format(text)
            )
        case "boolean" if field.is_required and not field.is_nullable:
            checked = Markup(" checked") if text == "true" else ""
            return Markup('<input type="checkbox" value="true"{}{}>').format(attributes, checked)
        case "boolean":
            return _select(attributes, [("true", "yes"), ("false", "no")], text, has_none=True)
        case "choice":
            options = [(str(n), _choice_word(each)) for n, each in enumerate(field.choices)]
            return _select(attributes, options, text, has_none=not field.is_required or not text)
        case _:
            # A browser drops one line feed after the tag.
            rows = {"long_text": 2, "list": 3}.get(field.kind, 6)
            code = Markup(' class="code" spellcheck="false"') if field.kind == "json" else ""
            return Markup('<textarea rows="{}"{}{}{}>\n{}</textarea>').format(
                rows, attributes, code, _must(field), text
            )


def _kind_attributes(field: FormField) -> Markup:
    # Not type="number": a browser empties such an input when it shows a text that is no number,
    # and what was typed would be lost.
    keyboards = {"integer": "numeric", "number": "decimal"}
    keyboard = keyboards.get(field.kind)
    shown = Markup(' inputmode="{}"').format(keyboard) if keyboard else Markup()
    return Markup(' type="text" autocomplete="off"') + shown + _must(field)


def _must(field: FormField) -> Markup:
    """``required``, unless an empty text is a value of the field."""
    if not field.is_required or field.is_nullable:
        return Markup()
    is_text = field.kind in ("text", "long_text")
    shortest = field.schema.get("minLength" if is_text else "minItems", 0)
    may_be_empty = field.kind in ("text", "long_text", "list")
    is_bound = isinstance(shortest, int) and shortest > 0
    return Markup() if may_be_empty and not is_bound else Markup(" required")


def _select(
    attributes: Markup, options: Sequence[tuple[str, str]], text: str, *, has_none: bool
) -> Markup:
    drawn = [Markup('<option value="">–</option>')] if has_none else []
    for value, word in options:
        chosen = Markup(" selected") if value == text else ""
        drawn.append(
            Markup('<option value="{}"{}>{}</option>').format(value, chosen, visible(word))
        )
    return Markup("<select{}>{}</select>").format(attributes, Markup().join(drawn))


def _choice_word(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _fault(fault: str | None, place: str) -> Markup:
    if not fault:
        return Markup()
    return Markup('<p class="fault" id="{}">{}</p>').format(place, visible(fault))


_BOUNDS: Final[Mapping[str, str]] = {
    "minimum": "at least {}",
    "maximum": "at most {}",
    "exclusiveMinimum": "more than {}",
    "exclusiveMaximum": "less than {}",
    "multipleOf": "a multiple of {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} lines",
    "maxItems": "at most {} lines",
    "pattern": "matches {}",
    "format": "a {}",
}


def _bounds(field: FormField) -> list[str]:
    """The bounds of a field in words."""
    if field.kind in ("json", "choice", "boolean"):
        return ["JSON"] if field.kind == "json" and field.path else []
    words = ["one entry a line"] if field.kind == "list" else []
    return words + [
        phrase.format(bound)
        for name, phrase in _BOUNDS.items()
        if isinstance(bound := field.schema.get(name), int | float | str)
        and not isinstance(bound, bool)
        and not (name == "minLength" and bound == 1)
    ]
