"""Compile every kernel of every level for GPUs that needn't be there, and read what the compiler made of it.

For each: registers, spills, shared memory and the INT8 and 16-bit tensor-core instructions found in the machine code.
A kernel fails whose tensor-core instructions aren't those that its level promises, which takes more registers than its
launch allows, spills more than its record allows or wants more shared memory than the GPU has, and so does a program
for Hopper in which the assembler made matmuls wait for one another, or threads meet in a bank of shared memory.

Left out for 8.9 is all but what `sagebwd_attention` and SLA2 run by themselves: 8.9 takes the launches of 8.6, and the
machine code for both has the same instructions in the same order, with another spelling of one conversion.

For 8.0, 8.6 and 8.9 Triton writes the same program, so what differs in nothing else is only assembled for each.
"""

import argparse
import io
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import triton
from sage_kernels.common.candidates import DEFAULTS, Launch
from sage_kernels.common.launch_tables import SAME_CODE, compiled_launches, measured_launches
from sage_kernels.common.launch_tables import Case as LaunchCase
from sage_kernels.common.signature import Signature, compiler_arguments
from sage_kernels.sagebwd import prologue
from sage_kernels.sagebwd.backward import level5
from sage_kernels.sagebwd.backward import prepare as before_backward
from sage_kernels.sagebwd.backward import program as backward
from sage_kernels.sagebwd.backward.level5 import units
from sage_kernels.sagebwd.forward import key_mean
from sage_kernels.sagebwd.forward import prepare as before_forward
from sage_kernels.sagebwd.forward import program as forward
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, FORWARD_LEVELS, BackwardLevel, ForwardLevel
from sage_kernels.sla2 import lists, pieces, routing
from sage_kernels.sla2 import prepare as before_sla2
from sage_kernels.sla2.backward import program as sla2_backward
from sage_kernels.sla2.forward import level0_as_printed, level1_lists
from sage_kernels.sla2.forward import program as sla2_forward
from sage_kernels.sla2.ladder import BACKWARD_KERNELS, HOPPER_BACKWARD, LEVELS
from sage_kernels.sla2.ladder import Level as Sla2Level
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from sage_lab.bench.bank_conflicts import conflicts
from sage_lab.command_line import Failed, positive
from sage_lab.records import markdown_table, replaced, write_record

RECORD = Path(__file__).parent / "compile_record.json"  # name of a case -> spills
# Compute capability -> shared memory that one program may use, in bytes.
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
SAME_PTX = (80, 86, 89)  # compute capabilities for which Triton writes the same PTX, but for the name of its target
# SLA2's programs that run around its ladder, with the warps they are launched with, or all of the launch.
SLA2_AROUND = {
    "sla2_prepare": before_sla2.LAUNCH, "sla2_join": sla2_backward.JOIN_WARPS,
    "sla2_linear_key": sla2_backward.LINEAR_KEY_WARPS, "sla2_list": 1, "sla2_top_blocks": 1,
    "sla2_sequence_mean": 4, "sla2_pieces": pieces.WARPS,
}  # fmt: skip
SLA2_ONCE = ("sla2_list", "sla2_top_blocks", "sla2_sequence_mean", "sla2_pieces")  # they hardly depend on the head size
# Likewise of SageBwd's: what runs before both passes, and after the backward one. With "rotary" in
# front: as a prologue with QK-norm has it.
SAGEBWD_AROUND = {
    "key_sums": key_mean.WARPS, "rotary_key_sums": key_mean.WARPS, "key_mean": 4,
    "prepare_forward": before_forward.launch(128),
    "rotary_prepare_forward": before_forward.launch(128),
    "prepare_backward": before_backward.WARPS, "finish": 4, "rotate_back": prologue.WARPS,
}  # fmt: skip
BEFORE_FORWARD = ("key_sums", "rotary_key_sums", "key_mean", "prepare_forward", "rotary_prepare_forward")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MATMUL = r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[^;]*"
LOAD_LOCAL, STORE_LOCAL = 0x983, 0x387  # LDL and STL: the low 12 of the 128 bits of an instruction


class Case(NamedTuple):
    """One kernel to compile."""

    kernel: str  # a key of DEFAULTS, of a Hopper level's LAUNCHES or of SLA2_AROUND
    level: int
    capability: int
    head_dim: int
    is_causal: bool
    launch: Launch | None = None  # instead of what `ladder` launches
    is_unbiased: bool = False

    @property
    def name(self) -> str:
        mask = "causal" if self.is_causal else "full"
        return f"{self.kernel} level {self.level} D{self.head_dim} {mask}" + " unbiased" * self.is_unbiased


class Source(NamedTuple):
    """A program and what the compiler must be told to make of it what `ladder` launches."""

    program: Any
    signature: Signature
    constants: dict
    options: dict


class Compiled(NamedTuple):
    registers: int
    spills: int  # local-memory instructions, loads and stores
    shared: int  # bytes
    int8_instructions: int
    float16_instructions: int
    serialized: tuple[str, ...]  # the assembler's warnings of matmuls that wait for one another, on Hopper
    conflicts: tuple[str, ...]  # of a Hopper program's threads in shared memory, see `bank_conflicts`


def cases(capabilities=tuple(SHARED_MEMORY), head_dims=(64, 128)) -> Iterator[Case]:
    """Every kernel of the SageBwd levels, causal (the longer code: it holds the loop without a mask as well)."""
    for capability in capabilities:
        for head_dim in head_dims:
            for levels in (FORWARD_LEVELS, BACKWARD_LEVELS):
                for level in compiled_levels(levels, capability):
                    for kernel in levels[level].kernels(head_dim):
                        yield Case(kernel, level, capability, head_dim, True)


def around_cases(capabilities=tuple(SHARED_MEMORY)) -> Iterator[Case]:
    """The programs that run before and after SageBwd's last levels, for the head size that takes more registers."""
    for capability in capabilities:
        if capability not in SAME_CODE:
            last = {levels: compiled_levels(levels, capability)[-1] for levels in (FORWARD_LEVELS, BACKWARD_LEVELS)}
            for kernel in BEFORE_FORWARD:
                yield Case(kernel, last[FORWARD_LEVELS], capability, 128, True)
            yield Case("prepare_backward", last[BACKWARD_LEVELS], capability, 128, True)
            for level in compiled_levels(BACKWARD_LEVELS, capability):
                if BACKWARD_LEVELS[level].hopper is level5:
                    yield Case("finish", level, capability, 128, True)
            yield Case("rotate_back", last[BACKWARD_LEVELS], capability, 128, True)


def unbiased_cases(capabilities=tuple(SHARED_MEMORY), head_dims=(64, 128)) -> Iterator[Case]:
    """The forward levels that take `unbiased`, and what runs before the last of them."""
    for case in cases(capabilities, head_dims):
        if case.kernel == "forward" and level_of(case).takes_unbiased:
            yield case._replace(is_unbiased=True)
    for case in around_cases(capabilities):
        if case.kernel.endswith("prepare_forward"):
            yield case._replace(is_unbiased=True)


def compiled_levels(levels: Sequence[ForwardLevel | BackwardLevel | Sla2Level], capability: int) -> list[int]:
    """The levels of a ladder that can run there; of one of SAME_CODE the one that is taken there."""
    found = [level for level, chosen in enumerate(levels) if capability == 90 or chosen.hopper is None]
    return found[-1:] if capability in SAME_CODE else found


def sla2_cases(capabilities=tuple(SHARED_MEMORY), head_dims=(64, 128)) -> Iterator[Case]:
    """Every program of the SLA2 levels. The level of one that several run is the first; the backward's are 0 and 1."""
    others = [("sla2_mix", 1), ("sla2_prepare", 3)]  # which makes Q^ and V^ as well
    others += [(kernel, 0) for kernel in (*BACKWARD_KERNELS, "sla2_join")]
    of_hopper = [(kernel, 1) for kernel in (*HOPPER_BACKWARD, "sla2_linear_key")]
    for capability in capabilities:
        levels = compiled_levels(LEVELS, capability)
        known = [*((LEVELS[level].kernel, level) for level in levels), *others, *of_hopper * (capability == 90)]
        for head_dim in head_dims:
            for kernel, level in known:
                if capability not in SAME_CODE or kernel in (LEVELS[levels[-1]].kernel, *BACKWARD_KERNELS):
                    yield Case(kernel, level, capability, head_dim, False)
        for kernel in SLA2_ONCE:
            if capability not in SAME_CODE:
                yield Case(kernel, 0, capability, head_dims[0], False)


def named(case: Case) -> str:
    """Its name in the record."""
    return f"sm_{case.capability} {case.name}"


def level_of(case: Case) -> ForwardLevel | BackwardLevel:
    """A SageBwd case's level."""
    return (FORWARD_LEVELS if case.kernel in ("forward", *BEFORE_FORWARD) else BACKWARD_LEVELS)[case.level]


def is_sla2(case: Case) -> bool:
    return case.kernel.startswith("sla2_")


def hopper_of(case: Case) -> ModuleType | None:
    """The module of a level of Hopper's, in Gluon; None if it is another's program."""
    if is_sla2(case):
        forward = {level.kernel: level.hopper for level in LEVELS}
        return (forward | HOPPER_BACKWARD).get(case.kernel)
    return None if case.kernel in SAGEBWD_AROUND else level_of(case).hopper


def is_int8(case: Case) -> bool:
    if is_sla2(case):
        return case.kernel == LEVELS[case.level].kernel and bool(LEVELS[case.level].int8)
    return case.kernel not in SAGEBWD_AROUND and bool(level_of(case).int8)


def launch_of(case: Case) -> Launch:
    """What `ladder` launches; of a level of Hopper's, the warps and registers that compute."""
    if case.launch is not None:
        return case.launch
    if known := (SLA2_AROUND | SAGEBWD_AROUND).get(case.kernel):
        return known if isinstance(known, Launch) else Launch(0, 0, known, 1)
    if (hopper := hopper_of(case)) is not None:
        return hopper.LAUNCHES[case.kernel]
    known = measured_launches() if case.capability == 90 else compiled_launches(case.capability)
    return known.get(LaunchCase(case.kernel, case.level, case.head_dim, case.is_causal), DEFAULTS[case.kernel])


def source_of(case: Case) -> Source:
    """The program of a case as it is launched with bfloat16 tensors."""
    if case.kernel in SAGEBWD_AROUND:
        return _around_source(case)
    return _sla2_source(case) if is_sla2(case) else _sagebwd_source(case)


def _around_source(case: Case) -> Source:
    level, options, head_dim = level_of(case), launch_of(case).options, case.head_dim
    with_prologue = case.kernel.startswith("rotary_")
    if case.kernel.endswith("key_sums"):
        signature = key_mean.sums_signature(with_prologue=with_prologue)
        return Source(key_mean.key_sums_program, signature, key_mean.sums_constants(head_dim), options)
    if case.kernel == "key_mean":
        return Source(key_mean.key_mean_program, key_mean.mean_signature(), key_mean.mean_constants(head_dim), options)
    if case.kernel.endswith("prepare_forward"):
        signature = before_forward.signature(with_prologue=with_prologue, is_unbiased=case.is_unbiased)
        constants = before_forward.constants(head_dim, level.grouped)
        return Source(before_forward.prepare_program, signature, constants, options)
    if case.kernel == "rotate_back":
        signature = prologue.signature()
        return Source(prologue.rotate_back_program, signature, prologue.constants(head_dim), options)
    if case.kernel == "prepare_backward":
        signature = before_backward.signature(with_units=level.pairs)
        constants = before_backward.constants(head_dim, level.grouped, case.is_causal)
        return Source(before_backward.prepare_program, signature, constants, options)
    return Source(units.finish_program, units.finish_signature(), units.finish_constants(head_dim), options)


def _sagebwd_source(case: Case) -> Source:
    level, launch, head_dim, is_causal = level_of(case), launch_of(case), case.head_dim, case.is_causal
    if level.hopper is not None:
        program, constants, options = level.hopper.program_of(case.kernel)
        constants = constants | {"D": head_dim, "DP": head_dim, "IS_CAUSAL": is_causal}
        if "RAGGED" in program.arg_names:  # the last block of keys isn't full: more code, as a causal mask is
            constants["RAGGED"] = is_causal
        unbiased = {"is_unbiased": True} if case.is_unbiased else {}
        return Source(program, level.hopper.signature(case.kernel, head_dim, **unbiased), constants, options)
    if case.kernel == "forward":
        key_tile = level.dithered_key_tile if case.is_unbiased else level.key_tile
        constants = forward.constants(key_tile, head_dim, launch, is_causal)
        signature = forward.signature(level.int8, is_unbiased=case.is_unbiased)
        return Source(forward.forward_program, signature, constants, launch.options)
    signature = (backward.dq_signature if case.kernel.startswith("dq") else backward.dkdv_signature)(bool(level.int8))
    if case.kernel.startswith("dq"):
        constants = backward.dq_constants(level.key_tile, head_dim, launch, is_causal, level.per_block)
        return Source(backward.dq_program, signature, constants, launch.options)
    outputs = case.kernel.partition("_")[0]
    constants = backward.dkdv_constants(level.query_tile, head_dim, launch, is_causal, level.per_block, outputs)
    return Source(backward.dkdv_program, signature, constants, launch.options)


def _sla2_source(case: Case) -> Source:
    head_dim, launch, level = case.head_dim, launch_of(case), LEVELS[case.level]
    if (hopper := hopper_of(case)) is not None:
        program, constants, options = hopper.program_of(case.kernel)
        return Source(program, hopper.signature(head_dim), constants | {"D": head_dim, "DP": head_dim}, options)
    sparse = sla2_forward.signature(int8=bool(level.int8), fused=level.fused, save=True)
    sources = {
        "sla2_as_printed": (
            level0_as_printed.as_printed_program, level0_as_printed.signature(),
            sla2_forward.tile_constants(head_dim, launch),
        ),
        "sla2_mix": (level1_lists.mix_program, level1_lists.signature(), level1_lists.constants(head_dim, launch)),
        "sla2_linear_query": (
            sla2_backward.linear_query_program, sla2_backward.linear_query_signature(smoothed=True),
            sla2_backward.linear_query_constants(head_dim, launch),
        ),
        "sla2_query": (
            sla2_backward.query_program, sla2_backward.query_signature(),
            sla2_backward.query_constants(head_dim, launch),
        ),
        "sla2_key": (
            sla2_backward.key_program, sla2_backward.key_signature(), sla2_backward.key_constants(head_dim, launch),
        ),
        "sla2_join": (
            sla2_backward.join_program, sla2_backward.join_signature(), sla2_backward.join_constants(head_dim),
        ),
        "sla2_linear_key": (
            sla2_backward.linear_key_program, sla2_backward.linear_key_signature(),
            sla2_backward.join_constants(head_dim),
        ),
        "sla2_prepare": (before_sla2.prepare_program, before_sla2.signature(), before_sla2.constants(head_dim)),
        "sla2_pieces": (pieces.pieces_program, pieces.signature(), {"WIDTH": 512}),
        "sla2_list": (lists.list_program, lists.signature(), {"WIDTH": 512}),
        "sla2_top_blocks": (routing.top_blocks_program, routing.top_blocks_signature(), {"WIDTH": 512}),
        "sla2_sequence_mean": (
            routing.sequence_mean_program, routing.sequence_mean_signature(),
            routing.sequence_mean_constants(head_dim, routing.MASK_BLOCK_KV),
        ),
    }  # fmt: skip
    loop = sla2_forward.sparse_forward_program, sparse, sla2_forward.constants(level.key_tile, head_dim, launch)
    return Source(*sources.get(case.kernel, loop), launch.options)


def has_16_bit_matmul(case: Case) -> bool:
    """dP is one everywhere; in SLA2 so is phi(Q) H."""
    if case.kernel == "forward":
        return level_of(case).int8 != "QKV"
    return case.kernel not in ("dv", *SLA2_ONCE, *SAGEBWD_AROUND)


def compiled_kernel(case: Case):
    """Triton's compiled kernel, for the case's GPU."""
    program, signature, constants, options = source_of(case)
    source_type = ASTSource if hopper_of(case) is None else GluonASTSource
    source = source_type(program, *compiler_arguments(program, signature, constants))
    return triton.compile(source, target=GPUTarget("cuda", case.capability, 32), options=options)


def compile_case(case: Case) -> Compiled:
    """What the compiler made of one kernel, launched as `ladder` would launch it on that GPU."""
    return compile_kernel(case)[1]


def compile_kernel(case: Case) -> tuple[Any, Compiled]:
    """Triton's compiled kernel and what it is like. Without Triton's cache: ptxas must say its word."""
    with knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as log, conflicts() as found:
        knobs.nvidia.dump_ptxas_log = True
        kernel = compiled_kernel(case)
    compiled = compiled_from(kernel, kernel.asm["cubin"], log.getvalue())
    return kernel, compiled._replace(conflicts=tuple(sorted(set(found))))


def compile_same(cases: Sequence[Case]) -> list[Compiled]:
    """The same as compile_case of each, for cases for which Triton writes the same PTX: it does so for the first."""
    kernel, first = compile_kernel(cases[0])
    return [first, *(compiled_from(kernel, *assembled(kernel.asm["ptx"], case)) for case in cases[1:])]


def assembled(ptx: str, case: Case) -> tuple[bytes, str]:
    """(cubin, what the assembler says) of PTX that was written for another of SAME_PTX."""
    backend = CUDABackend(GPUTarget("cuda", case.capability, 32))
    options = backend.parse_options(source_of(case).options)
    ptx = re.sub(r"^\.target sm_\d+", f".target sm_{case.capability}", ptx, flags=re.MULTILINE)
    with knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        cubin = backend.make_cubin(ptx, {}, options, case.capability)
    return cubin, log.getvalue()


def compiled_from(kernel, cubin: bytes, said: str) -> Compiled:
    """What Triton's compiled kernel is like, with this machine code, of which the assembler said this."""
    return Compiled(
        registers=int(re.search(r"Used (\d+) registers", said)[1]),
        spills=local_memory_instructions(cubin),
        shared=kernel.metadata.shared,
        int8_instructions=count_int8(kernel.asm["ptx"]),
        float16_instructions=count_float16(kernel.asm["ptx"]),
        serialized=tuple(sorted(set(re.findall(r"\bC75\d\d\b", said)))),  # C7510, C7514 and their like
        conflicts=(),
    )


def count_int8(ptx: str) -> int:
    return len(re.findall(rf"{MATMUL}(?:\.s8|::i8)", ptx))


def count_float16(ptx: str) -> int:
    return len(re.findall(rf"{MATMUL}(?:\.f16\.f16|\.bf16|::f16)", ptx))


def local_memory_instructions(cubin: bytes) -> int:
    """How many LDL and STL a kernel has: spills. Its code is what the ELF sections .text... hold, 16 bytes each.

    The disassembler says the same, and takes longer to start than many a kernel to compile.
    """
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<I20xQQ", cubin, sections + i * size) for i in range(count)]  # name, offset, length
    first_name = headers[names][1]
    found = 0
    for name, offset, length in headers:
        if cubin.startswith(b".text", first_name + name):
            lowest = (int.from_bytes(cubin[i : i + 2], "little") & 0xFFF for i in range(offset, offset + length, 16))
            found += sum(code in (LOAD_LOCAL, STORE_LOCAL) for code in lowest)
    return found


def machine_code(kernel) -> str:
    """The GPU's own instructions (SASS), one a line."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [TOOLS / "nvdisasm", "-c", cubin.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def same_ptx(wanted: Sequence[Case]) -> list[list[Case]]:
    """All of `wanted`, those together for which Triton writes the same PTX."""
    groups = {}
    for case in wanted:
        source = source_of(case)
        family = SAME_PTX if case.capability in SAME_PTX else case.capability
        parts = (tuple(part.items()) for part in (source.signature, source.constants, source.options))
        groups.setdefault((family, source.program, *parts), []).append(case)
    return list(groups.values())


def compile_all(wanted: Sequence[Case], workers: int) -> Iterator[tuple[Case, Compiled]]:
    """Compile in parallel processes; cases that share their PTX come together."""
    groups = same_ptx(wanted)
    with ProcessPoolExecutor(workers) as pool:
        for cases, compiled in zip(groups, pool.map(compile_same, groups), strict=True):
            yield from zip(cases, compiled, strict=True)


def complaint(case: Case, compiled: Compiled, recorded_spills: int) -> str | None:
    """What is wrong with a compiled kernel, or None."""
    for bits, found, expected in (
        ("INT8", compiled.int8_instructions, is_int8(case)),
        ("16-bit", compiled.float16_instructions, has_16_bit_matmul(case)),
    ):
        if bool(found) != expected:
            return f"expected {'' if expected else 'no '}{bits} tensor-core instructions, found {found}"
    allowed = launch_of(case).max_registers or 255
    if not 0 < compiled.registers <= allowed:
        return f"{compiled.registers} registers, its launch allows {allowed}"
    if compiled.spills > recorded_spills:
        return f"{compiled.spills} spill instructions, {recorded_spills} recorded"
    if compiled.shared > SHARED_MEMORY[case.capability]:
        return f"{compiled.shared} bytes of shared memory, the GPU has {SHARED_MEMORY[case.capability]}"
    if compiled.serialized:
        return f"matmuls wait for one another: {', '.join(compiled.serialized)}"
    if compiled.conflicts:
        return f"threads meet in a bank of shared memory: {', '.join(compiled.conflicts)}"
    return None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--capability", type=int, nargs="+", choices=SHARED_MEMORY, help="only these")
    parser.add_argument("--only", metavar="TEXT", help="only names with this in them, as 'forward level 4'")
    parser.add_argument("--update", action="store_true", help="record the spills found as the new limit")
    parser.add_argument("--workers", type=positive, default=2, help="processes")


def run(options: argparse.Namespace) -> None:
    """Compile every level for sm_80 to sm_120 and check the result."""
    every = [*cases(), *around_cases(), *unbiased_cases(), *sla2_cases()]
    wanted = [
        case for case in every
        if (not options.capability or case.capability in options.capability) and (options.only or "") in named(case)
    ]  # fmt: skip
    if not wanted:
        raise ValueError(f"only: expected a part of a name such as {named(every[0])!r}, got {options.only!r}")
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    rows, complaints = [], []
    for case, compiled in compile_all(wanted, options.workers):
        name = named(case)
        wrong = complaint(case, compiled, 10**6 if options.update else recorded.get(name, 0))
        rows.append({"kernel": name} | compiled._asdict())
        print(f"{len(rows)} of {len(wanted)}: {name}", file=sys.stderr)
        recorded[name] = compiled.spills
        if wrong:
            complaints.append(f"{name}: {wrong}")
    names = [*map(named, wanted)]
    rows.sort(key=lambda row: names.index(row["kernel"]))
    print(markdown_table(rows[0], [row.values() for row in rows]))
    if options.json:
        write_record(options.json, rows, command=options.command)
    if options.update:
        with replaced(RECORD) as temporary:
            known = {name: recorded[name] for name in map(named, every) if name in recorded}  # no level that is gone
            temporary.write_text(json.dumps(known, indent=1) + "\n")
    if complaints:
        print("\n".join(complaints), file=sys.stderr)
        raise Failed(f"{len(complaints)} of {len(rows)} kernels are not as they should be")
    print(f"{len(rows)} kernels compiled; none spills more than recorded, all use the tensor cores they promise.")
