"""Workflow files that are good: the example everybody knows, every member there is, every limit."""

from __future__ import annotations

from typing import Final

from stanchion.core.limits import ID_CHARS_MAX, NEEDS_MAX, TOPIC_CHARS_MAX, WORKFLOW_STEPS_MAX

RESEARCH: Final = """\
id: research
risk: high                 # low | standard (default) | high | critical
lock_policy: {on_renewal_lost: fence}
timeout_s: 600
steps:
  plan:    {topic: agent.plan, input: {question: "${input.question}"}, retry: {max_attempts: 3}}
  search:
    topic: agent.search
    needs: [plan]
    for_each: "${steps.plan.output.queries}"
    input: {q: "${item}"}
  cool:    {delay_s: 5, needs: [search]}
  review:  {approval: {}, needs: [cool], when: "input.review == true"}
  publish: {workflow: publish-report, needs: [review], input: {text: "${steps.search.output}"}}
output: "${steps.publish.output}"
"""

EVERY_MEMBER: Final = """\
id: every-member
risk: critical
lock_policy: {on_lock_error: fail_closed, on_renewal_lost: continue, renewal_failures_max: 100}
timeout_s: 2592000
max_deliveries: 100
input_schema:
  $schema: https://json-schema.org/draft/2020-12/schema
  type: object
  required: [question]
  properties:
    question: {$ref: "#/$defs/text"}
    tags: {type: array, items: {$ref: "#/$defs/text"}}
  $defs:
    text: {type: string, minLength: 1, pattern: "^[^<>]*$"}
steps:
  ask:
    approval:
      message: "Shall we?\\nReally, ${input.question}?"
      timeout_s: 2592000
      on_timeout: approve
      not_by_starter: true
      data_schema: {type: object, properties: {sum: {type: integer}}}
    timeout_s: 0.001
    when: 'has(input.ask) && input.ask'
  fixed:
    topic: agent.work_1
    input: null
    retry: {max_attempts: 100, backoff: {kind: fixed, delay_ms: 0}}
    timeout_s: 60
    attempt_timeout_s: 2.5
    needs: [ask]
    on_failure: continue
  jittered:
    topic: work
    input: [1, "two", {three: "${steps.fixed.output.x + 1}"}, "$${not an expression}"]
    retry: {backoff: {kind: jitter, delay_ms: 100, jitter_ms: 100}}
    needs: [fixed]
  growing:
    topic: work
    for_each: '${ {"a": [1, 2]}.a }'
    on_item_failure: continue
    parallel: 1000
    input: "${index}: ${item} of ${steps.ask.status}"
    retry:
      max_attempts: 5.0
      backoff: {kind: exponential, base_ms: 1, cap_ms: 86400000, factor: 1.5, jitter: none}
    needs: [fixed]
  growing_2:
    topic: work
    retry: {backoff: {kind: exponential, base_ms: 10, cap_ms: 10}}
  pause: {delay_s: 0, needs: [jittered, growing], when: "size(steps.growing.output) > 0"}
  inner: {workflow: other, input: "${steps.jittered.output}", timeout_s: 3.5, needs: [pause]}
  inner-2: {workflow: other, input: {}, needs: [inner], on_failure: fail}
output: {first: "${steps.ask.output}", second: ["${steps['inner-2'].output}", 3, null]}
"""

SMALLEST: Final = "{id: a, steps: {a: {topic: a}}}"

NULL_OUTPUT: Final = "{id: a, steps: {a: {topic: a}}, output: null}"

LONGEST_NAMES: Final = f"""\
id: {"w" * ID_CHARS_MAX}
steps:
  {"s" * ID_CHARS_MAX}:
    topic: {"t" * TOPIC_CHARS_MAX}
  b:
    workflow: {"v" * ID_CHARS_MAX}
    needs: [{"s" * ID_CHARS_MAX}]
"""

WIDEST: Final = "id: widest\nsteps:\n" + "".join(
    f"  s{number}:\n    topic: work\n    needs: [{_needs}]\n"
    for number in range(WORKFLOW_STEPS_MAX)
    for _needs in [", ".join(f"s{n}" for n in range(max(0, number - NEEDS_MAX), number))]
)

LONGEST_CHAIN: Final = "id: chain\nsteps:\n  s0: {topic: work}\n" + "".join(
    f'  s{number}: {{topic: work, needs: [s{number - 1}], input: "${{steps.s0.output}}"}}\n'
    for number in range(1, WORKFLOW_STEPS_MAX)
)

GOOD: Final = {
    "research": RESEARCH,
    "every member": EVERY_MEMBER,
    "smallest": SMALLEST,
    "null output": NULL_OUTPUT,
    "longest names": LONGEST_NAMES,
    "widest": WIDEST,
    "longest chain": LONGEST_CHAIN,
}
