"""The Program: the graph that a delegate runs.

Owns its structs, the verifier, the text form and its parser, the reference interpreter (torch, one function per op),
the cost model, the conversion of weights to and from the block formats (their table is `shapes/blocks.py`), and
keepdim's torch ops. Takes and returns Programs. Never reads an FX graph and does not depend on an engine.
"""
