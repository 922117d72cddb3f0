"""How a program declares the types of its parameters, in Triton's own words: "*bf16", "*i8", "fp32", "i32".

"i32:16" is an integer that is a multiple of 16 in every launch that counts, as in Triton's own ahead-of-time compiler;
pointers always are, for so PyTorch allocates. None is a tensor that a level does without. What the compiler knows are
constants and no part of a signature.
"""

import torch

Signature = dict[str, str | None]  # by the names of a program's parameters

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
NUMBER = "fp32"
SIZE = "i32"
PADDED_SIZE = "i32:16"  # whole blocks of tokens


def strided(name: str, pointer: str | None) -> Signature:
    """A tensor of four dimensions: `name`_ptr, and how far apart its samples, heads and tokens are."""
    return {f"{name}_ptr": pointer} | {f"{name}_stride_{axis}": PADDED_SIZE for axis in "bhn"}


def compiler_arguments(program, signature: Signature, constants: dict) -> tuple[dict, dict, dict]:
    """(types, constants, attributes) as `triton.compiler.ASTSource` takes them.

    ValueError unless signature and constants together name every parameter of the program, and each once.
    """
    names = program.arg_names
    if sorted([*signature, *constants]) != sorted(names):
        differing = sorted({*signature, *constants} ^ {*names} | {*signature} & {*constants})
        raise ValueError(
            f"signature: expected it and the constants to name every parameter of {program.__name__} once, got it "
            f"otherwise for {', '.join(differing)}"
        )
    types = {name: (signature.get(name) or "constexpr").removesuffix(":16") for name in names}
    constants = {name: constants.get(name) for name in names if types[name] == "constexpr"}
    aligned = {name for name, kind in signature.items() if kind and (kind.startswith("*") or kind == PADDED_SIZE)}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned}
    return types, constants, attributes
