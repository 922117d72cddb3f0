"""Compile every kernel of every level for GPUs that this machine need not have, and check the machine code.

For each kernel: registers, spills, shared memory, and the INT8 and 16-bit tensor-core instructions in the machine code.
A kernel fails if its tensor-core instructions are not those that its level promises, if it takes more registers than
its launch allows, if it spills more than its record allows, or if it needs more shared memory than the GPU has. A
program for Hopper also fails if the assembler made matmuls wait for one another, or if threads meet in a bank of shared
memory.

To find the programs, the kernels' own code runs on tensors without memory, with a `Start` that notes each launch.
Triton's launcher derives the types from the noted arguments.

The record has a digest of each kernel as Triton's front end writes it, which takes a tenth of a second. Only kernels
whose digest differs from the record are compiled; `--all` compiles all. It has one of all sources, too: while they and
Triton are the same, nothing is left to do.

For 8.9 nothing is compiled: it takes the launches of 8.6, and the machine code for both has the same instructions in
the same order, apart from the spelling of one conversion.
"""

import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import sage_kernels
import torch
import triton
from sage_kernels.common.candidates import DEFAULTS, Launch
from sage_kernels.common.launch_tables import Case as LaunchCase
from sage_kernels.common.launch_tables import compiled_launches, measured_launches
from sage_kernels.common.launcher import Start
from sage_kernels.common.quantize import padded_length
from sage_kernels.sagebwd import ladder
from sage_kernels.sagebwd.backward import level5
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, FORWARD_LEVELS, BackwardLevel, ForwardLevel
from sage_kernels.sagebwd.prologue import NO_PROLOGUE, run_rotate_back
from sage_kernels.sla2 import ladder as sla2_ladder
from sage_kernels.sla2.backward.program import BackwardInputs
from sage_kernels.sla2.ladder import BACKWARD_KERNELS, HOPPER_BACKWARD, LEVELS
from sage_kernels.sla2.ladder import Level as Sla2Level
from torch import Tensor
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

import sage_ref
from sage_lab.bench import bank_conflicts
from sage_lab.command_line import Arguments, Failed, positive, process_pool
from sage_lab.files import read_json, write_file
from sage_lab.records import markdown_table, write_record
from sage_ref.prologue import Prologue
from sage_ref.sla2.router import Routing

RECORD = Path(__file__).parent / "compile_record.json"  # name of a case -> [spills, digest]
SOURCES = "sources"  # stands there before the cases: no digest needs to be made while the sources are the same
# Compute capability -> shared memory that one program may use, in bytes.
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
HEAD_DIMS = (64, 128)
SLA2_MATCHED = ("sla2_query_hopper_matched", "sla2_key_hopper_matched")  # Hopper's, told of the forward's INT8 copies
# SLA2's programs that hardly depend on the head size.
SLA2_TRAINING = (  # programs that are told of weights or of the forward's INT8 copies, and their levels
    ("sla2_query_matched", 0), ("sla2_key_matched", 0), ("sla2_query_soft", 0), ("sla2_key_soft", 0),
    ("sla2_forward_16bit_soft", 2),
)  # fmt: skip
SLA2_ONCE = ("sla2_list", "sla2_top_blocks", "sla2_sequence_mean", "sla2_pieces")
# SageBwd's programs before the forward pass, before the backward pass and after it. "rotary_": with a prologue.
BEFORE_FORWARD = ("key_sums", "rotary_key_sums", "key_mean", "prepare_forward", "rotary_prepare_forward")
AROUND = (*BEFORE_FORWARD, "prepare_backward", "finish", "rotate_back")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Instructions of the GPU that are counted. LDL and STL load and store spilled registers.
INT8, SIXTEEN_BIT, SPILL = r"(?:I|IG|UTCI)MMA\b", r"(?:H|HG|UTCH)MMA\b(?![^;]*TF32)", r"(?:LDL|STL)\b"


class Case(NamedTuple):
    """One kernel to compile."""

    kernel: str  # a key of DEFAULTS, of a Hopper level's LAUNCHES, or a program around them
    level: int
    capability: int
    head_dim: int
    is_causal: bool
    is_unbiased: bool = False
    with_lengths: bool = False  # of sequences of several lengths

    @property
    def name(self) -> str:
        """The name in the record."""
        marks = " unbiased" * self.is_unbiased + " lengths" * self.with_lengths
        mask = "causal" if self.is_causal else "full"
        return f"sm_{self.capability} {self.kernel} level {self.level} D{self.head_dim} {mask}{marks}"


class Compiled(NamedTuple):
    """A compiled kernel's registers, memory and instructions."""

    registers: int
    spills: int  # local-memory instructions, loads and stores
    shared: int  # bytes
    int8_instructions: int
    float16_instructions: int
    serialized: tuple[str, ...]  # the assembler's warnings of matmuls that wait for one another, on Hopper
    conflicts: tuple[str, ...]  # of a Hopper program's threads in shared memory, see `bank_conflicts`


# Which kernels there are


def every_case() -> list[Case]:
    """Return everything that is compiled."""
    kinds = (cases, around_cases, unbiased_cases, lengths_cases, sla2_cases)
    return [case for kind in kinds for capability in SHARED_MEMORY for case in kind(capability)]


def cases(capability: int) -> Iterator[Case]:
    """Yield every kernel of the SageBwd levels, causal: the longer code, which has the loop without a mask as well."""
    for head_dim in HEAD_DIMS:
        for levels in (FORWARD_LEVELS, BACKWARD_LEVELS):
            for level in runnable(levels, capability):
                for kernel in levels[level].kernels(head_dim):
                    yield Case(kernel, level, capability, head_dim, True)


def around_cases(capability: int) -> Iterator[Case]:
    """Yield the programs before and after SageBwd's last levels, for the head size that takes more registers."""
    *_, forward = runnable(FORWARD_LEVELS, capability)
    *_, backward = levels = runnable(BACKWARD_LEVELS, capability)
    known = [*((kernel, forward) for kernel in BEFORE_FORWARD), ("prepare_backward", backward)]
    known += [("finish", level) for level in levels if BACKWARD_LEVELS[level].hopper is level5]
    for kernel, level in (*known, ("rotate_back", backward)):
        yield Case(kernel, level, capability, 128, True)


def unbiased_cases(capability: int) -> Iterator[Case]:
    """Yield the forward levels that take `unbiased`, and what runs before the last of them."""
    for case in (*cases(capability), *around_cases(capability)):
        if case.kernel.endswith("prepare_forward") or (case.kernel == "forward" and level_of(case).takes_unbiased):
            yield case._replace(is_unbiased=True)


def lengths_cases(capability: int) -> Iterator[Case]:
    """Yield what sequences of several lengths start: the last levels that run everywhere, and what runs before them."""
    *_, forward = runnable(FORWARD_LEVELS, min(SHARED_MEMORY))
    *_, backward = runnable(BACKWARD_LEVELS, min(SHARED_MEMORY))
    known = [(kernel, forward) for kernel in ("forward", "key_sums", "key_mean", "prepare_forward")]
    known += [(kernel, backward) for kernel in ("prepare_backward", *BACKWARD_LEVELS[backward].kernels(HEAD_DIMS[-1]))]
    for kernel, level in known:
        yield Case(kernel, level, capability, HEAD_DIMS[-1], True, with_lengths=True)


def sla2_cases(capability: int) -> Iterator[Case]:
    """Yield every program of the SLA2 levels, once for all levels that run it; the backward's levels are 0 and 1."""
    known = [(LEVELS[level].kernel, level) for level in runnable(LEVELS, capability)]
    known += [("sla2_mix", 1), ("sla2_prepare", 3)]  # which makes Q^ and V^ as well
    known += [(kernel, 0) for kernel in (*BACKWARD_KERNELS, "sla2_join")]
    known += [(kernel, 1) for kernel in (*HOPPER_BACKWARD, *SLA2_MATCHED) if capability == 90]
    for head_dim in HEAD_DIMS:
        for kernel, level in known:
            yield Case(kernel, level, capability, head_dim, False)
    for kernel in SLA2_ONCE:
        yield Case(kernel, 0, capability, HEAD_DIMS[0], False)
    for kernel, level in SLA2_TRAINING:
        yield Case(kernel, level, capability, HEAD_DIMS[-1], False)


def runnable(levels: dict[int, ForwardLevel | BackwardLevel | Sla2Level], capability: int) -> list[int]:
    """Return the levels of a ladder that can run there."""
    return [level for level, chosen in levels.items() if capability == 90 or chosen.hopper is None]


def is_sla2(case: Case) -> bool:
    return case.kernel.startswith("sla2_")


def base_of(case: Case) -> str:
    """Return the name under which SLA2's launches know a kernel: without what its program is told."""
    return re.sub("_(soft|matched)$", "", case.kernel)


def is_forward(case: Case) -> bool:
    if is_sla2(case):
        return case.kernel == "sla2_prepare" or base_of(case) in LEVELS[case.level].kernels
    return case.kernel in ("forward", *BEFORE_FORWARD)


def level_of(case: Case) -> ForwardLevel | BackwardLevel:
    """Return a SageBwd case's level."""
    return (FORWARD_LEVELS if is_forward(case) else BACKWARD_LEVELS)[case.level]


def launch_of(case: Case) -> Launch | None:
    """Return what `ladder` launches; for a Hopper level, the warps and registers that compute; None around levels."""
    if is_sla2(case):
        hopper = ({level.kernel: level.hopper for level in LEVELS.values()} | HOPPER_BACKWARD).get(base_of(case))
    else:
        hopper = None if case.kernel in AROUND else level_of(case).hopper
    if hopper is not None:
        return hopper.LAUNCHES[base_of(case)]
    known = measured_launches() if case.capability == 90 else compiled_launches(case.capability)
    found = known.get(LaunchCase(base_of(case), case.level, case.head_dim, case.is_causal))
    return found or DEFAULTS.get(base_of(case))


# What the kernels start


def source_of(case: Case) -> tuple[ASTSource, dict[str, Any]]:
    """Return the program of a case with its types and constants, and its options.

    They are those that Triton's launcher tells the compiler when the kernels start it with bfloat16 tensors there.
    """
    program, arguments, constants, options = started(case)
    return launched_source(program, arguments, constants | options, case.capability), options


def launched_source(program, arguments: tuple, keywords: dict[str, Any], capability: int) -> ASTSource:
    """Return the source that Triton's launcher would compile for program[grid](*arguments, **keywords)."""
    backend = CUDABackend(GPUTarget("cuda", capability, 32))
    bind = create_function_from_signature(program.signature, program.params, backend)
    bound, specialization, _ = bind(*arguments, **keywords)
    told = program._pack_args(backend, keywords, bound, specialization, {})
    return (GluonASTSource if program.is_gluon() else ASTSource)(program, *told[1:])


def started(case: Case) -> tuple[Any, tuple, dict, dict]:
    """Return (program, arguments, constants, options) of a case: the first start of a program of its name.

    Names differ from the kernel's by what the program is told: a prologue, 16 bit, a scale per block, dK or dV alone,
    weights of blocks, the forward's INT8 copies.
    """
    name = re.sub("^rotary_|_16bit$|_per_block$", "", base_of(case))
    notes, outputs = [], {}
    if name in ("dk", "dv", "dkdv"):
        name, outputs = "dkdv", {"WITH_DK": "dk" in name, "WITH_DV": "dv" in name}

    def choose(kernel: str, level: int, head_dim: int, is_causal: bool, device: torch.device) -> Launch:
        return launch_of(Case(kernel, level, case.capability, head_dim, is_causal))

    def start(program, grid: tuple[int, ...], arguments: tuple, constants: dict, options: dict) -> None:
        notes.append((program, arguments, constants, options))

    can_run = mock.patch.multiple(ladder, choose_launch=choose, obstacle=lambda *_: None)
    with can_run, mock.patch.multiple(sla2_ladder, choose_launch=choose):
        (start_sla2 if is_sla2(case) else start_sagebwd)(case, start)
    return next(
        note for note in notes
        if re.fullmatch(f"{name}(_hopper)?_program", note[0].__name__) and note[2].items() >= outputs.items()
    )  # fmt: skip


def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def start_sagebwd(case: Case, start: Start) -> None:
    """Start what a SageBwd level starts. No size is 1 or a multiple of 16 that is not so in most launches."""
    n = 203 if case.is_causal else 256  # a last block that is not full takes more code, as a causal mask does
    query, key, value, grad_output = (empty(1, heads, n, case.head_dim) for heads in (4, 2, 2, 4))
    angles, gain = empty(n, case.head_dim // 2, dtype=torch.float32), empty(case.head_dim, dtype=torch.float32)
    rotary, options = Prologue(angles, angles, gain, gain), {"is_causal": case.is_causal, "scale": 0.1}
    lengths = empty(1, dtype=torch.int32) if case.with_lengths else None
    inputs = ladder.prepare_forward(
        query, key, value, case.level if is_forward(case) else 4, start, scale=0.1, smooth_k=True,
        unbiased=case.is_unbiased, prologue=rotary if case.kernel.startswith("rotary_") else NO_PROLOGUE,
        lengths=lengths,
    )  # fmt: skip
    if is_forward(case):
        ladder.run_forward(inputs, case.level, start, **options)
        return
    hats = {"q_hat": inputs.q_hat, "k_hat": inputs.k_hat, "v_range": inputs.v_range, "is_causal": case.is_causal}
    hats["lengths"] = lengths
    log_sum_exp = empty(1, 4, padded_length(n), dtype=torch.float32)
    inputs = ladder.prepare_backward(grad_output, query, key, value, query, log_sum_exp, case.level, start, **hats)
    ladder.run_backward(inputs, case.level, start, **options)
    run_rotate_back(query, key, query, key, rotary, start)


def start_sla2(case: Case, start: Start) -> None:
    """Start what an SLA2 level starts, over 290 key blocks: lists of up to 512 are one program."""
    n_q, n_k, head_dim = 300, 64 * 290 - 5, case.head_dim
    query, key, value, grad_output = (
        empty(1, heads, n, head_dim) for heads, n in ((4, n_q), (2, n_k), (2, n_k), (4, n_q))
    )
    alpha, projection = empty(1, 4, 3, dtype=torch.float32), empty(head_dim, head_dim)
    if case.kernel == "sla2_list" or case.kernel.endswith("_soft"):
        chooser = empty(1, 4, 3, 290, dtype=torch.bool if case.kernel == "sla2_list" else torch.float32)
    else:
        chooser = Routing(projection, projection, 10)
    level = case.level if is_forward(case) else 2 if case.kernel.endswith("_soft") else 3
    prepared = sla2_ladder.prepare(query, key, value, chooser, alpha, level, start, scale=0.1)
    forward = sla2_ladder.run_forward(prepared, level, start, scale=0.1, save=True)
    if not is_forward(case):
        tensors = grad_output, query, key, value, alpha, prepared.inputs.sums, *forward[1:], prepared.k_mean
        inputs = BackwardInputs(*tensors, log2_weights=prepared.inputs.log2_weights)
        if case.kernel.endswith("_matched"):
            inputs = inputs._replace(q_hat=prepared.inputs.q_hat, k_hat=prepared.inputs.k_hat)
        sla2_ladder.run_backward(inputs, prepared.choice, start, scale=0.1, level=case.level)


# What the compiler makes of it


def promise(case: Case) -> tuple[bool, bool, int, int]:
    """Return whether a kernel has matmuls in INT8 and in 16 bit, and its most registers and bytes of shared memory.

    dP is a 16-bit matmul everywhere, and in SLA2 so is phi(Q) H.
    """
    int8 = case.kernel not in AROUND and bool(level_of(case).int8)
    float16 = case.kernel not in ("dv", *SLA2_ONCE, *AROUND)
    if is_sla2(case):
        int8 = case.kernel == LEVELS[case.level].kernel and bool(LEVELS[case.level].int8)
        int8 |= case.kernel.endswith("_matched")
    elif case.kernel == "forward":
        float16 = level_of(case).int8 != "QKV"
    limit = getattr(launch_of(case), "max_registers", None)
    return int8, float16, limit or 255, SHARED_MEMORY[case.capability]


def digest(case: Case) -> str:
    """Return a digest of what decides the check of a kernel: its code before any pass, its options, what it promises.

    Triton's version stands for what its passes and its assembler do.
    """
    (source, told), target = source_of(case), GPUTarget("cuda", case.capability, 32)
    backend, context = CUDABackend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(dict(told))
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    code = source.make_ir(target, options, functions, modules, context).str_nodebug()
    parts = (code, case.capability, sorted(told.items()), promise(case), triton.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def sources_digest() -> str:
    """Return a digest of all that the digests of kernels follow from: sources, launch tables, Triton's version."""
    found = hashlib.sha256(triton.__version__.encode())
    packages = (Path(package.__path__[0]) for package in (sage_kernels, sage_ref))
    sources = [path for package in packages for path in sorted(package.rglob("*.*")) if path.suffix in (".py", ".json")]
    for path in (*sources, Path(__file__), Path(bank_conflicts.__file__)):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def compile_kernel(case: Case) -> tuple[str, Compiled]:
    """Return a kernel's machine code (SASS), one instruction a line, and what it is like.

    Triton's cache is left out: ptxas must say its word.
    """
    return assembled(*source_of(case), case.capability)


def assembled(source: ASTSource, options: dict[str, Any], capability: int) -> tuple[str, Compiled]:
    """Return machine code and what it is like, as `compile_kernel` does."""
    with knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as log, bank_conflicts.conflicts() as found:
        knobs.nvidia.dump_ptxas_log = True
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [TOOLS / "nvdisasm", "-c", cubin.name]
        code = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
    return code, Compiled(
        registers=int(re.search(r"Used (\d+) registers", log.getvalue())[1]),
        spills=count(SPILL, code),
        shared=kernel.metadata.shared,
        int8_instructions=count(INT8, code),
        float16_instructions=count(SIXTEEN_BIT, code),
        serialized=tuple(sorted(set(re.findall(r"\bC75\d\d\b", log.getvalue())))),  # C7510, C7514 and their like
        conflicts=tuple(sorted(set(found))),
    )


def count(instructions: str, code: str) -> int:
    """Return how many instructions of machine code match."""
    return len(re.findall(rf"\b{instructions}", code))


def complaint(case: Case, compiled: Compiled, recorded_spills: int) -> str | None:
    """Return what is wrong with a compiled kernel, or None."""
    int8, float16, registers, shared = promise(case)
    matmuls = ("INT8", compiled.int8_instructions, int8), ("16-bit", compiled.float16_instructions, float16)
    for bits, found, expected in matmuls:
        if bool(found) != expected:
            return f"expected {'' if expected else 'no '}{bits} tensor-core instructions, found {found}"
    if not 0 < compiled.registers <= registers:
        return f"{compiled.registers} registers, its launch allows {registers}"
    if compiled.spills > recorded_spills:
        return f"{compiled.spills} spill instructions, {recorded_spills} recorded"
    if compiled.shared > shared:
        return f"{compiled.shared} bytes of shared memory, the GPU has {shared}"
    if compiled.serialized:
        return f"matmuls wait for one another: {', '.join(compiled.serialized)}"
    if compiled.conflicts:
        return f"threads meet in a bank of shared memory: {', '.join(compiled.conflicts)}"
    return None


# The command


@dataclass(frozen=True, kw_only=True)
class Compile(Arguments):
    """Options of `compile`."""

    only: Annotated[str, "names with this, such as 'sm_90 forward level 4'"] = ""
    workers: Annotated[int, positive, "number of processes"] = 2
    all: Annotated[bool, "also compile kernels that match their record"] = False
    update: Annotated[bool, "record the compiled kernels, their spills as new limits"] = False

    def run(self, command: str) -> None:
        """Compile what differs from its record, or all, for sm_80 to sm_120 and check the result."""
        every, recorded = every_case(), read_json(RECORD, "the record of `compile`")
        if not (wanted := [case for case in every if self.only in case.name]):
            raise ValueError(f"only: expected a part of a name such as {every[0].name!r}, got {self.only!r}")
        rows, complaints, sources = [], [], sources_digest()
        if recorded.get(SOURCES) == [0, sources] and not (self.all or self.update or self.only):
            print(f"{len(every)} kernels are as recorded: no source has changed since, nor has Triton.")
            return
        with process_pool(self.workers) as pool:
            digests = dict(zip(wanted, pool.map(digest, wanted, chunksize=8), strict=True))
            asked = [x for x in wanted if self.all or recorded.get(x.name, [0, ""])[1] != digests[x]]
            for case, (_, compiled) in zip(asked, pool.map(compile_kernel, asked), strict=True):
                name = case.name
                wrong = complaint(case, compiled, 10**6 if self.update else recorded.get(name, [0])[0])
                rows.append({"kernel": name} | compiled._asdict())
                print(f"{len(rows)} of {len(asked)}: {name}", file=sys.stderr)
                if wrong:
                    complaints.append(f"{name}: {wrong}")
                else:
                    recorded[name] = [compiled.spills, digests[case]]
        if rows:
            print(markdown_table(rows[0], [row.values() for row in rows]))
        write_record(self.json, rows, command=command)
        if self.update:  # without kernels that are gone
            recorded[SOURCES] = [0, sources]
            names = [SOURCES, *(case.name for case in every if case.name in recorded)]
            lines = [f" {json.dumps(name)}: {json.dumps(recorded[name])}" for name in names]
            write_file(RECORD, "{\n" + ",\n".join(lines) + "\n}\n")
        if complaints:
            print("\n".join(complaints), file=sys.stderr)
            raise Failed(f"{len(complaints)} of {len(wanted)} kernels are not as they should be")
        print(
            f"{len(wanted) - len(asked)} kernels are as recorded, {len(asked)} were compiled: none spills more than "
            "recorded, all use the tensor cores they promise."
        )
