"""What the compile check compiles, when, and what is a fault. Kernels are compiled in a process of its own, where
Triton compiles: in this one it may interpret.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from sage_kernels.common.candidates import DEFAULTS, Launch
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, FORWARD_LEVELS
from sage_kernels.sla2.ladder import HOPPER_BACKWARD, LEVELS
from sage_lab.bench import compile as compiling
from sage_lab.bench.compile import Case, Compiled, complaint, count_float16, count_int8, named, promise
from sage_lab.records import REPOSITORY

EVERY = compiling.every_case()
COMPILE = """
import argparse, io, json, re, sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
sys.path.insert(0, "tests/kernels")
import bank_programs
from sage_kernels.sagebwd.forward import level0_flash_attention
from sage_lab.bench import compile as compiling
from sage_lab.bench.bank_conflicts import conflicts
from sage_lab.bench.compile import (
    Case, compile_case, compiled_kernel, every_case, local_memory_instructions, machine_code, named, source_of,
)
from sage_lab.bench.instructions import case_rows
from sage_lab.bench.profile import shared_memory_rows
from triton.backends.nvidia.compiler import CUDABackend

found = {}
# What is said of integers that programs are started with: multiples of 16, or 1. A tensor's strides are one argument.
found["multiples"], found["ones"] = set(), set()
for case in every_case():
    source = source_of(case)
    names = source.program.arg_names
    kinds = {(i,): kind for i, kind in enumerate(source.signature.values())}
    kinds |= {(*at, i): kind for at, kinds in kinds.items() if isinstance(kinds, tuple) for i, kind in enumerate(kinds)}
    found["multiples"] |= {names[at[0]] for at, said in source.attributes.items() if said and kinds[at] == "i32"}
    pointers = [at for at, kind in kinds.items() if isinstance(kind, str) and kind.startswith("*")]
    assert all([["tt.divisibility", 16]] == source.attributes.get(at) for at in pointers), named(case)
    given = {(p.num,) for p in source.program.params if p.is_constexpr}
    found["ones"] |= {names[at[0]] for at, value in source.constants.items() if at not in given and value is not None}
# The command: on a record of what is compiled, of a program that has changed, and on a damaged one.
compiling.RECORD = record = Path(sys.argv[1])
parser = argparse.ArgumentParser()
compiling.add_options(parser)
parser.set_defaults(json=None)
found["command"] = []

def command(*arguments):
    only = ["--only", "sm_80 forward level 0 D64", "--workers", "1"]
    try:
        with redirect_stdout(io.StringIO()) as said:
            compiling.compile_command(parser.parse_args([*only, *arguments]))
        compiled = int(re.search(r"(\\d+) were compiled", said.getvalue())[1])
    except compiling.Failed:
        compiled = "failed"
    found["command"].append([compiled, record.read_text()])

record.write_text(json.dumps({"sm_80 gone": [1, "0"]}))
command("--update")  # a kernel that is not recorded
command()  # one that is
command("--all")
with mock.patch.object(level0_flash_attention, "NO_KEY", tl.constexpr(-2.0e30)):
    command()
with mock.patch.object(compiling, "SHARED_MEMORY", compiling.SHARED_MEMORY | {80: 1 << 10}):
    command("--update")  # one at fault
with mock.patch.object(triton, "__version__", "0"):
    command()
record.write_text(record.read_text()[:-5])
command()
record.write_text(json.dumps({"sm_80 forward level 0 D64 causal": [-1, "0"]}))
command()  # one that spills more than recorded
# Local-memory instructions as they are counted, and as the disassembler names them.
found["local memory"] = []
for capability in (80, 120):
    kernel = compiled_kernel(Case("dkdv_16bit", 0, capability, 128, True))
    counted = local_memory_instructions(kernel.asm["cubin"])
    found["local memory"].append([counted, len(re.findall(r"\\b(?:LDL|STL)\\b", machine_code(kernel)))])
# For 8.9 the assembler says what it says for 8.6, but for the name of a conversion and the header.
code = [machine_code(compiled_kernel(Case("forward", 3, capability, 64, True))) for capability in (86, 89)]
found["8.6 and 8.9"] = [re.findall(r"/\\*[0-9a-f]{4,}\\*/ .*", x.replace("F2FP.BF16.F32", "F2FP.BF16")) for x in code]
# What the loops of the programs of one pass that are counted spill, per score.
found["one pass"] = [
    [row["per_score"] for row in case_rows(Case(kernel, 5, 90, head_dim, True)) if row["kind"] == "spill"]
    for kernel, head_dim in (("dqdkdv", 64), ("dqdkdv_wide", 128))
]
# The same numbers stored in two orders.
found["conflicts"] = {}
for program in (bank_programs.stored_as_computed, bank_programs.stored_spread):
    with conflicts() as seen:
        triton.compile(GluonASTSource(program, {}), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    found["conflicts"][program.__name__] = seen
found["shared memory"] = list(shared_memory_rows([Case("dqdkdv_wide", 5, 90, 128, True)]))
# What the assembler says of a program as Triton wrote it, and without what separates matmuls.
found["separated"] = compile_case(Case("forward", 3, 90, 64, True)).serialized
make_ptx = CUDABackend.make_ptx
CUDABackend.make_ptx = lambda *arguments: make_ptx(*arguments).replace("wgmma.fence.sync.aligned;", "")
found["not separated"] = compile_case(Case("forward", 3, 90, 64, True)).serialized
print(json.dumps(found, default=sorted))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(tmp_path_factory.mktemp("record") / "record.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_sizes_are_told_the_compiler_where_they_are_so_in_every_launch(compiled):
    """A size that is 1, or a multiple of 16, by the choice of what is driven would compile what nobody runs."""
    assert all(name.endswith(("_strided", "_padded")) for name in compiled["multiples"])
    assert compiled["ones"] == ["stride_column"]  # of a mask that is read by rows


def test_what_differs_from_its_record_is_compiled(compiled):
    """Each time: how many kernels are compiled, or that the command fails; the record after it."""
    first, same, every, changed, at_fault, other_triton, damaged, spilling = compiled["command"]
    record = first[1]
    assert [*json.loads(record)] == ["sm_80 forward level 0 D64 causal"]  # not that of a kernel that is gone
    assert (first, same) == ([1, record], [0, record])
    assert every == changed == other_triton == [1, record]  # without --update nothing is recorded
    assert at_fault == ["failed", record]
    assert (damaged[0], spilling[0]) == (1, "failed")


def test_spills_are_counted_as_the_disassembler_names_them(compiled):
    assert len(compiled["local memory"]) == 2
    assert all(counted == named > 0 for counted, named in compiled["local memory"])


def test_for_8_9_there_is_no_other_machine_code_than_for_8_6(compiled):
    ampere, ada = compiled["8.6 and 8.9"]
    assert len(ampere) > 500
    assert ampere == ada


def test_one_pass_spills_nothing_in_the_loop_that_is_counted(compiled):
    assert compiled["one pass"] == [[0], [0]]


def test_bytes_of_a_tile_are_those_of_its_matmuls_and_of_what_is_handed_over(compiled):
    """Of S, dP, dV, dK, dQ; dS^T written, and read twice; parts of dQ written; L and delta, a pair for each thread."""
    (row,) = compiled["shared memory"]
    assert row["matmuls"] == 64 + 128 + 32 + 32 + 32
    assert row["stores"] == 32 + 64
    assert row["loads"] == 2 * 32 + 64


def test_stores_that_meet_in_a_bank_are_seen(compiled):
    """Two numbers of each thread: neighbouring rows, in neighbouring banks, meet."""
    assert compiled["conflicts"] == {
        "stored_as_computed": ["store of [64, 64] int32: 2 wavefronts for one"],
        "stored_spread": [],
    }


def test_matmuls_that_wait_for_one_another_are_seen(compiled):
    assert (compiled["separated"], compiled["not separated"]) == ([], ["C7519"])


def test_the_record_names_every_kernel_and_nothing_else():
    difference = set(compiling.read_compiled()) ^ set(map(named, EVERY))
    assert not difference, f"python -m sage_lab compile --update records them: {sorted(difference)}"


def test_every_kernel_that_has_a_launch_is_compiled():
    modules = [*HOPPER_BACKWARD.values(), *(x.hopper for x in (*FORWARD_LEVELS, *BACKWARD_LEVELS, *LEVELS) if x.hopper)]
    launched = {*DEFAULTS, *(kernel for module in modules for kernel in module.LAUNCHES)}
    assert launched <= {case.kernel for case in EVERY if case.capability == 90}
    assert len(EVERY) == len(set(EVERY))


def test_for_8_9_the_command_compiles_what_users_run():
    """The rest has the machine code and the launches of 8.6."""
    cases = [case for case in EVERY if case.capability == 89]
    launches = [compiling.launch_of(case) for case in cases]
    assert launches == [compiling.launch_of(case._replace(capability=86)) for case in cases]
    sagebwd = {("forward", 4), ("dq", 3), ("dkdv", 3), ("dk", 3), ("dv", 3)}
    sla2 = {("sla2_forward", 3), ("sla2_linear_query", 0), ("sla2_query", 0), ("sla2_key", 0)}
    assert {case[:2] for case in cases} == sagebwd | sla2


def test_a_launch_is_that_of_the_gpus_table_or_the_candidate_that_is_tried():
    case = Case("sla2_forward", 3, 90, 64, False)
    tried = case._replace(launch=Launch(64, 64, 4, 3, 168))
    for x in (case, tried, case._replace(capability=80)):
        launch = compiling.launch_of(x)
        _, _, constants, options = compiling.started(x)
        assert (constants["BLOCK_Q"], options) == (launch.block_q, launch.options)
    assert compiling.launch_of(tried) == tried.launch
    for is_causal in (False, True):  # with a causal mask the last block of keys is not full either: the longer code
        assert compiling.started(Case("dqdkdv", 5, 90, 64, is_causal))[2]["RAGGED"] is is_causal


FINE = Compiled(
    128, spills=3, shared=90 << 10, int8_instructions=8, float16_instructions=0, serialized=(), conflicts=()
)
INT8_CASE = Case("forward", 4, 89, 64, True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"int8_instructions": 0}, "expected INT8 tensor-core instructions, found 0"),
        ({"float16_instructions": 4}, "expected no 16-bit tensor-core instructions, found 4"),
        ({"registers": 0}, "0 registers, its launch allows 255"),
        ({"spills": 4}, "4 spill instructions, 3 recorded"),
        ({"spills": 2}, None),
        ({"shared": 100 << 10}, "102400 bytes of shared memory, the GPU has 101376"),
        ({"serialized": ["C7510", "C7514"]}, "matmuls wait for one another: C7510, C7514"),
        ({"conflicts": ["store of [64, 64]"]}, "threads meet in a bank of shared memory: store of [64, 64]"),
    ],
)
def test_faults(change, expected):
    assert complaint(INT8_CASE, FINE._replace(**change), 3) == expected


def test_a_limit_of_registers_is_held():
    limit = 168
    case = Case("sla2_forward", 3, 90, 64, False, Launch(64, 64, 4, 3, limit))
    found = FINE._replace(float16_instructions=4, registers=limit)
    assert complaint(case, found, 3) is None
    too_many = found._replace(registers=limit + 1)
    assert complaint(case, too_many, 3) == f"{limit + 1} registers, its launch allows {limit}"


def test_what_instructions_a_kernel_promises():
    """By kernel and level: whether INT8 and 16-bit tensor-core instructions."""
    promised = {
        ("forward", 0): (False, True), ("forward", 1): (True, True), ("forward", 2): (True, False),
        ("forward", 5): (True, False), ("dq_16bit", 0): (False, True), ("dkdv", 1): (True, True),
        ("dq_per_block", 2): (True, True), ("dk", 3): (True, True), ("dv", 3): (True, False), ("dq", 4): (True, True),
        ("sla2_forward_16bit", 2): (False, True), ("sla2_forward", 3): (True, True), ("sla2_mix", 1): (False, True),
        ("sla2_prepare", 3): (False, True), ("sla2_key", 0): (False, True), ("sla2_top_blocks", 0): (False, False),
    }  # fmt: skip
    for (kernel, level), expected in promised.items():
        case = Case(kernel, level, 90, 128, False)
        assert promise(case)[:2] == expected, case


INT8 = [
    "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32 {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r7};",
    "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {%r1, %r2}, %rd1, %rd2, %p1;",
    "@%p1 tcgen05.mma.cta_group::1.kind::i8 [ %r1 + 0 ], %rd1, %rd2, %r2, %p2;",
]
FLOAT16 = [
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2}, {%r1, %r2}, {%r3}, {%f1, %f2};",
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%f1, %f2}, %rd1, %rd2, %p1, 1, 1, 0, 0;",
    "@%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r2, %p2;",
]


def test_instructions_are_told_apart():
    for line in INT8:
        assert (count_int8(line), count_float16(line)) == (1, 0)
    for line in FLOAT16:
        assert (count_int8(line), count_float16(line)) == (0, 1)
    neither = (
        "ld.global.s8 %r1, [%rd1];\ncvt.rn.f16.f32 %rs1, %f1;\nmma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {};"
    )
    assert (count_int8(neither), count_float16(neither)) == (0, 0)
    assert count_int8("\n".join(INT8 + FLOAT16)) == 3
