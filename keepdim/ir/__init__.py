"""The Program: the graph that a delegate runs.

Owns its structs, the verifier, the text form and its parser, the reference interpreter (torch, one function an op), the
cost of nodes, the block formats of quantised weights, and our own torch ops. Takes and gives Programs. Never reads an
FX graph and knows no engine.
"""
