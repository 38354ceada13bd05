"""The file: the contents of a .pte and how they are read.

Owns the layout and the checksums of a .pte, the signature (contract, argument structure, constants), weights in
another file, the outline of a method for pages, and tables of ranges. Takes and returns bytes and structs. Never
imports, calls or executes anything that a file names.
"""
