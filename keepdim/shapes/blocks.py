"""ggml's block formats of quantised weights, as on the C++ side (`runtime/core/program.cpp`). Imports nothing, so that
the command line can list them."""

# Elements and bytes of a block. Only consts and states have these dtypes; rows are whole blocks.
BLOCKS = {
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "iq4_nl": (32, 18),
    "iq4_xs": (256, 136),
}
STORED = (*BLOCKS, "f16", "bf16")  # dtypes in which weights of f32 layers may be stored
