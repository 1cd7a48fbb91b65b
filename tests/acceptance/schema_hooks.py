"""For schemathesis: nobody waits long for an answer that would only come later.

A valid wait is made a short one. One that is not valid is left: it has to be refused.
"""

from __future__ import annotations

from typing import Any

import schemathesis

__all__: list[str] = []

_SHORT_S = 0.01
_LONGEST_S = 60


@schemathesis.hook
def map_query(context: object, query: Any) -> Any:  # noqa: ANN401 - whatever was made up
    del context
    return _shortened(query, "wait")


@schemathesis.hook
def map_body(context: object, body: Any) -> Any:  # noqa: ANN401 - whatever was made up
    del context
    return _shortened(body, "wait_s")


def _shortened(value: Any, name: str) -> Any:  # noqa: ANN401 - the same
    if not isinstance(value, dict) or name not in value:
        return value
    wait = value[name]
    is_number = isinstance(wait, int | float) and not isinstance(wait, bool)
    return {**value, name: _SHORT_S} if is_number and 0 <= wait <= _LONGEST_S else value
