"""The command line: `keepdim lower | run | inspect | audit | refine | tune | generate | embed`.

Owns the arguments, the syntax of inputs and factories, and what is printed. Takes words; gives exit codes. No other
room prints.
"""
