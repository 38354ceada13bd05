"""FX to Program: the builder, the support check and the lowering rules of all ops.

Owns which ATen overloads are supported and how each becomes nodes of a Program (`ops/`, one rule per op), and the
builder that applies the rules to a graph. Takes an exported graph with its symbols; returns a Program and its weights.
`lower_graph.py` also runs the passes on what was built, so that a Program leaves this room as it is stored. The support
check is a dry run of the same rules. Never partitions and writes no file.
"""
