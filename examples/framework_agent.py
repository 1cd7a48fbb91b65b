"""The research agent of agents.py, with an agent framework behind the same topics.

The framework (Pydantic AI here; any other fits in the same place) calls the model and its tools.
Stanchion decides when a step runs, how often it is retried and which worker may still write. So the
framework's own retries are off, and the workflow's `retry` is on.

The models are scripted, so this runs offline with fixed answers. To use a real model, replace the
`FunctionModel` with its name.

    pip install stanchion pydantic-ai-slim
    stanchion worker examples.framework_agent:app --url http://127.0.0.1:8420
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

# It is installed for `make soak` only, so mypy may not find it.
from pydantic_ai import (  # type: ignore[import-not-found, unused-ignore] # see above
    Agent,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    RunContext,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UnexpectedModelBehavior,
    UserPromptPart,
)
from pydantic_ai.models.function import (  # type: ignore[import-not-found, unused-ignore] # same
    AgentInfo,
    FunctionModel,
)

import stanchion

app = stanchion.Worker()


@dataclass
class Plan:
    """The output of the planner."""

    queries: list[str]


def planning(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """A model that splits every question into the same three searches."""
    question = asked(messages).rstrip("?")
    queries = [f"{question}: {part}" for part in ("materials", "history", "failures")]
    return ModelResponse([ToolCallPart(info.output_tools[0].name, {"queries": queries})])


def searching(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """A model that calls its tool once and returns the tool's result."""
    found = [part.content for part in parts_of(messages) if isinstance(part, ToolReturnPart)]
    if found:
        return ModelResponse([TextPart(str(found[0]))])
    return ModelResponse([ToolCallPart(info.function_tools[0].name, {"query": asked(messages)})])


def writing(messages: list[ModelMessage], _info: AgentInfo) -> ModelResponse:
    """A model that returns its notes unchanged."""
    return ModelResponse([TextPart(asked(messages))])


async def count_sources(context: RunContext[stanchion.Job], query: str) -> int:
    """Count the sources. A tool: the model calls it, with the job as context."""
    # A tool has side effects: continue only while this worker holds the job.
    context.deps.heartbeat({"query": query})
    return 1 + zlib.crc32(query.encode()) % 9


planner = Agent(FunctionModel(planning), output_type=Plan, retries=0)
searcher = Agent(
    FunctionModel(searching), deps_type=stanchion.Job, tools=[count_sources], retries=0
)
writer = Agent(FunctionModel(writing), retries=0)


@app.task("agent.plan")
async def plan(job: stanchion.Job) -> dict[str, Any]:
    """Split a question into searches."""
    try:
        result = await planner.run(job.input["question"])
    except UnexpectedModelBehavior as error:
        # The model does not return the required form: a retry does not help.
        raise stanchion.FinalError(str(error), code="bad_plan") from error
    return {"queries": result.output.queries}


@app.task("agent.search")
async def search(job: stanchion.Job) -> dict[str, Any]:
    """Run one search. The workflow's `retry` covers every error of the framework."""
    result = await searcher.run(job.input["q"], deps=job)
    return {"query": job.input["q"], "found": int(result.output)}


@app.task("agent.write")
async def write(job: stanchion.Job) -> dict[str, Any]:
    """Write the report."""
    lines = [f"- {each['query']}: {each['found']} sources" for each in job.input["text"]]
    result = await writer.run("\n".join([job.input["title"], *lines]))
    return {"text": result.output}


@app.task("agent.check")
async def check(job: stanchion.Job) -> dict[str, Any]:
    """Check the report."""
    return {"ok": bool(job.input["text"])}


def asked(messages: list[ModelMessage]) -> str:
    """Return the first prompt of a conversation."""
    prompts = [part.content for part in parts_of(messages) if isinstance(part, UserPromptPart)]
    return str(prompts[0])


def parts_of(messages: list[ModelMessage]) -> list[Any]:
    """Return all parts of the messages to the model, in order."""
    return [
        part for message in messages if isinstance(message, ModelRequest) for part in message.parts
    ]
