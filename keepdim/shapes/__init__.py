"""Sizes and what must hold of them.

Owns `Dim` (an integer expression over symbols, with bounds), `Contract` (symbols, inputs, constraints, outputs), the
solver that finds where each symbol is read, and the JSON form of all of them. Takes plain numbers and JSON; gives Dims
and Contracts. Never imports torch.export, sympy or any other room: `fx` translates from torch.
"""
