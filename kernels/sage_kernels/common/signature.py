"""How a program declares the types of its parameters, in Triton's own words: "*bf16", "*i8", "fp32", "i32".

"i32:16" is an integer that is a multiple of 16 in every launch that counts, as in Triton's own ahead-of-time compiler;
pointers are, for so PyTorch allocates. A parameter that is known at compile time, and a pointer that a level does
without (None), are no part of a signature: they are constants.
"""

import torch

POINTERS = {
    torch.bool: "*i1",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}
HAT = POINTERS[torch.int8]  # X^
FLOATS = POINTERS[torch.float32]  # scales, L, delta, means
SIZE = "i32"
PADDED_SIZE = "i32:16"  # whole blocks of tokens


def strided(name: str, pointer: str) -> dict[str, str]:
    """A tensor of four dimensions: `name`_ptr, and how far apart its samples, heads and tokens are."""
    return {f"{name}_ptr": pointer} | {f"{name}_stride_{axis}": PADDED_SIZE for axis in "bhn"}


def is_multiple_of_16(type_name: str) -> bool:
    return type_name.startswith("*") or type_name.endswith(":16")
