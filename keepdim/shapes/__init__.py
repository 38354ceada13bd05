"""Sizes and constraints between them.

Owns `Dim` (an integer expression over symbols, with bounds), `Contract` (symbols, inputs, constraints, outputs), the
solver that finds where each symbol is read, the JSON form of all of them, and the table of block formats (`blocks`).
Takes integers and JSON; returns Dims and Contracts. Never imports torch.export, sympy or another package of keepdim:
`fx` translates from torch.
"""
