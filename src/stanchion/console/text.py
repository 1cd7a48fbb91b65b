"""Text of the console: what came from workflows, workers and callers, made safe to show.

Everything is put into pages as text nodes or attribute values, escaped. Characters that a reader
cannot see, or that change the order of the others (U+202E), are replaced by a visible form, so that
a name looks like nothing but what it is.
"""

from __future__ import annotations

import re
from typing import Final

from markupsafe import Markup

_HIDDEN: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)
"""Characters that are invisible or change the direction of text. The joiners U+200C and U+200D are
not among them: words of several scripts, and emoji, need them."""
_HIDDEN_BUT_LINES: Final = re.compile(_HIDDEN.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def visible(text: str, *, has_lines: bool = False) -> str:
    """The text with every invisible character shown: ``␀`` for a control, ``⟨U+202E⟩`` for others.

    With ``has_lines``, line feeds and tabs are kept.
    """
    return (_HIDDEN_BUT_LINES if has_lines else _HIDDEN).sub(_shown, text)


def _shown(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:  # noqa: PLR2004 - the C0 controls, which have pictures in Unicode
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"  # noqa: PLR2004 - DEL, likewise


def foreign(text: str) -> Markup:
    """Text of others as an element that cannot change the direction of the text around it."""
    return Markup("<bdi>{}</bdi>").format(visible(text))


def exact(number: float) -> str:
    """A number as it is typed into a field: with all its digits, without ``.0``."""
    return str(int(number)) if float(number).is_integer() else repr(number)


def shortened(text: str, chars_max: int) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= chars_max else f"{text[: chars_max - 1]}…"


_MINUTE_MS: Final = 60_000
_HOUR_MS: Final = 60 * _MINUTE_MS
_DAY_MS: Final = 24 * _HOUR_MS


def duration(ms: float) -> str:
    """A length of time in one or two units: ``45 ms``, ``1.9 s``, ``3 min 5 s``, ``2 d 4 h``."""
    ms = max(0, ms)
    if ms < 1_000:  # noqa: PLR2004 - a second
        return f"{ms:.0f} ms"
    if ms < 10_000:  # noqa: PLR2004 - below ten seconds a tenth matters
        return f"{ms / 1_000:.1f} s"
    if ms < _MINUTE_MS:
        return f"{ms / 1_000:.0f} s"
    if ms < _HOUR_MS:
        return _two_units(int(ms), _MINUTE_MS, "min", 1_000, "s")
    if ms < _DAY_MS:
        return _two_units(int(ms), _HOUR_MS, "h", _MINUTE_MS, "min")
    return _two_units(int(ms), _DAY_MS, "d", _HOUR_MS, "h")


def _two_units(ms: int, large_ms: int, large: str, small_ms: int, small: str) -> str:
    whole, rest = divmod(ms, large_ms)
    return f"{whole} {large}" + (f" {rest // small_ms} {small}" if rest >= small_ms else "")
