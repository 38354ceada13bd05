"""ExecuTorch's flow, from a captured program to a .pte that keeps its contract.

Owns the pipeline, the path with a single delegate, our partitioners and backends, other partitioners under watch,
weights shared with branches, what stays with ExecuTorch (kernels, loops), the guard delegate and the report. Takes
`Captured`; gives a file and a `Report`. Never changes numbers. The lowering rules of single ops are in `frontend/ops`.
"""
