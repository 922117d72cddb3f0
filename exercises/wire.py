"""Messages between the grader and a submission's process: JSON for the structure, raw bytes for the numbers.

One message is two lengths (32 and 64 bit), a JSON object and the tensors' bytes. No pickle: reading a message runs no
code of its sender, takes bounded time and memory, and ends in a plain value or in a WireError. A submission's process
loads this file by its path, so it imports nothing of the package.
"""

import itertools
import json
import math
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

LENGTHS = struct.Struct("<IQ")
JSON_LIMIT = 2**18  # bytes
BLOCK_LIMIT = 2**22  # bytes of tensors in one message
TEXT_LIMIT = 10_000  # characters of one string
VALUE_LIMIT = 256  # values of a message, lists among them; what is referred to twice counts twice
DTYPES = {
    name: getattr(torch, name)
    for name in ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
}


class WireError(Exception):
    """A value that can't be sent, or a message that isn't one; its text can be shown to a student."""


def printable(text: str) -> str:
    """Return a text without surrogates, control characters and other signs that would harm a report or a terminal."""
    return "".join(x if x.isprintable() else " " for x in text)


def pack(value: Any) -> bytes:
    """Return the message of a tensor, a number, a text, None, or of lists and dicts of them. WireError for the rest."""
    tensors = []
    tree = encoded(value, tensors, itertools.count(1))
    forms = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps({"value": tree, "tensors": forms}).encode()
    block = b"".join(x.reshape(-1).view(torch.uint8).numpy().tobytes() for x in tensors if x.numel())
    if len(text) > JSON_LIMIT:
        raise WireError("more text than is allowed")
    return LENGTHS.pack(len(text), len(block)) + text + block


def encoded(value: Any, tensors: list[Tensor], count: Iterator[int]) -> Any:
    """Return a value as JSON has it. Its tensors join `tensors`; `count` numbers all that is in it."""
    if next(count) > VALUE_LIMIT:
        raise WireError("too many nested values")
    if isinstance(value, Tensor):
        tensors.append(plain(value))
        if sum(tensor.nbytes for tensor in tensors) > BLOCK_LIMIT:
            raise WireError("more numbers than are allowed")
        return {"tensor": len(tensors) - 1}
    if isinstance(value, tuple | list):
        return [encoded(item, tensors, count) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encoded(item, tensors, count) for key, item in value.items()}}
    return scalar(value.item() if isinstance(value, np.generic) else value)


def plain(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU copy without gradient, subclass or shared storage."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in DTYPES.values():
            raise WireError(f"{tensor.dtype}, {tensor.layout}: expected a dense tensor")
        if tensor.numel() * tensor.element_size() > BLOCK_LIMIT:
            raise WireError(f"a tensor of {tensor.numel()} elements, more than is allowed")
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def scalar(value: Any) -> Any:
    """Return a number, a text or None as it is; WireError for anything else."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise WireError("an integer of more than 64 bits")
    if isinstance(value, str) and len(value) > TEXT_LIMIT:
        raise WireError("more text than is allowed")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise WireError(f"{type(value).__name__}, expected a tensor")


def read(stream: BinaryIO) -> Any:
    """Return the next message's value, with tuples for lists. EOFError at the end, WireError if it is no message."""
    lengths = stream.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        raise EOFError
    text_size, block_size = LENGTHS.unpack(lengths)
    if text_size > JSON_LIMIT or block_size > BLOCK_LIMIT:
        raise WireError("more than is allowed")
    text, block = stream.read(text_size), stream.read(block_size)
    if len(text) + len(block) < text_size + block_size:
        raise EOFError
    try:
        content = json.loads(text)
        return decoded(content["value"], tensors_in(block, content["tensors"]), itertools.count(1))
    except WireError:
        raise
    except Exception as error:  # whatever goes wrong while reading is the sender's
        raise WireError("what can't be read") from error


def tensors_in(block: bytes, forms: list) -> list[Tensor]:
    """Return the tensors of a message, whose dtypes and shapes are given. An error if they don't fit its bytes."""
    tensors, start = [], 0
    for name, shape in forms:
        dtype = DTYPES[name]
        # A shape without elements may still be one that no result of it fits into memory, [0, 2**40] say.
        if dtype.itemsize * math.prod(max(1, length) for length in shape) > BLOCK_LIMIT:
            raise ValueError("too large a shape")
        end = start + dtype.itemsize * math.prod(shape)
        part = bytearray(block[start:end])
        flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
        tensors.append(flat.reshape(shape))
        start = end
    if start != len(block):
        raise ValueError("bytes are left over")
    return tensors


def decoded(tree: Any, tensors: list[Tensor], count: Iterator[int]) -> Any:
    """Return the value that `encoded` took, with tuples for lists and printable texts. An error for anything else."""
    if next(count) > VALUE_LIMIT:
        raise WireError("too many nested values")
    match tree:
        case {"tensor": int(number)}:
            return tensors[number]
        case {"dict": dict(items)}:
            return {printable(key): decoded(item, tensors, count) for key, item in items.items()}
        case [*items]:
            return tuple(decoded(item, tensors, count) for item in items)
        case str(text):
            return printable(scalar(text))
    return scalar(tree)
