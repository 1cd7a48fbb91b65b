"""CEL: the language of conditions and templates, with bounded time and memory.

The grammar and the types are those of the Common Expression Language, checked by its reference
implementation. The evaluator is our own, because one line of text can make every existing one run
for seconds or exhaust the memory (``docs/adr/0004-expressions.md``). It covers the part of CEL that
concerns JSON: no timestamps, durations, bytes, unsigned numbers or messages.

Other packages use ``stanchion.core.expression`` instead of these modules.

    library     parses and checks text with the reference implementation; regex search with RE2
    syntax      the nodes of a checked expression
    evaluation  compiles nodes to functions; the budget of an evaluation
    operations  the operators, functions and conversions
    pattern     the cost of regular expressions
    value       values (JSON and its types), and the errors
"""
