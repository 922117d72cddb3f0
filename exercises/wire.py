"""Messages between the grader and a submission's process: JSON for the structure, safetensors for the numbers.

One message is two lengths (32 and 64 bit), a JSON object and a safetensors block. No pickle: reading a message
runs no code of its sender. Both sides load this file by its path, so it imports nothing of the package.
"""

import dataclasses
import json
import math
import os
import select
import struct
import time
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

LENGTHS = struct.Struct("<IQ")
JSON_LIMIT = 2**20
MESSAGE_LIMIT = 2**26  # bytes of tensors in one message; an answer may have half of it at most
HEADER_LIMIT = 2**16  # bytes of names and shapes of tensors
TEXT_LIMIT = 10_000  # characters of one string
LEAF_LIMIT = 256
DEPTH_LIMIT = 8
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


class WireError(Exception):
    """A value that can't be sent, or a message that isn't one; its text can be shown to a student."""


def encode(value: Any, tensors: dict[str, Tensor], depth: int = 0) -> dict[str, Any]:
    """The JSON tree of tensors, numbers, strings, None and tuples, lists, dicts of them; tensors join `tensors`."""
    if depth > DEPTH_LIMIT or len(tensors) > LEAF_LIMIT:
        raise WireError("returned too many nested values")
    if isinstance(value, Tensor):
        key = f"t{len(tensors)}"
        tensors[key] = _plain(value)
        return {"tensor": key}
    if isinstance(value, str) and len(value) > TEXT_LIMIT:
        raise WireError("returned more text than is allowed")
    if value is None or isinstance(value, bool | int | str):
        return {"scalar": value}
    if isinstance(value, float):
        return {"scalar": value if math.isfinite(value) else None, "float": str(value)}
    if isinstance(value, tuple | list):
        return {"tuple": [encode(item, tensors, depth + 1) for item in value]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item, tensors, depth + 1) for key, item in value.items()}}
    raise WireError(f"returned {type(value).__name__}, expected a tensor")


def decode(tree: Any, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """The value of a tree made by encode; anything else is a WireError."""
    if depth > DEPTH_LIMIT or not isinstance(tree, dict):
        raise WireError("returned something that can't be read")
    match tree:
        case {"tensor": str(key)} if key in tensors:
            return tensors[key]
        case {"scalar": None, "float": "nan" | "inf" | "-inf" as text}:
            return float(text)
        case {"scalar": None | bool() | int() | float() | str() as scalar}:
            return scalar
        case {"tuple": list(items)} if len(items) <= LEAF_LIMIT:
            return tuple(decode(item, tensors, depth + 1) for item in items)
        case {"dict": dict(items)} if len(items) <= LEAF_LIMIT:
            return {key: decode(item, tensors, depth + 1) for key, item in items.items()}
    raise WireError("returned something that can't be read")


def pack(content: dict[str, Any], tensors: dict[str, Tensor], limit: int = MESSAGE_LIMIT // 2) -> bytes:
    """The bytes of a message. WireError for more than `limit` bytes of tensors."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > limit:
        raise WireError(f"returned {size / 2**20:.3g} MiB of tensors, more than the {limit / 2**20:.3g} allowed")
    text, block = json.dumps(content).encode(), safetensors.torch.save(tensors)
    if len(text) > JSON_LIMIT:
        raise WireError("returned more text than is allowed")
    return LENGTHS.pack(len(text), len(block)) + text + block


def read(
    descriptor: int, deadline: float = math.inf, ended: int | None = None, limit: int = MESSAGE_LIMIT // 2
) -> tuple[dict, dict[str, Tensor]]:
    """The next message. EOFError if the sender is gone, TimeoutError at `deadline` (time.monotonic), or WireError.

    ended: a descriptor that becomes readable when the sender has ended, although another holds the pipe open.
    limit: bytes of its tensors.
    """
    text_size, block_size = LENGTHS.unpack(_read_exactly(descriptor, LENGTHS.size, deadline, ended))
    if text_size > JSON_LIMIT or block_size > limit + HEADER_LIMIT:
        raise WireError("returned more than is allowed")
    text = _read_exactly(descriptor, text_size, deadline, ended)
    block = _read_exactly(descriptor, block_size, deadline, ended)
    return parse(text, block, limit)


def parse(text: bytes, block: bytes, limit: int = MESSAGE_LIMIT // 2) -> tuple[dict, dict[str, Tensor]]:
    """The content and the tensors of a message's two parts; WireError, and nothing else, if they aren't any."""
    try:
        content = json.loads(text)
        tensors = safetensors.torch.load(block)
    except Exception as error:  # whatever goes wrong while reading is the sender's
        raise WireError("returned something that can't be read") from error
    # A shape without elements may still be one that no result of it fits into memory, [0, 2**40] say.
    sizes = (x.element_size() * math.prod(max(1, length) for length in x.shape) for x in tensors.values())
    fits = len(tensors) <= LEAF_LIMIT + 1 and max(sizes, default=0) <= limit
    if not isinstance(content, dict) or not fits or any(x.dtype not in DTYPES for x in tensors.values()):
        raise WireError("returned something that can't be read")
    return content, tensors


def write(descriptor: int, message: bytes, deadline: float = math.inf) -> None:
    """All of a message; TimeoutError if the reader doesn't read it, BrokenPipeError if it is gone."""
    view = memoryview(message)
    while view:
        _wait([], [descriptor], deadline)
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            continue


def _read_exactly(descriptor, size, deadline, ended):
    parts = []
    while size:
        readable = _wait([descriptor, *([] if ended is None else [ended])], [], deadline)
        if descriptor not in readable:
            raise EOFError  # the sender ended and left nothing in the pipe
        part = os.read(descriptor, min(size, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _wait(readers, writers, deadline):
    timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
    readable, writable, _ = select.select(readers, writers, [], timeout)
    if not readable and not writable:
        raise TimeoutError
    return readable


def _plain(tensor):
    """A contiguous CPU copy without gradient, subclass or shared storage."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in DTYPES:
            raise WireError(f"returned a tensor of {tensor.dtype}, {tensor.layout}: expected a dense tensor")
        if tensor.numel() * tensor.element_size() > MESSAGE_LIMIT // 2:
            raise WireError(f"returned a tensor of {tensor.numel()} elements, more than is allowed")
        plain = torch.empty(tensor.shape, dtype=tensor.dtype)
        plain.copy_(tensor.detach())
        return plain
