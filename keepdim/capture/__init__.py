"""From a model to an ExportedProgram whose declared ranges are true.

Owns the export modes, the contract read from the exported program, its validation against eager, and the rewrites
that later stages need. Takes a model, example inputs and dynamic_shapes; gives `Captured`. Never lowers anything.
"""
