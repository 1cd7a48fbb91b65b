"""Write schema/workflow.schema.json, the published JSON Schema of workflow files.

Run it after a change of ``stanchion.core.workflow_file.members``; a test compares the two.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stanchion.core.workflow_file import workflow_json_schema

__all__ = ["SCHEMA_FILE", "schema_text"]

SCHEMA_FILE = Path(__file__).parent.parent / "schema" / "workflow.schema.json"


def schema_text() -> str:
    """The file as it must be."""
    return json.dumps(workflow_json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.parent.mkdir(exist_ok=True)
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
    sys.stdout.write(f"wrote {SCHEMA_FILE.name}\n")
