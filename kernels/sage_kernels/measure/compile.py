"""Compile every kernel of every level for GPUs that needn't be there, and read what the compiler made of it.

For each: registers, spills, shared memory and the INT8 and 16-bit tensor-core instructions found in the machine code.
An INT8 level without an INT8 tensor-core instruction fails, so does one that spills more than its record allows or
wants more shared memory than the GPU has, and so does a program for Hopper in which the assembler made matmuls wait for
one another.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from sage_kernels.common.launch import DEFAULTS, Launch, measured_launches
from sage_kernels.common.quantize import BLOCK_KV, BLOCK_Q
from sage_kernels.sagebwd.backward import level0_16bit
from sage_kernels.sagebwd.backward.program import dkdv_program, dq_program
from sage_kernels.sagebwd.forward.program import forward_program
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, FORWARD_LEVELS
from sage_kernels.sla2 import routing
from sage_kernels.sla2.backward import program as sla2_backward
from sage_kernels.sla2.forward.level0_as_printed import as_printed_program
from sage_kernels.sla2.forward.level1_lists import mix_program
from sage_kernels.sla2.forward.program import sparse_forward_program
from sage_kernels.sla2.ladder import LEVELS
from sage_kernels.sla2.lists import list_program
from sage_kernels.sla2.sums import key_block_program

# Compute capability -> shared memory that one program may use, in bytes.
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# Pointers to float32, besides those to scales; to int32; to int8 always.
FLOAT32 = {
    f"{name}_ptr"
    for name in (
        "log_sum_exp", "delta", "alpha", "alpha_log_sum_exp", "unsmoothed", "dalpha", "k_mean", "k_bar", "mean",
        "means", "scores", "factors", "step",
    )
}  # fmt: skip
INT32, INT8 = {"entries_ptr", "counts_ptr"}, {"q_hat_ptr", "vt_hat_ptr"}
# SLA2's programs that run around its ladder, with the warps they are launched with.
SLA2_AROUND = {"sla2_key_blocks": 8, "sla2_list": 1, "sla2_top_blocks": 1, "sla2_sequence_mean": 4}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Case(NamedTuple):
    """One kernel to compile."""

    kernel: str  # a key of launch.DEFAULTS or SLA2_AROUND
    level: int
    capability: int
    head_dim: int
    is_causal: bool

    @property
    def name(self) -> str:
        return f"{self.kernel} level {self.level} D{self.head_dim} {'causal' if self.is_causal else 'full'}"


class Compiled(NamedTuple):
    registers: int
    spills: int  # local-memory instructions, loads and stores
    shared: int  # bytes
    int8_instructions: int
    float16_instructions: int
    serialized: tuple[str, ...]  # the assembler's warnings of matmuls that wait for one another, on Hopper


def cases(capabilities=tuple(SHARED_MEMORY), head_dims=(64, 128)) -> Iterator[Case]:
    """Every kernel of every SageBwd level, causal (the longer code: it holds the loop without a mask as well)."""
    for capability in capabilities:
        for head_dim in head_dims:
            for level, chosen in enumerate(FORWARD_LEVELS):
                if capability == 90 or chosen.hopper is None:
                    yield Case("forward", level, capability, head_dim, True)
            for level, chosen in enumerate(BACKWARD_LEVELS):
                for kernel in chosen.kernels(head_dim) if capability == 90 or chosen.hopper is None else ():
                    yield Case(kernel, level, capability, head_dim, True)


def sla2_cases(capabilities=tuple(SHARED_MEMORY), head_dims=(64, 128)) -> Iterator[Case]:
    """Every program of every SLA2 level. The level of one that several run is the first; the backward's is 0."""
    for capability in capabilities:
        for head_dim in head_dims:
            kernels = [(chosen.kernel, level) for level, chosen in enumerate(LEVELS)]
            kernels += [("sla2_mix", 1), ("sla2_key_blocks", 3)]  # which makes V^ as well
            kernels += [(kernel, 0) for kernel in ("sla2_linear_query", "sla2_query", "sla2_key")]
            for kernel, level in kernels:
                yield Case(kernel, level, capability, head_dim, False)
        for kernel in ("sla2_list", "sla2_top_blocks", "sla2_sequence_mean"):  # they hardly depend on the head size
            yield Case(kernel, 0, capability, head_dims[0], False)


def is_int8(case: Case) -> bool:
    if case.kernel.startswith("sla2_"):
        return case.kernel == LEVELS[case.level].kernel and LEVELS[case.level].int8
    return bool(FORWARD_LEVELS[case.level].int8) if case.kernel == "forward" else BACKWARD_LEVELS[case.level].int8


def compile_case(case: Case) -> Compiled:
    """Compile one kernel as `ladder` would launch it on that GPU."""
    kernel = compiled_kernel(case)
    return Compiled(
        registers=int(re.search(r"REG:(\d+)", _tool(kernel, "cuobjdump", "-res-usage"))[1]),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", machine_code(kernel))),
        shared=kernel.metadata.shared,
        int8_instructions=_count_int8(kernel.asm["ptx"]),
        float16_instructions=_count_float16(kernel.asm["ptx"]),
        serialized=serialized(kernel.asm["ptx"]) if case.capability == 90 else (),
    )


def is_hopper(case: Case) -> bool:
    """Whether it is a level of Hopper's, in Gluon."""
    if case.kernel.startswith("sla2_"):
        return False
    return (FORWARD_LEVELS if case.kernel == "forward" else BACKWARD_LEVELS)[case.level].hopper is not None


def launch_of(case: Case) -> Launch:
    """What `ladder` launches; of a level of Hopper's, the warps and registers that compute."""
    if case.kernel in SLA2_AROUND:
        return Launch(0, 0, SLA2_AROUND[case.kernel], 1)
    if is_hopper(case):
        return _hopper_level(case).LAUNCHES[case.kernel]
    launch = DEFAULTS[case.kernel]
    if case.capability == 90:
        launch = measured_launches().get((case.kernel, case.level, case.head_dim, case.is_causal), launch)
    return launch


def compiled_kernel(case: Case):
    launch, source_type, types = launch_of(case), ASTSource, {}
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "maxnreg": launch.max_registers}
    if is_hopper(case):
        source_type, int8_pointers = GluonASTSource, set()
        program, constants, options = _hopper_level(case).program_of(case.kernel)
        types = _hopper_level(case).signature(case.kernel, case.head_dim)
        if "RAGGED" in program.arg_names:
            constants = constants | {"RAGGED": case.is_causal}  # a mask more, as in the causal case
        constants = constants | {"D": case.head_dim, "DP": case.head_dim, "IS_CAUSAL": case.is_causal}
    else:
        describe = _sla2_program if case.kernel.startswith("sla2_") else _program
        program, constants, int8_pointers = describe(case, launch)
    names = program.arg_names
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name) or _type(name, int8_pointers) for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if _is_aligned(name) and name not in constants
    }
    source = source_type(program, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", case.capability, 32), options=options)


def machine_code(kernel) -> str:
    """The GPU's own instructions (SASS), one a line."""
    return _tool(kernel, "nvdisasm", "-c")


def _count_int8(ptx: str) -> int:
    return len(re.findall(r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[^;]*(?:\.s8|::i8)", ptx))


def _count_float16(ptx: str) -> int:
    return len(re.findall(r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[^;]*(?:\.f16\.f16|\.bf16|::f16)", ptx))


def _program(case: Case, launch: Launch):
    constants = {
        "D": case.head_dim, "DP": case.head_dim, "BLOCK_Q": launch.block_q, "BLOCK_KV": launch.block_kv,
        "SCALE_Q": BLOCK_Q, "SCALE_KV": BLOCK_KV, "IS_CAUSAL": case.is_causal,
    }  # fmt: skip
    if case.kernel == "forward":
        level = FORWARD_LEVELS[case.level]
        int8 = {name for name, letter in (("q_ptr", "Q"), ("k_ptr", "K"), ("v_ptr", "V")) if letter in level.int8}
        return forward_program, constants | {"KEY_TILE": level.key_tile, "INT8_QK": "Q" in level.int8}, int8
    level = BACKWARD_LEVELS[case.level]
    constants |= {"IS_INT8": level.int8, "PER_BLOCK": level.per_block}
    int8 = {"q_ptr", "k_ptr", "qt_ptr", "kt_ptr", "dot_ptr"} if level.int8 else set()
    if case.kernel.startswith("dq"):
        return dq_program, constants | {"QUERY_ROWS": level.query_rows}, int8
    parts = {"WITH_DK": "dk" in case.kernel, "WITH_DV": "dv" in case.kernel}
    return dkdv_program, constants | {"KEY_ROWS": level.key_rows} | parts, int8


def _sla2_program(case: Case, launch: Launch):
    """As `_program`; a pointer that a level doesn't have is the constant None, as in its launch."""
    sizes, chosen = {"D": case.head_dim, "DP": case.head_dim}, LEVELS[case.level]
    tiles = sizes | {"TILE_Q": launch.block_q, "BLOCK_Q": routing.BLOCK_Q, "BLOCK_KV": routing.BLOCK_KV}
    linear = sizes | {"SMOOTHED": True, "BLOCK_Q": routing.BLOCK_Q, "COLUMNS": launch.block_kv}
    mix = sizes | {"TILE_Q": launch.block_q, "BLOCK_Q": routing.BLOCK_Q}
    key_block = sizes | {"BLOCK": routing.BLOCK_KV, "INT8": True}
    programs = {
        "sla2_as_printed": (as_printed_program, tiles),
        "sla2_mix": (mix_program, mix),
        "sla2_linear_query": (sla2_backward.linear_query_program, linear),
        "sla2_query": (sla2_backward.query_program, tiles | {"QUERY_ROWS": level0_16bit.query_rows}),
        "sla2_key": (sla2_backward.key_program, tiles | {"KEY_ROWS": level0_16bit.key_rows}),
        "sla2_key_blocks": (key_block_program, key_block),
        "sla2_list": (list_program, {"WIDTH": 512}),
        "sla2_top_blocks": (routing.top_blocks_program, {"WIDTH": 512}),
        "sla2_sequence_mean": (
            routing.sequence_mean_program, {"D": case.head_dim, "BLOCK": routing.BLOCK_KV, "STEP": 64},
        ),
    }  # fmt: skip
    if case.kernel in programs:
        return *programs[case.kernel], set()
    loop = {"KEY_TILE": chosen.key_tile, "INT8": chosen.int8, "FUSED": chosen.fused, "SAVE": True}
    if not chosen.int8:
        loop |= dict.fromkeys(("q_hat_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr"))
    if not chosen.fused:
        loop["o_ptr"] = None
    return sparse_forward_program, tiles | loop, {"k_ptr", "v_ptr"} if chosen.int8 else set()


def _hopper_level(case: Case):
    return (FORWARD_LEVELS if case.kernel == "forward" else BACKWARD_LEVELS)[case.level].hopper


def _type(name: str, int8_pointers: set[str]) -> str:
    if name in int8_pointers | INT8:
        return "*i8"
    if name in INT32:
        return "*i32"
    if name == "mask_ptr":
        return "*i1"
    if name.endswith("_ptr"):
        return "*fp32" if "scale" in name or name in FLOAT32 else "*bf16"
    return "fp32" if name.endswith("scale") else "i32"


def _is_aligned(name: str) -> bool:
    return name.endswith(("_ptr", "_padded")) or "_stride_" in name


def serialized(ptx: str) -> tuple[str, ...]:
    """C7510, C7514 and their like for Hopper: Triton runs the same assembler and keeps its warnings to itself."""
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(ptx)
        file.flush()
        command = [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", "-o", "/dev/null", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(sorted(set(re.findall(r"\bC75\d\d\b", said.stdout + said.stderr))))


def _tool(kernel, name: str, *arguments: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        return subprocess.run([TOOLS / name, *arguments, cubin.name], capture_output=True, text=True, check=True).stdout


def compile_all(wanted: list[Case], workers: int) -> Iterator[tuple[Case, Compiled]]:
    """Compile in parallel processes, in the order of `wanted`."""
    with ProcessPoolExecutor(workers) as pool:
        yield from zip(wanted, pool.map(compile_case, wanted), strict=True)


def complaint(case: Case, compiled: Compiled, recorded_spills: int) -> str | None:
    """What is wrong with a compiled kernel, or None."""
    if is_int8(case) and not compiled.int8_instructions:
        return "no INT8 tensor-core instruction"
    if compiled.spills > recorded_spills:
        return f"{compiled.spills} spill instructions, {recorded_spills} recorded"
    if compiled.shared > SHARED_MEMORY[case.capability]:
        return f"{compiled.shared} bytes of shared memory, the GPU has {SHARED_MEMORY[case.capability]}"
    if compiled.serialized:
        return f"matmuls wait for one another: {', '.join(compiled.serialized)}"
    return None
