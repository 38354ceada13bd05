"""FX to Program: the builder, the support check and the lowering rules of all ops.

Owns which ATen overloads are taken and how each becomes nodes of a Program (`ops/`, one rule an op), and the builder
that runs the rules over a graph. Takes an exported graph with its symbols; gives a Program and its weights. Support
is a dry run of the same rules. Never partitions and writes no file.
"""
