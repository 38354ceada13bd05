"""The file: what a .pte holds and how it is read.

Owns the layout and the checksums of a .pte, the signature (contract, argument structure, constants), weights in
another file, the outline of a method for pages, and tables of ranges. Takes and gives bytes and structs. Never
imports, calls or executes anything that a file names.
"""
