"""The two ladders by level: prepare a level's inputs, then run its kernels.

Every level takes the same 16-bit tensors and gives the same results up to quantisation, so a notebook, a test or the
benchmark walks from FlashAttention to the fastest INT8 kernel by changing one number.
"""

import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from sage_kernels import hopper
from sage_kernels.common.launch import choose_launch
from sage_kernels.common.launcher import Start, start_with_triton
from sage_kernels.common.memory import last_axis_contiguous
from sage_kernels.common.quantize import Quantized, padded_head_dim, padded_length
from sage_kernels.sagebwd.backward import level0_16bit, level1_int8, level5, level6_apart
from sage_kernels.sagebwd.backward import level3_folded as backward_level3_folded
from sage_kernels.sagebwd.backward.prepare import prepare
from sage_kernels.sagebwd.backward.program import BackwardInputs, run_dkdv, run_dq
from sage_kernels.sagebwd.forward import (
    level0_flash_attention,
    level1_int8_scores,
    level2_int8,
    level3_folded,
    level4_grouped,
    level5_hopper,
)
from sage_kernels.sagebwd.forward.key_mean import key_mean
from sage_kernels.sagebwd.forward.prepare import quantize_inputs
from sage_kernels.sagebwd.forward.program import ForwardInputs, run_forward_program
from sage_kernels.sagebwd.prologue import NO_PROLOGUE
from sage_ref.prologue import Prologue

LOG2_E = math.log2(math.e)


class ForwardLevel(NamedTuple):
    name: str
    key_tile: object  # the body of the loop over key tiles; None for a level with programs of its own
    int8: str  # which tensors are read in INT8
    grouped: bool = False  # transposed copies in the order of tiles.group_columns
    dithered_key_tile: object = None  # of an unbiased O: P rounded by ordered dither
    # The module of a level that is Hopper's alone, with programs of its own: kernels, LAUNCHES and
    # run_hopper_forward(inputs, start, is_causal=..., scale=...), or run_hopper_backward.
    hopper: ModuleType | None = None

    @property
    def takes_unbiased(self) -> bool:
        return self.dithered_key_tile is not None or self.hopper is not None

    def kernels(self, padded_head_dim: int) -> tuple[str, ...]:
        """Return the programs it takes, by their names in `candidates.CANDIDATES` or the module's LAUNCHES."""
        return ("forward",)


class BackwardLevel(NamedTuple):
    name: str
    key_tile: object  # as in ForwardLevel: of dQ
    query_tile: object  # the body of the loop over query tiles: of dK and dV
    int8: str = "QKdO"
    grouped: bool = False
    hopper: ModuleType | None = None
    per_block: bool = False  # one scale per tile of P and dS, as in the paper, instead of one per row
    split_from: int = 256  # padded head size from which dK and dV take a program each
    pairs: bool = False  # P and dS are kept in float16, by units that are computed before
    causal_alone: bool = False  # without a mask it runs only if asked for

    def kernels(self, padded_head_dim: int) -> tuple[str, ...]:
        """Return the programs, as ForwardLevel does. The start of a name says what the program computes."""
        if self.hopper is not None:
            return self.hopper.kernels(padded_head_dim)
        parts = ("dq", "dkdv") if padded_head_dim < self.split_from else ("dq", "dk", "dv")
        suffix = "" if self.int8 else "_16bit"
        return tuple(part + ("_per_block" if self.per_block else suffix) for part in parts)


FORWARD_LEVELS = {
    0: ForwardLevel("FlashAttention, 16 bit", level0_flash_attention.key_tile, int8=""),
    1: ForwardLevel("INT8 Q K^T", level1_int8_scores.key_tile, int8="QK"),
    2: ForwardLevel("INT8 Q K^T and P V", level2_int8.key_tile, int8="QKV"),
    3: ForwardLevel("no conversions", level3_folded.key_tile, int8="QKV"),
    4: ForwardLevel(
        "no shuffles", level4_grouped.key_tile, int8="QKV", grouped=True,
        dithered_key_tile=level4_grouped.dithered_key_tile,
    ),
    5: ForwardLevel("Hopper: warps with different jobs", None, int8="QKV", grouped=True, hopper=level5_hopper),
}  # fmt: skip
# There was a level 4: levels 5 and 6 are faster, and its program of dQ is level 6's.
BACKWARD_LEVELS = {
    0: BackwardLevel("16 bit, split", level0_16bit.key_tile, level0_16bit.query_tile, int8=""),
    1: BackwardLevel("INT8, scales per row", level1_int8.key_tile, level1_int8.query_tile),
    2: BackwardLevel("INT8, scales per block", level1_int8.key_tile, level1_int8.query_tile, per_block=True),
    3: BackwardLevel(
        "no conversions, no shuffles, no spills", backward_level3_folded.key_tile, backward_level3_folded.query_tile,
        grouped=True, split_from=128,
    ),
    5: BackwardLevel("Hopper: one pass, dQ in integer sums", None, None, grouped=True, hopper=level5, pairs=True),
    6: BackwardLevel(
        "Hopper: dK and dV in one pass, dQ apart", None, None, grouped=True, hopper=level6_apart, pairs=True,
        causal_alone=True,
    ),
}  # fmt: skip


def obstacle(level: ForwardLevel | BackwardLevel, device: torch.device, head_dim: int) -> str | None:
    """Return why a level cannot run there, or None if it can."""
    if level.hopper is None:
        return None
    why = hopper.obstacle(device, head_dim)
    if why is None and not level.kernels(padded_head_dim(head_dim)):
        return f"it has no program for a head size of {head_dim}"
    return why


def check_lengths(level: ForwardLevel | BackwardLevel, lengths: Tensor | None) -> None:
    """Raise ValueError if a level gets lengths that it doesn't read."""
    if lengths is not None and (level.hopper is not None or not level.int8):
        raise ValueError(f"lengths: expected None for the level {level.name!r}, got a tensor")


def prepare_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    level: int,
    start: Start = start_with_triton,
    *,
    scale: float,
    smooth_k: bool,
    unbiased: bool = False,
    prologue: Prologue = NO_PROLOGUE,
    lengths: Tensor | None = None,
) -> ForwardInputs:
    """Smooth and quantise what forward level `level` reads in INT8. query [B, H, Nq, D], key, value [B, Hkv, Nk, D].

    unbiased: smooth V; `run_forward` then rounds P by ordered dither. Only for levels that take it.
    prologue: QK-norm and rotation of query and key, its tensors contiguous and in float32. Only for INT8 levels, which
    then use nothing but the shapes of the 16-bit query and key.
    lengths: int32 [B], how many tokens of each sequence there are, as many queries as keys; None: all. What stands
    behind them is neither read nor written, so results have no values there. Only for portable INT8 levels.
    """
    chosen = FORWARD_LEVELS[level]
    check_lengths(chosen, lengths)
    query, key, value = (last_axis_contiguous(x) for x in (query, key, value))
    if unbiased and not chosen.takes_unbiased:
        able = ", ".join(str(number) for number, other in FORWARD_LEVELS.items() if other.takes_unbiased)
        raise ValueError(f"unbiased: expected False for forward level {level}, got True; levels {able} take it")
    if not chosen.int8:
        if prologue.cos is not None:
            raise ValueError(f"prologue: expected none for forward level {level}, which reads 16-bit queries, got one")
        return ForwardInputs(query, key, value, None, None, None)
    k_mean = key_mean(key, prologue, start, lengths) if smooth_k else None
    v_mean = key_mean(value, NO_PROLOGUE, start, lengths) if unbiased else None
    hats = quantize_inputs(
        query,
        key,
        value,
        prologue,
        start,
        k_mean=k_mean,
        v_mean=v_mean,
        factor=scale * LOG2_E,
        with_values="V" in chosen.int8,
        grouped=chosen.grouped,
        lengths=lengths,
    )
    return ForwardInputs(query, key, value, *hats, v_mean, lengths)


def run_forward(
    inputs: ForwardInputs, level: int, start: Start = start_with_triton, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute (O, L) by forward level `level`; see `run_forward_program`."""
    chosen, device, head_dim = FORWARD_LEVELS[level], inputs.query.device, inputs.query.shape[3]
    if (why := obstacle(chosen, device, head_dim)) is not None:
        raise ValueError(f"level: expected one that can run here, got forward level {level}: {why}")
    if chosen.hopper is not None:
        return chosen.hopper.run_hopper_forward(inputs, start, is_causal=is_causal, scale=scale)
    launch = choose_launch("forward", level, padded_head_dim(head_dim), is_causal, device)
    key_tile = chosen.key_tile if inputs.v_mean is None else chosen.dithered_key_tile
    return run_forward_program(inputs, key_tile, launch, start, is_causal=is_causal, log2_scale=scale * LOG2_E)


def prepare_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    level: int,
    start: Start = start_with_triton,
    *,
    q_hat: Quantized | None = None,
    k_hat: Quantized | None = None,
    v_range: Tensor | None = None,
    is_causal: bool = False,
    for_one_run: bool = False,
    lengths: Tensor | None = None,
) -> BackwardInputs:
    """Prepare what backward level `level` reads: delta, dO and its copies, the transposes of the forward's Q^ and K^.

    An INT8 level needs the forward's q_hat and k_hat; of query and key it then uses nothing but the shapes. Levels of
    pairs alone, 5 and 6, need the forward's v_range and is_causal, for their units. for_one_run: what the level writes
    into is prepared as well, so `run_backward` takes the result once. lengths: the forward's.
    """
    chosen = BACKWARD_LEVELS[level]
    check_lengths(chosen, lengths)
    grad_output, query, key, value = (last_axis_contiguous(x) for x in (grad_output, query, key, value))
    if not chosen.int8:
        delta = query.new_zeros(*query.shape[:2], padded_length(query.shape[2]), dtype=torch.float32)
        delta[..., : query.shape[2]] = (grad_output.float() * output.float()).sum(-1)
        return BackwardInputs(query, key, value, grad_output, log_sum_exp, delta, None, None, None, None)
    needed = {"q_hat": q_hat, "k_hat": k_hat} | ({"v_range": v_range} if chosen.pairs else {})
    for name, tensor in needed.items():
        if tensor is None:
            raise ValueError(f"{name}: expected the forward's for backward level {level}, got None")
    v_range = v_range if chosen.pairs else None
    q_hat, k_hat, do_hat, delta, units = prepare(
        grad_output,
        output,
        log_sum_exp,
        q_hat,
        k_hat,
        v_range,
        start,
        grouped=chosen.grouped,
        is_causal=is_causal,
        with_sums=for_one_run and chosen.hopper is level5,
        lengths=lengths,
    )
    return BackwardInputs(query, key, value, grad_output, log_sum_exp, delta, q_hat, k_hat, do_hat, units, lengths)


def run_backward(
    inputs: BackwardInputs, level: int, start: Start = start_with_triton, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dQ, dK, dV) by backward level `level`. Deterministic: sums in no fixed order are sums of integers."""
    chosen, device, head_dim = BACKWARD_LEVELS[level], inputs.query.device, padded_head_dim(inputs.query.shape[3])
    if (why := obstacle(chosen, device, inputs.query.shape[3])) is not None:
        raise ValueError(f"level: expected one that can run here, got backward level {level}: {why}")
    if chosen.pairs and inputs.units is None:
        raise ValueError(f"inputs: expected those of prepare_backward for level {level}, with units, got units=None")
    if chosen.hopper is not None:
        return chosen.hopper.run_hopper_backward(inputs, start, is_causal=is_causal, scale=scale)
    options = {"per_block": chosen.per_block, "is_causal": is_causal, "scale": scale}
    gradients = {}
    for kernel in chosen.kernels(head_dim):
        launch = choose_launch(kernel, level, head_dim, is_causal, device)
        outputs = kernel.partition("_")[0]
        if outputs == "dq":
            gradients["dq"] = run_dq(inputs, chosen.key_tile, launch, start, **options)
            continue
        dk, dv = run_dkdv(inputs, chosen.query_tile, launch, start, outputs=outputs, **options)
        gradients |= {name: x for name, x in (("dk", dk), ("dv", dv)) if name in outputs}
    return gradients["dq"], gradients["dk"], gradients["dv"]
