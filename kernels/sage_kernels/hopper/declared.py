"""Stands in for the signatures of Hopper's programs until they declare their own."""

import torch

from sage_kernels.hopper import toolbox

KINDS = {torch.int8: "i8", torch.int32: "i32", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
FLOAT32 = ("scale", "log_sum_exp", "delta", "factors", "step")


def signature_of(program, constants, tiles, dtype) -> dict[str, str]:
    known = {"D", "DP", "IS_CAUSAL", "RAGGED", *constants}
    types = {}
    for name in program.arg_names:
        if name in tiles:
            kind, shape = tiles[name]
            types[name] = f"tensordesc<{KINDS[kind]}{list(shape)},{toolbox.layout(*shape, dtype=kind)!r}>"
        elif name.endswith("_ptr"):
            types[name] = "*fp32" if any(x in name for x in FLOAT32) else f"*{KINDS[dtype]}"
        elif name not in known:
            types[name] = "fp32" if name.endswith("scale") else "i32"
    return types
