"""Reading FX graphs: nodes, bodies, symbols and sizes.

Owns what a node of an exported graph is, the translation of torch's sympy expressions into Dims, and the propagation of
shapes through a graph. Takes graphs; gives Dims and facts about nodes. Never exports a model and never lowers one, and
never lets a ShapeEnv decide anything.
"""
