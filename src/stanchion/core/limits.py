"""Limits: how large the things of the domain may be.

Limits of a notation or an engine stand with it (``expression``, ``schema_rules``,
``workflow_file``). The reference of workflow files lists all of them, and a test compares.

Every limit is checked where the data enters (a workflow file, a request, a worker's result), and
once more where the core multiplies data (for-each, templates).
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "APPROVAL_MESSAGE_CHARS_MAX",
    "ATTEMPTS_MAX",
    "BACKOFF_MS_MAX",
    "DELAY_S_MAX",
    "ERROR_MESSAGE_CHARS_MAX",
    "EVENT_WORK_MAX",
    "FILE_TOKENS_MAX",
    "FOR_EACH_INPUT_SIZE_MAX",
    "FOR_EACH_ITEMS_MAX",
    "FOR_EACH_OUTPUT_BYTES_MAX",
    "FOR_EACH_WORK_PER_ITEM",
    "ID_CHARS_MAX",
    "INPUT_BYTES_MAX",
    "JSON_DEPTH_MAX",
    "NEEDS_MAX",
    "PLAN_STEPS_MAX",
    "PLAN_TOKENS_MAX",
    "PROGRESS_BYTES_MAX",
    "RESULT_BYTES_MAX",
    "RUN_ITEMS_MAX",
    "RUN_OUTPUT_BYTES_MAX",
    "SUBWORKFLOW_DEPTH_MAX",
    "TIMEOUT_S_MAX",
    "TOPIC_CHARS_MAX",
    "WORKFLOW_FILE_BYTES_MAX",
    "WORKFLOW_STEPS_MAX",
]

WORKFLOW_FILE_BYTES_MAX: Final = 256 * 1024
WORKFLOW_STEPS_MAX: Final = 200
"""Steps in one workflow file."""
PLAN_STEPS_MAX: Final = 500
"""Steps of a run once every sub-workflow is unfolded."""
SUBWORKFLOW_DEPTH_MAX: Final = 5
NEEDS_MAX: Final = 100
FILE_TOKENS_MAX: Final = 6_000
"""Words, numbers and signs of all expressions of a file, and two more for each expression. To
compile one takes some 20 µs, so a file is read in a quarter of a second at most."""
PLAN_TOKENS_MAX: Final = 20_000
"""The same of all expressions of a run, once every sub-workflow is unfolded."""
JSON_DEPTH_MAX: Final = 64
ID_CHARS_MAX: Final = 64
TOPIC_CHARS_MAX: Final = 128
APPROVAL_MESSAGE_CHARS_MAX: Final = 2_000
ERROR_MESSAGE_CHARS_MAX: Final = 2_000

FOR_EACH_ITEMS_MAX: Final = 10_000
FOR_EACH_OUTPUT_BYTES_MAX: Final = 4 * 1024 * 1024
"""All items' outputs together: they become one list that other steps may read."""
FOR_EACH_INPUT_SIZE_MAX: Final = 16 * 1024 * 1024
"""All items' inputs together, as far as expressions make them: see ``cel.budget`` for the unit."""
FOR_EACH_WORK_PER_ITEM: Final = 100
"""What expressions in a for-each's input may work, times the items, if that is more than usual."""
RUN_ITEMS_MAX: Final = 20_000
"""Items of all for-each steps of a run together. What begins in one step of a run is written in one
step of the store, and everybody else waits for that."""
RUN_OUTPUT_BYTES_MAX: Final = 8 * 1024 * 1024
"""All steps' outputs of a run together: whoever loads the run or looks at it has them at once."""
EVENT_WORK_MAX: Final = 1_500_000
"""What all expressions that one event sets off may work together, in units of ``cel.budget``: a
third of a second at most. Nobody else is served meanwhile."""
INPUT_BYTES_MAX: Final = 256 * 1024
RESULT_BYTES_MAX: Final = 256 * 1024
PROGRESS_BYTES_MAX: Final = 4 * 1024
"""What a worker's handler may report with one renewal."""

ATTEMPTS_MAX: Final = 100
BACKOFF_MS_MAX: Final = 24 * 60 * 60 * 1000
DELAY_S_MAX: Final = 30 * 24 * 60 * 60
TIMEOUT_S_MAX: Final = 30 * 24 * 60 * 60
