"""Messages between the grader and a submission's process: JSON for the structure, raw bytes for the numbers.

One message is two lengths (32 and 64 bit), a JSON object and the tensors' bytes. No pickle: reading a message runs no
code of its sender, takes bounded time and memory, and ends in plain values or in a WireError. Both sides load this file
by its path, so it imports nothing of the package.
"""

import itertools
import json
import math
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

LENGTHS = struct.Struct("<IQ")
JSON_LIMIT = 2**18  # bytes
BLOCK_LIMIT = 2**25  # bytes of tensors in one message
TEXT_LIMIT = 10_000  # characters of one string
VALUE_LIMIT = 256  # values of an answer, lists among them; what is referred to twice counts twice
DEPTH_LIMIT = 8
DTYPES = {
    name: getattr(torch, name)
    for name in ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
}
UNREADABLE = "returned something that can't be read"


class WireError(Exception):
    """A value that can't be sent, or a message that isn't one; its text can be shown to a student."""


def printable(text: str) -> str:
    """Return a text without surrogates, control characters and other signs that would harm a report or a terminal."""
    return "".join(x if x.isprintable() else " " for x in text)


def encode(value: Any, tensors: list[Tensor], count: Iterator[int] | None = None, depth: int = 0) -> Any:
    """Return the JSON form of tensors, numbers, texts, None, and of lists and dicts of them; tensors join `tensors`."""
    count = count or itertools.count(1)
    if depth > DEPTH_LIMIT or next(count) > VALUE_LIMIT:
        raise WireError("returned too many nested values")
    if isinstance(value, Tensor):
        tensors.append(plain(value))
        return {"tensor": len(tensors) - 1}
    if isinstance(value, tuple | list):
        return [encode(item, tensors, count, depth + 1) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item, tensors, count, depth + 1) for key, item in value.items()}}
    return scalar(value.item() if isinstance(value, np.generic) else value)


def decode(tree: Any, tensors: list[Tensor], count: Iterator[int] | None = None, depth: int = 0) -> Any:
    """Return the value that `encode` took, with tuples for lists and printable texts; anything else is a WireError."""
    count = count or itertools.count(1)
    if depth > DEPTH_LIMIT or next(count) > VALUE_LIMIT:
        raise WireError("returned too many nested values")
    match tree:
        case {"tensor": int(number)} if 0 <= number < len(tensors):
            return tensors[number]
        case {"dict": dict(items)}:
            return {printable(key): decode(item, tensors, count, depth + 1) for key, item in items.items()}
        case [*items]:
            return tuple(decode(item, tensors, count, depth + 1) for item in items)
        case dict():
            raise WireError(UNREADABLE)
    return printable(scalar(tree)) if isinstance(tree, str) else scalar(tree)


def scalar(value: Any) -> Any:
    """Return a number, a text or None as it is; WireError for anything else."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise WireError("returned an integer of more than 64 bits")
    if isinstance(value, str) and len(value) > TEXT_LIMIT:
        raise WireError("returned more text than is allowed")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise WireError(f"returned {type(value).__name__}, expected a tensor")


def plain(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU copy without gradient, subclass or shared storage."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in DTYPES.values():
            raise WireError(f"returned a tensor of {tensor.dtype}, {tensor.layout}: expected a dense tensor")
        if tensor.numel() * tensor.element_size() > BLOCK_LIMIT:
            raise WireError(f"returned a tensor of {tensor.numel()} elements, more than is allowed")
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def pack(content: dict[str, Any], tensors: list[Tensor]) -> bytes:
    """Return the bytes of a message. WireError if they are more than is allowed."""
    forms = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps(content | {"tensors": forms}).encode()
    block = b"".join(x.reshape(-1).view(torch.uint8).numpy().tobytes() for x in tensors if x.numel())
    if len(block) > BLOCK_LIMIT or len(text) > JSON_LIMIT:
        raise WireError("returned more than is allowed")
    return LENGTHS.pack(len(text), len(block)) + text + block


def write(stream: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Send a message; TimeoutError if the reader doesn't read it until the deadline, OSError if it is gone."""
    stream.settimeout(deadline and max(0.01, deadline - time.monotonic()))
    stream.sendall(message)


def read(stream: socket.socket, deadline: float | None = None, ended: Any = None) -> tuple[dict, list[Tensor]]:
    """Return the next message: its content and its tensors. WireError if it is none.

    TimeoutError at `deadline`, by time.monotonic; EOFError if the sender is gone: then `ended` can be read, even if
    another process holds the stream open.
    """
    text_size, block_size = LENGTHS.unpack(read_exactly(stream, LENGTHS.size, deadline, ended))
    if text_size > JSON_LIMIT or block_size > BLOCK_LIMIT:
        raise WireError("returned more than is allowed")
    text = read_exactly(stream, text_size, deadline, ended)
    return parse(text, read_exactly(stream, block_size, deadline, ended))


def read_exactly(stream: socket.socket, size: int, deadline: float | None, ended: Any) -> bytes:
    """Return so many bytes, or raise as `read` does."""
    data = bytearray()
    while len(data) < size:
        timeout = deadline and max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select([stream] if ended is None else [stream, ended], [], [], timeout)
        if not readable:
            raise TimeoutError
        try:  # what is not from the stream says that the sender ended and left nothing there
            part = stream.recv(min(size - len(data), 2**20)) if stream in readable else b""
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def parse(text: bytes, block: bytes) -> tuple[dict, list[Tensor]]:
    """Return the content and the tensors of a message's two parts; WireError, and nothing else, if they aren't any."""
    try:
        content, tensors, start = json.loads(text), [], 0
        if len(content["tensors"]) > VALUE_LIMIT:
            raise ValueError("too many tensors")
        for name, shape in content["tensors"]:
            dtype, end = DTYPES[name], start + DTYPES[name].itemsize * math.prod(shape)
            # A shape without elements may still be one that no result of it fits into memory, [0, 2**40] say.
            fits = len(shape) <= 16 and all(type(length) is int and length >= 0 for length in shape)
            if not fits or dtype.itemsize * math.prod(max(1, x) for x in shape) > BLOCK_LIMIT or end > len(block):
                raise ValueError("a shape doesn't fit")
            part = bytearray(block[start:end])
            flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
            tensors.append(flat.reshape(shape))
            start = end
        if start != len(block):
            raise ValueError("bytes are left over")
    except Exception as error:  # whatever goes wrong while reading is the sender's
        raise WireError(UNREADABLE) from error
    return content, tensors
