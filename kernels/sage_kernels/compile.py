"""Compile every kernel of every level for GPUs that needn't be there, and read what the compiler made of it.

For each: registers, spills, shared memory and the INT8 and 16-bit tensor-core instructions found in the machine code.
An INT8 level without an INT8 tensor-core instruction fails, so does one that spills more than its record allows or
wants more shared memory than the GPU has.
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

from sage_kernels.backward.program import dkdv_program, dq_program
from sage_kernels.forward.program import forward_program
from sage_kernels.ladder import BACKWARD_LEVELS, FORWARD_LEVELS
from sage_kernels.launch import DEFAULTS, Launch, measured_launches
from sage_kernels.quantize import BLOCK_KV, BLOCK_Q

# Compute capability -> shared memory that one program may use, in bytes.
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Case(NamedTuple):
    """One kernel to compile."""

    kernel: str  # a key of launch.DEFAULTS
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


def cases(capabilities=tuple(SHARED_MEMORY), head_dims=(64, 128)) -> Iterator[Case]:
    """Every kernel of every level, causal (the longer code: it holds the loop without a mask as well)."""
    for capability in capabilities:
        for head_dim in head_dims:
            for level in range(len(FORWARD_LEVELS)):
                yield Case("forward", level, capability, head_dim, True)
            for level, chosen in enumerate(BACKWARD_LEVELS):
                for kernel in chosen.kernels(head_dim):
                    yield Case(kernel, level, capability, head_dim, True)


def is_int8(case: Case) -> bool:
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
    )


def launch_of(case: Case) -> Launch:
    launch = DEFAULTS[case.kernel]
    if case.capability == 90:
        launch = measured_launches().get((case.kernel, case.level, case.head_dim, case.is_causal), launch)
    return launch


def compiled_kernel(case: Case):
    launch = launch_of(case)
    program, constants, int8_pointers = _program(case, launch)
    names = program.arg_names
    signature = {name: "constexpr" if name in constants else _type(name, int8_pointers) for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if _is_aligned(name)}
    source = ASTSource(program, signature, constants, aligned)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
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


def _type(name: str, int8_pointers: set[str]) -> str:
    if name in int8_pointers:
        return "*i8"
    if name.endswith("_ptr"):
        is_float32 = "scale" in name or name in ("log_sum_exp_ptr", "delta_ptr")
        return "*fp32" if is_float32 else "*bf16"
    return "fp32" if name.endswith("scale") else "i32"


def _is_aligned(name: str) -> bool:
    return name.endswith(("_ptr", "_padded")) or "_stride_" in name


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
    return None
