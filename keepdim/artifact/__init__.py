"""The file: the contents of a .pte and how they are read.

Owns the layout and the checksums of a .pte, the signature (contract, argument structure, constants), weights in
another file, the outline of a method for pages, and tables of ranges. Takes and returns bytes and structs. Never
imports, calls or executes anything that a file names.

The parts of the format that other folders own: the Program's JSON is `ir/program.py`; the JSON of Dims and contracts,
and the number of the format (`VERSION`; `kFormatVersion` in C++), are `shapes/contract.py`. In C++,
`runtime/artifact/pte.cpp` reads the trailer and the weights inside the file, `runtime/executorch/module.cpp` checks
those in another file, `runtime/artifact/verify_*.cpp` verify the .pte, and `runtime/core/program.cpp` reads the JSON.
"""
