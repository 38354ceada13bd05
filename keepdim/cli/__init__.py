"""The command line: `keepdim demo | lower | run | inspect | audit | refine | tune | embed | generate | completion`.

Owns the arguments (`arguments`), the syntax of inputs and factories, printing, and a module for each command in
`commands`. Takes arguments; returns exit codes: 0, 1 if the command failed, 2 if the arguments are wrong. Arguments are
parsed and checked before anything heavy is imported. No other package prints.
"""
