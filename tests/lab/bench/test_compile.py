"""What programs declare and what they are launched with; some kernels compiled for GPUs that aren't there (`python -m
sage_kernels compile` does all); what is a fault.
"""

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from itertools import product

import pytest
import torch

pytest.importorskip("triton")
from sage_kernels.common.candidates import CANDIDATES, Launch
from sage_kernels.common.launch_tables import Case as LaunchCase
from sage_kernels.common.launch_tables import compiled_launches
from sage_kernels.common.launcher import start_with_triton
from sage_kernels.common.quantize import padded_length
from sage_kernels.common.signature import NUMBER, PADDED_SIZE, POINTERS, SIZE, compiler_arguments
from sage_kernels.sagebwd import ladder
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, FORWARD_LEVELS
from sage_kernels.sagebwd.prologue import NO_PROLOGUE, run_rotate_back
from sage_kernels.sla2 import ladder as sla2_ladder
from sage_kernels.sla2 import lists
from sage_kernels.sla2 import prepare as before_sla2
from sage_kernels.sla2.backward import linear_queries_hopper, queries_hopper
from sage_kernels.sla2.backward.program import BackwardInputs
from sage_kernels.sla2.forward import level4_hopper
from sage_kernels.sla2.ladder import LEVELS
from sage_kernels.sla2.sums import SUMS_DTYPE
from sage_lab.bench import compile as compiling
from sage_lab.bench.compile import Case, Compiled, complaint, count_float16, count_int8, named, source_of
from sage_lab.records import REPOSITORY
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelInterface

from sage_ref import Prologue
from sage_ref.sla2.router import Routing

EVERY = [
    *compiling.cases(), *compiling.around_cases(), *compiling.unbiased_cases(),
    *compiling.sla2_cases(),
]  # fmt: skip
LAUNCHED = [case for case in EVERY if case.capability == (80 if compiling.hopper_of(case) is None else 90)]
AFTER_FORWARD = ("prepare_backward", "finish", "rotate_back")
LAUNCHED += [case for case in compiling.around_cases((90,)) if case.kernel in AFTER_FORWARD]
FORWARD, BACKWARD = range(len(FORWARD_LEVELS)), range(len(BACKWARD_LEVELS))
HOPPER = [level for level in FORWARD if FORWARD_LEVELS[level].hopper]
HOPPER_BACKWARD = [level for level in BACKWARD if BACKWARD_LEVELS[level].hopper]


# What programs declare


@pytest.mark.parametrize("case", EVERY, ids=named)
def test_every_parameter_is_declared_or_a_constant(case):
    program, signature, constants, _ = source_of(case)
    types, values, attributes = compiler_arguments(program, signature, constants)
    assert list(types) == program.arg_names
    assert set(values) == {name for name, kind in types.items() if kind == "constexpr"}
    aligned = [kind for i, kind in enumerate(types.values()) if (i,) in attributes]
    assert aligned.count("i32") == sum(kind == PADDED_SIZE for kind in signature.values())
    assert sum(kind.startswith("*") for kind in types.values()) == len(aligned) - aligned.count("i32")


@pytest.mark.parametrize(
    ("change", "differing"),
    [({"wrong": SIZE}, "wrong"), ({"KEY_TILE": SIZE}, "KEY_TILE"), ({"heads": None, "n_q": 0}, "")],
)
def test_a_parameter_that_is_not_declared_or_twice_is_an_error(change, differing):
    program, signature, constants, _ = source_of(Case("forward", 0, 80, 64, True))
    if not differing:
        change, differing = {}, "heads"
        del signature["heads"]
    with pytest.raises(ValueError, match=rf"every parameter of forward_program once.* for {differing}$"):
        compiler_arguments(program, signature | change, constants)


def kind_of(value):
    """The declaration that a launch's argument fits."""
    if isinstance(value, TensorDescriptor):
        dtype = POINTERS[value.base.dtype][1:]
        return f"tensordesc<{dtype}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, torch.Tensor):
        assert value.data_ptr() % 16 == 0
        return POINTERS[value.dtype]
    return None if value is None else NUMBER if isinstance(value, float) else SIZE


@pytest.fixture
def launches(monkeypatch):
    """(program, its arguments by name) of every launch from here on, none of which runs."""
    seen = []

    def launcher(program, grid):
        names = program.arg_names
        return lambda *given, **named: seen.append((program, dict(zip(names, given, strict=False)) | named))

    for kind in (KernelInterface, InterpretedFunction):
        monkeypatch.setattr(kind, "__getitem__", launcher)
    # What an sm_80 GPU launches. There, and in what is compiled for it, the sums are in 16 bit.
    for levels in (ladder, sla2_ladder):
        monkeypatch.setattr(levels, "choose_launch", lambda *case: compiled_launches(80)[LaunchCase(*case[:4])])
    for module in (lists, before_sla2):
        monkeypatch.setattr(module, "sums_dtype", lambda x: SUMS_DTYPE)
    for module in (level4_hopper, linear_queries_hopper, queries_hopper):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 108)
    return seen


def launch_level(case):
    """Launch what a SageBwd level launches, on tensors that hold anything."""
    size = (1, 2, 203, case.head_dim)
    query, key, value, grad_output = (torch.zeros(size, dtype=torch.bfloat16) for _ in range(4))
    options = {"is_causal": case.is_causal, "scale": 0.1}
    level = compiling.level_of(case)
    angles, gain = torch.zeros(203, case.head_dim // 2), torch.zeros(case.head_dim)
    prologue = Prologue(angles, angles, gain, gain)
    prepared = ladder.prepare_forward(
        query, key, value, case.level if case.kernel.endswith("forward") else 4, scale=0.1, smooth_k=True,
        prologue=prologue if case.kernel.startswith("rotary_") else NO_PROLOGUE, unbiased=case.is_unbiased,
    )  # fmt: skip
    if case.kernel.endswith(("key_sums", "key_mean")):
        return None
    if case.kernel == "rotate_back":
        return run_rotate_back(query, key, query, key, prologue, start_with_triton)
    if case.kernel.endswith("forward"):
        run = level.hopper.run if level.hopper else partial(ladder.run_forward, level=case.level)
        return run(prepared, **options)
    log_sum_exp = torch.zeros(*size[:2], padded_length(size[2]))
    hats = {"q_hat": prepared.q_hat, "k_hat": prepared.k_hat, "v_range": prepared.v_range}
    inputs = ladder.prepare_backward(
        grad_output, query, key, value, query, log_sum_exp, case.level, is_causal=case.is_causal, **hats
    )
    run = level.hopper.run if level.hopper else partial(ladder.run_backward, level=case.level)
    return run(inputs, **options)


def launch_sla2(case):
    """Launch what an SLA2 level and its backward pass launch, and the router."""
    size = (1, 2, 203, case.head_dim)
    query, key, value, grad_output = (torch.zeros(size, dtype=torch.bfloat16) for _ in range(4))
    alpha, block_mask = torch.zeros(1, 2, 2), torch.ones(1, 2, 2, 4, dtype=torch.bool)
    protected = torch.zeros(4, dtype=torch.bool)
    router = Routing(*torch.zeros(2, case.head_dim, case.head_dim), 2, protected)
    for chooser in (block_mask, router):
        prepared = sla2_ladder.prepare(query, key, value, chooser, alpha, case.level, scale=0.1)
        forward = sla2_ladder.run(prepared, case.level, scale=0.1, save=case.level > 0)
    log_sum_exp, k_mean = torch.zeros(1, 2, padded_length(size[2])), torch.zeros(1, 2, case.head_dim)
    saved = (query if forward.sparse_output is None else forward.sparse_output), log_sum_exp, k_mean
    inputs = BackwardInputs(grad_output, query, key, value, alpha, prepared.inputs.sums, *saved)
    for level in (0, 1):
        sla2_ladder.run_backward(inputs, prepared.choice, scale=0.1, level=level)


@pytest.mark.parametrize("case", LAUNCHED, ids=named)
def test_what_is_launched_is_what_is_declared_and_compiled(launches, monkeypatch, case):
    case_level = 3 if case.kernel in compiling.SLA2_ONCE else case.level
    (launch_sla2 if compiling.is_sla2(case) else launch_level)(case._replace(level=case_level))
    program, signature, constants, options = source_of(case)
    found = [arguments for launched, arguments in launches if launched is program]
    found = [x for x in found if all(x[name] == value for name, value in constants.items() if name.startswith("WITH_"))]
    # Some programs are launched with and without a tensor; one of the two is what is declared.
    absent = {name for name, kind in signature.items() if kind is None}
    pointers = {name for name in signature if name.endswith("_ptr")}
    found = [x for x in found if {name for name in pointers if x[name] is None} == absent & pointers]
    assert found
    for arguments in found:
        for name, kind in signature.items():
            assert kind_of(arguments[name]) == (SIZE if kind == PADDED_SIZE else kind), name
            assert kind != PADDED_SIZE or arguments[name] % 16 == 0, name
        for name, value in constants.items():
            assert arguments[name] == value or name in ("WIDTH", "RAGGED"), name
        for name, value in options.items():
            assert arguments.get(name, value) == value, name


# Compiled kernels

# In one process of its own, where Triton compiles: in this one it may interpret. The last portable levels, for Ampere
# and for Hopper, whose INT8 instructions differ; a level of Hopper's; SLA2's INT8 level, with its limit of registers.
CASES = [Case("forward", 4, 80, 64, True), Case("forward", 3, 90, 64, True), Case("dkdv", 3, 90, 64, True)]
CASES += [
    Case("forward", 5, 90, 64, True),
    Case("forward", 5, 90, 64, True, None, True),
    Case("sla2_forward", 3, 90, 128, False),
]
COMPILE = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
sys.path.insert(0, "tests/kernels")
import bank_programs
from sage_lab.bench.bank_conflicts import conflicts
from sage_lab.bench.compile import (
    SAME_PTX, Case, compile_all, compile_case, compile_kernel, compile_same, compiled_kernel, local_memory_instructions,
    machine_code, same_ptx,
)
from sage_lab.bench.instructions import case_rows
from sage_lab.bench.profile import shared_memory_rows
from sage_ref.sla2.router import Routing
from triton.backends.nvidia.compiler import CUDABackend

found = {"compiled": [compiled for _, compiled in compile_all([Case(*case) for case in json.loads(sys.argv[1])], 2)]}
# Local-memory instructions as they are counted, and as the disassembler names them.
found["local memory"] = []
for capability in (80, 120):
    kernel = compiled_kernel(Case("dkdv_16bit", 0, capability, 128, True))
    counted = local_memory_instructions(kernel.asm["cubin"])
    found["local memory"].append([counted, len(re.findall(r"\\b(?:LDL|STL)\\b", machine_code(kernel)))])
# Compiled for each, and assembled from the PTX of the first, which takes other registers.
same = [Case("forward", 3, capability, 64, True) for capability in SAME_PTX]
kernels, each = zip(*map(compile_kernel, same))
found["each"], found["assembled"] = each, [compile_same(cases) for cases in same_ptx(same)]
found["same PTX"] = [re.sub(r"\\.target sm_\\d+", "", kernel.asm["ptx"]) for kernel in kernels]
# For 8.9 the assembler says what it says for 8.6, but for the name of a conversion and the header.
code = map(machine_code, kernels[1:])
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
# What the assembler says of a program without what separates matmuls.
make_ptx = CUDABackend.make_ptx
CUDABackend.make_ptx = lambda *arguments: make_ptx(*arguments).replace("wgmma.fence.sync.aligned;", "")
found["not separated"] = compile_case(Case("forward", 3, 90, 64, True)).serialized
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_levels_compile_as_recorded(compiled, case):
    recorded = json.loads(compiling.RECORD.read_text())
    found = Compiled(*compiled["compiled"][CASES.index(case)])
    assert complaint(case, found, recorded[named(case)]) is None


def test_spills_are_counted_as_the_disassembler_names_them(compiled):
    assert len(compiled["local memory"]) == 2
    assert all(counted == named > 0 for counted, named in compiled["local memory"])


def test_what_is_assembled_from_the_same_ptx_is_as_if_compiled(compiled):
    assert compiled["assembled"] == [compiled["each"]]
    assert len(set(compiled["same PTX"])) == 1
    assert compiled["each"][0] != compiled["each"][1]


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
    """Of a program as Triton wrote it nothing is said."""
    as_written = Compiled(*compiled["compiled"][CASES.index(Case("forward", 3, 90, 64, True))])
    assert (as_written.serialized, compiled["not separated"]) == ([], ["C7519"])


def test_the_command_compiles_every_kernel_of_every_level_for_every_gpu():
    cases = set(compiling.cases())
    around = [case[:3] for case in compiling.around_cases()]
    assert {case[2] for case in around} == {80, 86, 90, 100, 120}
    before_forward = ("key_sums", "rotary_key_sums", "key_mean", "prepare_forward", "rotary_prepare_forward")
    for capability, forward_level, backward in ((80, 4, ("prepare_backward", "rotate_back")), (90, 5, AFTER_FORWARD)):
        expected = [(kernel, forward_level, capability) for kernel in before_forward]
        of_hopper = {"finish": 5}
        expected += [(kernel, 3 if capability == 80 else of_hopper.get(kernel, 6), capability) for kernel in backward]
        assert [case for case in around if case[2] == capability] == expected
    for capability in (80, 86, 90, 100, 120):
        for head_dim in (64, 128):
            expected = {("forward", level) for level in FORWARD if capability == 90 or level not in HOPPER}
            expected |= {
                (kernel, level)
                for level in BACKWARD if capability == 90 or level not in HOPPER_BACKWARD
                for kernel in BACKWARD_LEVELS[level].kernels(head_dim)
            }  # fmt: skip
            assert expected == {case[:2] for case in cases if case[2:4] == (capability, head_dim)}
    assert len(cases) == len(list(compiling.cases()))


def test_the_command_compiles_what_an_unbiased_o_takes():
    cases = list(compiling.unbiased_cases())
    assert all(case.is_unbiased for case in cases)
    forward = {(case.capability, case.level, case.head_dim) for case in cases if case.kernel == "forward"}
    assert forward == {*product((80, 86, 89, 90, 100, 120), (4,), (64, 128)), *product((90,), (5,), (64, 128))}
    prepared = {(case.kernel, case.capability) for case in cases if case.kernel != "forward"}
    assert prepared == {*product(("prepare_forward", "rotary_prepare_forward"), (80, 86, 90, 100, 120))}


def test_the_command_compiles_every_program_of_every_sla2_level_for_every_gpu():
    cases = list(compiling.sla2_cases())
    kernels = {(level.kernel, i) for i, level in enumerate(LEVELS) if level.hopper is None}
    kernels |= {("sla2_mix", 1), ("sla2_prepare", 3)}
    kernels |= {(kernel, 0) for kernel in ("sla2_linear_query", "sla2_query", "sla2_key", "sla2_join")}
    assert {kernel for kernel in CANDIDATES if kernel.startswith("sla2_")} < {kernel for kernel, _ in kernels}
    once = {(f"sla2_{program}", 0) for program in ("list", "top_blocks", "sequence_mean", "pieces")}
    for capability in (80, 86, 90, 100, 120):
        names = ("linear_query_hopper", "query_hopper", "key_hopper", "linear_key")
        backward = {(f"sla2_{program}", 1) for program in names}
        hopper = {("sla2_forward_hopper", 4)} | backward if capability == 90 else set()
        for head_dim, expected in ((64, kernels | hopper | once), (128, kernels | hopper)):
            assert expected == {case[:2] for case in cases if case[2:4] == (capability, head_dim)}
    assert len(set(cases)) == len(cases)


def test_for_8_9_the_command_compiles_what_users_run():
    """The rest has the machine code and the launches of 8.6."""
    cases = [case for case in EVERY if case.capability == 89]
    launches = [compiling.launch_of(case) for case in cases]
    assert launches == [compiling.launch_of(case._replace(capability=86)) for case in cases]
    sagebwd = {("forward", 4), ("dq", 3), ("dkdv", 3), ("dk", 3), ("dv", 3)}
    sla2 = {("sla2_forward", 3), ("sla2_linear_query", 0), ("sla2_query", 0), ("sla2_key", 0)}
    assert {case[:2] for case in cases} == sagebwd | sla2


def test_a_limit_of_registers_is_the_compilers_too(monkeypatch):
    """The table's, for the GPU whose table it is; and none where a launch has none."""
    options = []
    monkeypatch.setattr(compiling.triton, "compile", lambda *_, **kw: options.append(kw["options"]))
    measured = {("sla2_forward", 3, 64, False): Launch(64, 64, 4, 3, 168)}
    monkeypatch.setattr(compiling, "measured_launches", lambda: measured)
    monkeypatch.setattr(compiling, "compiled_launches", lambda capability: {})
    for capability in (90, 80):
        compiling.compiled_kernel(Case("sla2_forward", 3, capability, 64, False))
    assert [x["maxnreg"] for x in options] == [168, None]
    assert [x["num_stages"] for x in options] == [3, 1]


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


def test_a_limit_of_registers_is_held(monkeypatch):
    case, limit = Case("sla2_forward", 3, 90, 64, False), 168
    measured = {("sla2_forward", 3, 64, False): Launch(64, 64, 4, 3, limit)}
    monkeypatch.setattr(compiling, "measured_launches", lambda: measured)
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
        assert (compiling.is_int8(case), compiling.has_16_bit_matmul(case)) == expected, case


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


def test_the_record_names_every_kernel_and_nothing_else():
    difference = set(json.loads(compiling.RECORD.read_text())) ^ set(map(named, EVERY))
    assert not difference, f"python -m sage_lab compile --update records them: {sorted(difference)}"


def compiled_by_the_command(monkeypatch, capsys, tmp_path, *arguments):
    """(record, standard error) after the command ran on a record of two names, one of no kernel."""
    record, fast = tmp_path / "record.json", FINE._replace(float16_instructions=4)
    record.write_text(json.dumps({"sm_80 gone": 1, "sm_80 forward level 0 D64 causal": 2}))
    monkeypatch.setattr(compiling, "RECORD", record)
    monkeypatch.setattr(compiling, "compile_all", lambda wanted, workers: [(case, fast) for case in wanted])
    parser = argparse.ArgumentParser()
    compiling.add_options(parser)
    compiling.run(parser.parse_args(["--update", *arguments]))
    return json.loads(record.read_text()), capsys.readouterr().err


def test_one_kernel_can_be_recorded_alone_and_those_that_are_gone_leave_the_record(monkeypatch, capsys, tmp_path):
    chosen = ["--capability", "86", "--only", "forward level 1 D128"]
    record, said = compiled_by_the_command(monkeypatch, capsys, tmp_path, *chosen)
    assert record == {"sm_80 forward level 0 D64 causal": 2, "sm_86 forward level 1 D128 causal": FINE.spills}
    assert said == "1 of 1: sm_86 forward level 1 D128 causal\n"
