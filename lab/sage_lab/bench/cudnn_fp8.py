"""NVIDIA's own 8-bit attention for training: cuDNN's, forward and backward in E4M3, through nvidia-cudnn-frontend.

E4M3 is a float with 3 bits after the point, up to 448. Every tensor has one scale.
- Q, K, V, dO come in 16 bit: `quantise` takes the scale from the largest entry, which counts as time. All have the
  layout of Q.
- P, O, dS, dQ, dK and dV are rounded by cuDNN, which must know their scales before: they come from the largest entries
  of the call before ("delayed scaling"), with HEADROOM. The first call of a shape is repeated until they are right.
  P is the exception in the forward pass. What cuDNN rounds there is 1 at most, before rows are divided by their sums;
  the largest entry that it reports is that of P, as the backward pass rounds it.
On Hopper: head size 128 only, and O and the gradients leave in E4M3, so they are converted to 16 bit, which counts too.

Source: the operations sdpa_fp8 and sdpa_fp8_backward of https://github.com/NVIDIA/cudnn-frontend
"""

import functools
import math

import torch
from sage_kernels.common.memory import is_heads_last
from torch import Tensor

PACKAGE, MODULE = "nvidia-cudnn-frontend", "cudnn"
HEAD_DIM = 128
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
HEADROOM = 2.0
SMALLEST = 1e-12  # of a largest entry: no division by 0
CALIBRATING_CALLS = 3  # dP's scale is right after one, so that of dQ and dK after two
# What cuDNN writes in E4M3, in the order of the rows of the buffers of largest entries.
FORWARD_SCALED, BACKWARD_SCALED = ("s", "o"), ("dP", "dQ", "dK", "dV")


def cudnn_fp8(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """O [B, H, N, D]. query [B, H, N, D], key and value [B, Hkv, N, D], 16 bit, any strides."""
    if query.shape[-1] != HEAD_DIM:
        raise ValueError(f"head_dim: expected {HEAD_DIM}, got {query.shape[-1]}")
    return Fp8Attention.apply(query, key, value, is_causal)


class Fp8Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        ctx.passes = passes = passes_of(tuple(query.shape), key.shape[1], is_causal, is_heads_last(query))
        inputs = {}
        for name, x in (("q", query), ("k", key), ("v", value)):
            inputs[name], inputs[f"descale_{name}"] = passes.quantised(x)
        outputs = passes.forward(inputs)
        ctx.save_for_backward(*inputs.values(), *outputs.values())
        ctx.names = (*inputs, *outputs)
        return compiled(dequantise)(outputs["o"], outputs["descale_o"], query.dtype)

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        inputs = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        inputs["dO"], inputs["descale_dO"] = ctx.passes.quantised(grad_output)
        outputs = ctx.passes.backward(inputs)
        gradients = (
            compiled(dequantise)(outputs[name], outputs[f"descale_{name}"], grad_output.dtype)
            for name in ("dQ", "dK", "dV")
        )
        return *gradients, None


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """[B, H, N, D] in E4M3, and what to multiply it with, [1, 1, 1, 1]."""
    largest = x.abs().amax().float().clamp(min=SMALLEST)
    return (x.float() * (LARGEST / largest)).to(E4M3), (largest / LARGEST).reshape(1, 1, 1, 1)


def dequantise(x: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() * descale).to(dtype)


@functools.cache
def compiled(function):
    """One pass over memory instead of several, as a user of FP8 would have it. Any size: one compilation."""
    return torch.compile(function, dynamic=True)


@functools.lru_cache(maxsize=4)
def passes_of(shape: tuple[int, ...], kv_heads: int, is_causal: bool, heads_last: bool) -> "Passes":
    return Passes(shape, kv_heads, is_causal, heads_last)


class Passes:
    """cuDNN's two graphs for one shape, and the largest entries that their last calls wrote.

    shape: [B, H, N, D] of the query. heads_last: [B, N, H, D] in memory.
    """

    def __init__(
        self, shape: tuple[int, ...], kv_heads: int, is_causal: bool, heads_last: bool = False, device: str = "cuda"
    ):
        self.shape, self.kv_shape = shape, (shape[0], kv_heads, *shape[2:])
        self.heads_last = heads_last
        options = {"attn_scale": 1 / math.sqrt(shape[3]), "use_causal_mask": is_causal}
        where = heads_last, device
        self.forward_graph = Graph("sdpa_fp8", self._forward_inputs(), ("o", "stats", "amax_s", "amax_o"), *where)
        self.forward_graph.build(self._outputs(("o", "stats"), FORWARD_SCALED), generate_stats=True, **options)
        gradients = ("dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP")
        self.backward_graph = Graph("sdpa_fp8_backward", self._backward_inputs(), gradients, *where)
        self.backward_graph.build(self._outputs(gradients[:3], BACKWARD_SCALED), **options)
        # A row of 16 bytes each: cuDNN takes every tensor to begin at a multiple of 16.
        self.forward_largest = torch.ones(len(FORWARD_SCALED), 4, device=device)
        self.backward_largest = torch.ones(len(BACKWARD_SCALED), 4, device=device)
        self.is_forward_calibrated = self.is_backward_calibrated = False

    def quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`quantise`, in the graphs' layout."""
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if self.heads_last else x.contiguous()
        return compiled(quantise)(x)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """O, stats (log-sum-exp) and the scales that the backward pass needs. inputs: q, k, v and their descales."""
        for _ in range(1 if self.is_forward_calibrated else CALIBRATING_CALLS):
            scales = _scales(self.forward_largest, FORWARD_SCALED)
            unnormalised = _scales(torch.ones_like(self.forward_largest), ("s",))
            outputs = self.forward_graph.run(inputs | scales | unnormalised, self.forward_largest, FORWARD_SCALED)
        self.is_forward_calibrated = True
        return outputs | scales

    def backward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """dQ, dK, dV and their descales. inputs: all of the forward pass, what it returned, dO and its descale."""
        for _ in range(1 if self.is_backward_calibrated else CALIBRATING_CALLS):
            scales = _scales(self.backward_largest, BACKWARD_SCALED)
            outputs = self.backward_graph.run(inputs | scales, self.backward_largest, BACKWARD_SCALED)
        self.is_backward_calibrated = True
        return outputs | scales

    def _forward_inputs(self) -> dict[str, tuple[int, ...] | None]:
        """Shapes by name; None is a scale."""
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        return {"q": self.shape, "k": self.kv_shape, "v": self.kv_shape} | dict.fromkeys(names)

    def _backward_inputs(self) -> dict[str, tuple[int, ...] | None]:
        names = [f"descale_{name}" for name in ("q", "k", "v", "o", "dO", "s", "dP")]
        names += [f"scale_{name}" for name in ("s", "dQ", "dK", "dV", "dP")]
        tensors = dict.fromkeys(("q", "o", "dO"), self.shape) | dict.fromkeys(("k", "v"), self.kv_shape)
        return tensors | {"stats": (*self.shape[:3], 1)} | dict.fromkeys(names)

    def _outputs(self, names: tuple[str, ...], scaled: tuple[str, ...]) -> dict[str, tuple[int, ...] | None]:
        shapes = {"stats": (*self.shape[:3], 1), "dK": self.kv_shape, "dV": self.kv_shape}
        return {name: shapes.get(name, self.shape) for name in names} | {f"amax_{name}": None for name in scaled}


def _scales(largest: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """scale_* and descale_*, new tensors: a later call does not change what a backward pass still needs."""
    scale = LARGEST / HEADROOM / largest.clamp(min=SMALLEST)
    descale = 1 / scale
    found = {}
    for row, name in enumerate(names):
        found[f"scale_{name}"] = scale[row, :1].reshape(1, 1, 1, 1)
        found[f"descale_{name}"] = descale[row, :1].reshape(1, 1, 1, 1)
    return found


class Graph:
    """One operation of cuDNN's, its tensors by name.

    operation: a method of cudnn.pygraph; inputs: shapes by the names of its arguments; returned: what it returns.
    """

    def __init__(
        self,
        operation: str,
        inputs: dict[str, tuple[int, ...] | None],
        returned: tuple[str, ...],
        heads_last: bool,
        device,
    ):
        import cudnn

        self.cudnn, self.operation, self.returned = cudnn, operation, returned
        self.heads_last, self.device = heads_last, device
        self.handle = _handle()
        types = dict.fromkeys(("intermediate_data_type", "compute_data_type"), cudnn.data_type.FLOAT)
        self.graph = cudnn.pygraph(io_data_type=cudnn.data_type.FP8_E4M3, handle=self.handle, **types)
        self.inputs = {}
        for name, shape in inputs.items():
            dim, stride, data_type = self._layout(name, shape)
            self.inputs[name] = self.graph.tensor(name=name, dim=dim, stride=stride, data_type=data_type)

    def build(self, outputs: dict[str, tuple[int, ...] | None], **options) -> None:
        """outputs: shapes of those of `returned` that are wanted."""
        found = getattr(self.graph, self.operation)(**self.inputs, **options)
        self.outputs = {name: x for name, x in zip(self.returned, found, strict=True) if name in outputs}
        self.shapes = outputs
        for name, x in self.outputs.items():
            dim, stride, data_type = self._layout(name, outputs[name])
            x.set_output(True).set_dim(dim).set_stride(stride).set_data_type(data_type)
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        self.workspace = torch.empty(self.graph.get_workspace_size(), dtype=torch.uint8, device=self.device)

    def run(self, buffers: dict[str, Tensor], largest: Tensor, scaled: tuple[str, ...]) -> dict[str, Tensor]:
        """New outputs by name; the largest entries go to the rows of `largest`."""
        found = {}
        for name in self.outputs:
            if not name.startswith("amax_"):
                found[name] = self._empty(name)
        amax = {f"amax_{name}": largest[row, :1].reshape(1, 1, 1, 1) for row, name in enumerate(scaled)}
        pack = {self.inputs[name]: buffers[name] for name in self.inputs}
        pack |= {x: (found | amax)[name] for name, x in self.outputs.items()}
        self.cudnn.set_stream(self.handle, _current_stream())
        self.graph.execute(pack, self.workspace, handle=self.handle)
        return found

    def _layout(self, name: str, shape: tuple[int, ...] | None):
        """Sizes, strides and type; statistics are [B, H, N, 1] in memory, a scale is one number."""
        types = self.cudnn.data_type
        if shape is None:
            return [1, 1, 1, 1], [1, 1, 1, 1], types.FLOAT
        _, heads, n, head_dim = shape
        if name == "stats":
            return list(shape), [heads * n, n, 1, 1], types.FLOAT
        strides = (head_dim, heads * head_dim) if self.heads_last else (n * head_dim, head_dim)  # of heads, of tokens
        return list(shape), [heads * n * head_dim, *strides, 1], types.FP8_E4M3

    def _empty(self, name: str) -> Tensor:
        batch, heads, n, head_dim = self.shapes[name]
        if name == "stats":
            return torch.empty(self.shapes[name], dtype=torch.float32, device=self.device)
        if self.heads_last:
            return torch.empty(batch, n, heads, head_dim, dtype=E4M3, device=self.device).transpose(1, 2)
        return torch.empty(batch, heads, n, head_dim, dtype=E4M3, device=self.device)


@functools.cache
def _handle():
    import cudnn

    return cudnn.create_handle()


def _current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream
