"""Reading FX graphs: nodes, bodies, symbols and sizes.

Owns queries about nodes of an exported graph, the translation of torch's sympy expressions into Dims, and shape
propagation through a graph. Takes graphs; returns Dims and facts about nodes. Never exports or lowers a model, and
never lets a ShapeEnv decide anything.
"""
