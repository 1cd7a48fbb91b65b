"""Limits on the size of workflows, runs and their data.

Limits of expressions, schemas and file formats are in ``expression``, ``schema_rules`` and
``workflow_file``. The workflow file reference lists all of them; a test compares the two.

Every limit is checked where the data enters (a workflow file, a request, a worker's result), and
once more where the core multiplies data (for-each, templates).
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "APPROVAL_MESSAGE_CHARS_MAX",
    "ATTEMPTS_MAX",
    "BACKOFF_MS_MAX",
    "BEGUN_BYTES_MAX",
    "DELAY_S_MAX",
    "DELIVERIES_MAX",
    "ERROR_MESSAGE_CHARS_MAX",
    "EVENT_INPUT_BYTES_MAX",
    "EVENT_WORK_MAX",
    "FILE_DATA_SCHEMAS_MAX",
    "FILE_TOKENS_MAX",
    "FOR_EACH_INPUT_SIZE_MAX",
    "FOR_EACH_ITEMS_MAX",
    "FOR_EACH_OUTPUT_BYTES_MAX",
    "FOR_EACH_PARALLEL_MAX",
    "FOR_EACH_WORK_PER_ITEM",
    "ID_CHARS_MAX",
    "INPUT_BYTES_MAX",
    "ITEM_FAILURES_MAX",
    "ITEM_OUTPUT_BYTES_MAX",
    "JSON_DEPTH_MAX",
    "LABELS_MAX",
    "LABEL_CHARS_MAX",
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
"""Steps of a run with all sub-workflows expanded."""
SUBWORKFLOW_DEPTH_MAX: Final = 5
NEEDS_MAX: Final = 100
FILE_TOKENS_MAX: Final = 6_000
"""Tokens of all expressions of a file, and two more for each expression. Compiling takes about
20 µs per token, so parsing a file takes at most a quarter of a second."""
FILE_DATA_SCHEMAS_MAX: Final = 20
"""Approvals of a file with a ``data_schema``: each is judged and compiled when the file is read."""
PLAN_TOKENS_MAX: Final = 20_000
"""Tokens of all expressions of a run, with all sub-workflows expanded."""
JSON_DEPTH_MAX: Final = 64
ID_CHARS_MAX: Final = 64
LABELS_MAX: Final = 16
"""Labels of a run."""
LABEL_CHARS_MAX: Final = 64
"""Characters of the name or the value of a label."""
TOPIC_CHARS_MAX: Final = 128
APPROVAL_MESSAGE_CHARS_MAX: Final = 2_000
ERROR_MESSAGE_CHARS_MAX: Final = 2_000

FOR_EACH_ITEMS_MAX: Final = 10_000
FOR_EACH_PARALLEL_MAX: Final = 1_000
"""Items of a for-each that are dispatched and not ended: the highest value of ``parallel``."""
ITEM_FAILURES_MAX: Final = 100
"""Failed items that a for-each step lists. All of them are found among its items."""
FOR_EACH_OUTPUT_BYTES_MAX: Final = 4 * 1024 * 1024
"""The outputs of all items together: they become one list that other steps may read."""
FOR_EACH_INPUT_SIZE_MAX: Final = 16 * 1024 * 1024
"""The inputs of all items together as far as expressions make them, in ``SIZE_MAX`` units."""
FOR_EACH_WORK_PER_ITEM: Final = 100
"""Work per item that the input expressions of a for-each may take, if that exceeds the default."""
RUN_ITEMS_MAX: Final = 20_000
"""Items of all for-each steps of a run together; an item with a workflow counts once for each of
its steps. Items that start together are written in one transaction, which blocks all other
writes."""
ITEM_OUTPUT_BYTES_MAX: Final = 1024 * 1024
"""The outputs of all steps of an item with a workflow together: loading the item loads all of
them."""
RUN_OUTPUT_BYTES_MAX: Final = 8 * 1024 * 1024
"""The outputs of all steps of a run together: loading a run loads all of them."""
EVENT_WORK_MAX: Final = 1_500_000
"""Work of all expressions that one event causes, in the units of ``EvaluationBudget``: at most a
third of a second, during which the event loop is blocked."""
EVENT_INPUT_BYTES_MAX: Final = 16 * 1024 * 1024
"""The inputs of all jobs and items that one event begins. Each has a copy of its own of what its
expressions select."""
BEGUN_BYTES_MAX: Final = 1024 * 1024
"""Inputs of jobs and items that one transition begins or stores, unless a single one is larger. A
transaction blocks all other writes: one with 16 MiB took 0.2 s. The others begin in transitions of
their own, by timers that are due at once."""
INPUT_BYTES_MAX: Final = 256 * 1024
RESULT_BYTES_MAX: Final = 256 * 1024
PROGRESS_BYTES_MAX: Final = 4 * 1024
"""The progress report that a worker's handler may send with one renewal."""

ATTEMPTS_MAX: Final = 100
DELIVERIES_MAX: Final = 100
"""The most deliveries of one attempt that a workflow may allow."""
BACKOFF_MS_MAX: Final = 24 * 60 * 60 * 1000
DELAY_S_MAX: Final = 30 * 24 * 60 * 60
TIMEOUT_S_MAX: Final = 30 * 24 * 60 * 60
