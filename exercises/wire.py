"""Messages between the grader and a submission's process: JSON for the structure, raw bytes for the numbers.

One message is two lengths (32 and 64 bit), a JSON object and the tensors' bytes. No pickle: reading a message runs no
code of its sender. Both sides load this file by its path, so it imports nothing of the package.
"""

import contextlib
import json
import math
import select
import socket
import struct
import time
from typing import Any

import torch
from torch import Tensor

LENGTHS = struct.Struct("<IQ")
JSON_LIMIT = 2**21  # bytes; a submission's file is in one message
MESSAGE_LIMIT = 2**26  # bytes of tensors in one message; an answer may have half of it at most
TEXT_LIMIT = 10_000  # characters of one string of an answer
LEAF_LIMIT = 256
DEPTH_LIMIT = 8
DTYPES = {
    name: getattr(torch, name)
    for name in ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
}


class WireError(Exception):
    """A value that can't be sent, or a message that isn't one; its text can be shown to a student."""


def encode(value: Any, tensors: list[Tensor], depth: int = 0) -> Any:
    """Return the JSON form of tensors, numbers, texts, None, and of lists and dicts of them; tensors join `tensors`."""
    if depth > DEPTH_LIMIT or len(tensors) > LEAF_LIMIT:
        raise WireError("returned too many nested values")
    if isinstance(value, Tensor):
        tensors.append(_plain(value))
        return {"tensor": len(tensors) - 1}
    if isinstance(value, tuple | list):
        return [encode(item, tensors, depth + 1) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item, tensors, depth + 1) for key, item in value.items()}}
    return _scalar(value)


def decode(tree: Any, tensors: list[Tensor], depth: int = 0) -> Any:
    """Return the value that `encode` took, with tuples for lists; anything else is a WireError."""
    if depth > DEPTH_LIMIT:
        raise WireError("returned too many nested values")
    match tree:
        case {"tensor": int(number)} if 0 <= number < len(tensors):
            return tensors[number]
        case {"dict": dict(items)} if len(items) <= LEAF_LIMIT:
            return {key: decode(item, tensors, depth + 1) for key, item in items.items()}
        case [*items] if len(items) <= LEAF_LIMIT:
            return tuple(decode(item, tensors, depth + 1) for item in items)
        case dict() | list():
            raise WireError("returned something that can't be read")
    return _scalar(tree)


def _scalar(value):
    if isinstance(value, int) and abs(value) >= 2**63:
        raise WireError("returned an integer of more than 64 bits")
    if isinstance(value, str) and len(value) > TEXT_LIMIT:
        raise WireError("returned more text than is allowed")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise WireError(f"returned {type(value).__name__}, expected a tensor")


def pack(content: dict[str, Any], tensors: list[Tensor], limit: int = MESSAGE_LIMIT // 2) -> bytes:
    """Return the bytes of a message. WireError for more than `limit` bytes of tensors."""
    forms = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps(content | {"tensors": forms}).encode()
    block = b"".join(x.reshape(-1).view(torch.uint8).numpy().tobytes() for x in tensors if x.numel())
    if len(block) > limit:
        raise WireError(f"returned {len(block) / 2**20:.3g} MiB of tensors, more than the {limit / 2**20:.3g} allowed")
    if len(text) > JSON_LIMIT:
        raise WireError("returned more text than is allowed")
    return LENGTHS.pack(len(text), len(block)) + text + block


def read(
    stream: socket.socket, deadline: float = math.inf, ended: Any = None, limit: int = MESSAGE_LIMIT // 2
) -> tuple[dict, list[Tensor]]:
    """Return the next message: its content and at most `limit` bytes of tensors. WireError if it is none.

    TimeoutError at `deadline`, by time.monotonic; EOFError if the sender is gone: then `ended` can be read, even if
    another process holds the stream open.
    """
    text_size, block_size = LENGTHS.unpack(_read_exactly(stream, LENGTHS.size, deadline, ended))
    if text_size > JSON_LIMIT or block_size > limit:
        raise WireError("returned more than is allowed")
    text = _read_exactly(stream, text_size, deadline, ended)
    return parse(text, _read_exactly(stream, block_size, deadline, ended), limit)


def parse(text: bytes, block: bytes, limit: int = MESSAGE_LIMIT // 2) -> tuple[dict, list[Tensor]]:
    """Return the content and the tensors of a message's two parts; WireError, and nothing else, if they aren't any."""
    try:
        content, tensors, start = json.loads(text), [], 0
        if len(content["tensors"]) > LEAF_LIMIT + 1:
            raise ValueError("too many tensors")
        for name, shape in content["tensors"]:
            dtype, end = DTYPES[name], start + DTYPES[name].itemsize * math.prod(shape)
            # A shape without elements may still be one that no result of it fits into memory, [0, 2**40] say.
            fits = len(shape) <= 16 and all(type(length) is int and length >= 0 for length in shape)
            if not fits or dtype.itemsize * math.prod(max(1, x) for x in shape) > limit or end > len(block):
                raise ValueError("a shape doesn't fit")
            part = bytearray(block[start:end])
            flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
            tensors.append(flat.reshape(shape))
            start = end
        if start != len(block):
            raise ValueError("bytes are left over")
    except Exception as error:  # whatever goes wrong while reading is the sender's
        raise WireError("returned something that can't be read") from error
    return content, tensors


def write(stream: socket.socket, message: bytes, deadline: float = math.inf) -> None:
    """Send a message; TimeoutError if the reader doesn't read it, BrokenPipeError if it is gone."""
    stream.settimeout(None if deadline == math.inf else max(0.01, deadline - time.monotonic()))
    stream.sendall(message)


def _read_exactly(stream, size, deadline, ended):
    data = b""
    while len(data) < size:
        timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select([stream] if ended is None else [stream, ended], [], [], timeout)
        if not readable:
            raise TimeoutError
        part = b""
        if stream in readable:  # else the sender ended and left nothing here
            with contextlib.suppress(ConnectionError):
                part = stream.recv(min(size - len(data), 2**20))
        if not part:
            raise EOFError
        data += part
    return data


def _plain(tensor):
    """Return a contiguous CPU copy without gradient, subclass or shared storage."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in DTYPES.values():
            raise WireError(f"returned a tensor of {tensor.dtype}, {tensor.layout}: expected a dense tensor")
        if tensor.numel() * tensor.element_size() > MESSAGE_LIMIT // 2:
            raise WireError(f"returned a tensor of {tensor.numel()} elements, more than is allowed")
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
