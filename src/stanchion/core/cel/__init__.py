"""CEL: the language of conditions and holes, bounded.

The grammar and the types are those of the Common Expression Language, checked by its reference
implementation. The evaluator is ours, because every existing one can be made to run for seconds or
to fill the memory by a line of text (``docs/adr/0004-expressions.md``). It knows the part of CEL
that is about JSON: no timestamps, durations, bytes, unsigned numbers or messages.

Nothing outside this package needs more than ``stanchion.core.expression`` and
``stanchion.core.expression``.

    library     text -> checked syntax, through the reference implementation; search with RE2
    syntax      what is handed on: the nodes of an expression
    evaluation  syntax -> functions that can be called
    operations  what each operator and function does, with conversion beside it
    pattern     what a regular expression may cost
    budget      how much work and size one evaluation has
    value       what is computed with: JSON, and the types of JSON
    errors      who has to mend what
"""
