"""NVIDIA's own 8-bit attention for training: cuDNN's, forward and backward in E4M3, through nvidia-cudnn-frontend.

E4M3 is a float with 3 bits after the point, up to 448. Every tensor has one scale.
- Q, K, V, dO come in 16 bit: `quantise` takes the scale from the largest entry, which counts as time. All get the
  layout of Q.
- cuDNN rounds P, O, dS, dQ, dK and dV, and must know their scales before. They come from the largest entries of the
  call before ("delayed scaling"), with HEADROOM. The first call of a shape is repeated until they are right. P is the
  exception in the forward pass: cuDNN rounds it before rows are divided by their sums, when 1 is its largest entry, but
  reports the largest entry of P as the backward pass rounds it.
On Hopper it takes head size 128 only, and O and the gradients leave in E4M3. They are converted to 16 bit, which counts
too.

Source: the operations sdpa_fp8 and sdpa_fp8_backward of https://github.com/NVIDIA/cudnn-frontend
"""

import functools
import math
from typing import NamedTuple

import torch
from sage_kernels.common.memory import is_heads_last
from torch import Tensor

PACKAGE, MODULE = "nvidia-cudnn-frontend", "cudnn"
HEAD_DIM = 128
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
HEADROOM = 2.0
SMALLEST = 1e-12  # of a largest entry: no division by 0
CALIBRATING_CALLS = 3  # dP's scale is right after one, so those of dQ and dK are right after two

Shapes = dict[str, tuple[int, ...] | None]  # by name; None is a scale, one number


def cudnn_fp8(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Return O [B, H, N, D]. query [B, H, N, D], key and value [B, Hkv, N, D], 16 bit, any strides."""
    if query.shape[-1] != HEAD_DIM:
        raise ValueError(f"head_dim: expected {HEAD_DIM}, got {query.shape[-1]}")
    return Fp8Attention.apply(query, key, value, is_causal)


class Fp8Attention(torch.autograd.Function):
    """The two passes as one differentiable function."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        """Quantise the operands, run the forward pass and convert O."""
        ctx.passes = passes_of(tuple(query.shape), key.shape[1], is_causal, is_heads_last(query))
        inputs = ctx.passes.quantised(q=query, k=key, v=value)
        outputs = ctx.passes.forward.run(inputs)
        ctx.save_for_backward(*inputs.values(), *outputs.values())
        ctx.names = (*inputs, *outputs)
        return compiled(dequantise)(outputs["o"], outputs["descale_o"], query.dtype)

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        """Quantise dO, run the backward pass and convert the gradients."""
        saved = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        outputs = ctx.passes.backward.run(saved | ctx.passes.quantised(dO=grad_output))
        gradients = ((outputs[name], outputs[f"descale_{name}"]) for name in ("dQ", "dK", "dV"))
        return *(compiled(dequantise)(*gradient, grad_output.dtype) for gradient in gradients), None


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, H, N, D] in E4M3, and what to multiply it with, [1, 1, 1, 1]."""
    largest = x.abs().amax().float().clamp(min=SMALLEST)
    return (x.float() * (LARGEST / largest)).to(E4M3), (largest / LARGEST).reshape(1, 1, 1, 1)


def dequantise(x: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in E4M3 as 16 bit."""
    return (x.float() * descale).to(dtype)


@functools.cache
def compiled(function):
    """Compile a function for any size: one pass over memory instead of several, as a user of FP8 would have it."""
    return torch.compile(function, dynamic=True)


class Passes(NamedTuple):
    """The two passes of one shape."""

    forward: "Pass"
    backward: "Pass"
    heads_last: bool

    def quantised(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Return the tensors in E4M3 and in the layout of the passes, with their descales, by name."""
        found = {}
        for name, x in tensors.items():
            x = x.transpose(1, 2).contiguous().transpose(1, 2) if self.heads_last else x.contiguous()
            found[name], found[f"descale_{name}"] = compiled(quantise)(x)
        return found


@functools.lru_cache(maxsize=4)
def passes_of(shape: tuple[int, ...], kv_heads: int, is_causal: bool, heads_last: bool) -> Passes:
    """Return the passes for a query of shape [B, H, N, D]. heads_last: all tensors are [B, N, H, D] in memory."""
    kv_shape, stats = (shape[0], kv_heads, *shape[2:]), (*shape[:3], 1)
    options = {"attn_scale": 1 / math.sqrt(shape[3]), "use_causal_mask": is_causal}
    operands = {"q": shape, "k": kv_shape, "v": kv_shape}
    scales = (*(f"descale_{name}" for name in "qkvs"), "scale_s", "scale_o")
    returned = {"o": shape, "stats": stats, "amax_s": None, "amax_o": None}
    forward = Pass(
        "sdpa_fp8", operands | dict.fromkeys(scales), returned, ("s", "o"), options | {"generate_stats": True},
        normalised_later=("s",), heads_last=heads_last,
    )  # fmt: skip
    operands |= {"o": shape, "dO": shape, "stats": stats}
    scales = [f"descale_{name}" for name in ("q", "k", "v", "o", "dO", "s", "dP")]
    scales += [f"scale_{name}" for name in ("s", "dQ", "dK", "dV", "dP")]
    returned = {"dQ": shape, "dK": kv_shape, "dV": kv_shape}
    returned |= dict.fromkeys(f"amax_{name}" for name in ("dQ", "dK", "dV", "dP"))
    scaled = ("dP", "dQ", "dK", "dV")
    operands |= dict.fromkeys(scales)
    backward = Pass("sdpa_fp8_backward", operands, returned, scaled, options, heads_last=heads_last)
    return Passes(forward, backward, heads_last)


class Pass:
    """A graph of one of cuDNN's operations, and the largest entries that its last call wrote."""

    def __init__(
        self, operation: str, inputs: Shapes, returned: Shapes, scaled: tuple[str, ...], options: dict, *,
        heads_last: bool, normalised_later: tuple[str, ...] = (),
    ):  # fmt: skip
        """Build the graph of a method of cudnn.pygraph, whose arguments are `inputs` and `options`.

        returned: what it returns, in its order. scaled: what it rounds to E4M3. normalised_later: what has 1 as its
        largest entry when it is rounded, whatever is reported.
        """
        import cudnn

        self.cudnn, self.handle = cudnn, _handle()
        self.scaled, self.heads_last = scaled, heads_last
        types = dict.fromkeys(("intermediate_data_type", "compute_data_type"), cudnn.data_type.FLOAT)
        self.graph = cudnn.pygraph(io_data_type=cudnn.data_type.FP8_E4M3, handle=self.handle, **types)
        self.inputs, self.shapes = {}, returned
        for name, shape in inputs.items():
            dim, stride, data_type = self._layout(name, shape)
            self.inputs[name] = self.graph.tensor(name=name, dim=dim, stride=stride, data_type=data_type)
        found = getattr(self.graph, operation)(**self.inputs, **options)
        self.outputs = dict(zip(returned, found, strict=True))
        for name, x in self.outputs.items():
            dim, stride, data_type = self._layout(name, returned[name])
            x.set_output(True).set_dim(dim).set_stride(stride).set_data_type(data_type)
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        self.workspace = torch.empty(self.graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
        # A row of 16 bytes each: cuDNN takes every tensor to begin at a multiple of 16.
        self.largest = torch.ones(len(scaled), 4, device="cuda")
        self.fixed = _scales(torch.ones_like(self.largest), normalised_later)
        self.is_calibrated = False

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return new outputs by name, with their scales."""
        for _ in range(1 if self.is_calibrated else CALIBRATING_CALLS):
            scales = _scales(self.largest, self.scaled)
            outputs = self._execute(inputs | scales | self.fixed)
        self.is_calibrated = True
        return outputs | scales

    def _execute(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, shape in self.shapes.items():
            if shape is not None:
                dim, stride, data_type = self._layout(name, shape)
                dtype = torch.float32 if data_type == self.cudnn.data_type.FLOAT else E4M3
                found[name] = torch.empty_strided(dim, stride, dtype=dtype, device="cuda")
        largest = {f"amax_{name}": self.largest[row, :1].reshape(1, 1, 1, 1) for row, name in enumerate(self.scaled)}
        pack = {port: buffers[name] for name, port in self.inputs.items()}
        pack |= {port: (found | largest)[name] for name, port in self.outputs.items()}
        self.cudnn.set_stream(self.handle, torch.cuda.current_stream().cuda_stream)
        self.graph.execute(pack, self.workspace, handle=self.handle)
        return found

    def _layout(self, name: str, shape: tuple[int, ...] | None) -> tuple[list[int], list[int], object]:
        """Return sizes, strides and type; statistics are [B, H, N, 1] in memory."""
        types = self.cudnn.data_type
        if shape is None:
            return [1, 1, 1, 1], [1, 1, 1, 1], types.FLOAT
        _, heads, n, head_dim = shape
        if name == "stats":
            return list(shape), [heads * n, n, 1, 1], types.FLOAT
        strides = (head_dim, heads * head_dim) if self.heads_last else (n * head_dim, head_dim)  # of heads, of tokens
        return list(shape), [heads * n * head_dim, *strides, 1], types.FP8_E4M3


def _scales(largest: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return scale_* and descale_* as new tensors: a later call does not change what a backward pass still needs."""
    scale = LARGEST / HEADROOM / largest.clamp(min=SMALLEST)
    found = {}
    for row, name in enumerate(names):
        found[f"scale_{name}"] = scale[row, :1].reshape(1, 1, 1, 1)
        found[f"descale_{name}"] = (1 / scale)[row, :1].reshape(1, 1, 1, 1)
    return found


@functools.cache
def _handle():
    import cudnn

    return cudnn.create_handle()
