"""Some kernels compiled for GPUs that aren't there (`python -m sage_kernels compile` does all); what is a fault."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from sage_kernels.__main__ import COMPILE_RECORD
from sage_kernels.common.launch import CANDIDATES, Launch
from sage_kernels.measure import compile as compiling
from sage_kernels.measure.compile import Case, Compiled, complaint
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, FORWARD_LEVELS
from sage_kernels.sla2.ladder import LEVELS

from sage_ref.records import REPOSITORY

FORWARD, BACKWARD = range(len(FORWARD_LEVELS)), range(len(BACKWARD_LEVELS))
HOPPER = [level for level in FORWARD if FORWARD_LEVELS[level].hopper]
# Every level once for Ampere or for Hopper, whose INT8 instructions differ. A level of Hopper's at both head sizes.
CASES = [Case("forward", level, 90 if level in HOPPER else (80, 90)[level % 2], 64, True) for level in FORWARD]
CASES += [Case("forward", level, 90, 128, is_causal) for level in HOPPER for is_causal in (False, True)]
CASES += [
    Case(BACKWARD_LEVELS[level].kernels(64)[level // 2], level, (90, 80)[level % 2], 64, True)
    for level in BACKWARD if BACKWARD_LEVELS[level].hopper is None
]  # fmt: skip
HOPPER_BACKWARD = [level for level in BACKWARD if BACKWARD_LEVELS[level].hopper]
CASES += [
    Case(kernel, level, 90, head_dim, True)
    for level in HOPPER_BACKWARD for head_dim in (64, 128) for kernel in BACKWARD_LEVELS[level].kernels(head_dim)
]  # fmt: skip
# SLA2: the INT8 level on both, with a limit of registers on Hopper; one program of the rest, and one without a matmul.
CASES += [Case("sla2_forward", 3, 80, 64, False), Case("sla2_forward", 3, 90, 128, False)]
CASES += [Case("sla2_forward_16bit", 1, 90, 64, False), Case("sla2_key", 0, 80, 64, False)]
CASES += [Case("sla2_top_blocks", 0, 80, 64, False)]

# In a process of its own, where Triton compiles: in this one it may interpret.
COMPILE = """
import json, sys
from sage_kernels.measure.compile import Case, compile_all
for case, compiled in compile_all([Case(*case) for case in json.loads(sys.argv[1])], workers=2):
    print(json.dumps(compiled))
"""


# What the assembler says of a program as Triton wrote it and without what separates matmuls; for which GPU it is asked.
ASSEMBLE = """
import json
from sage_kernels.measure import compile as compiling
from sage_kernels.measure.compile import Case, compile_case, compiled_kernel, serialized
ptx = compiled_kernel(Case("forward", 3, 90, 64, True)).asm["ptx"]
said = [serialized(ptx), serialized(ptx.replace("wgmma.fence.sync.aligned;", ""))]
compiling.serialized = lambda ptx: ("asked",)
asked = [compile_case(Case("forward", 3, capability, 64, True)).serialized for capability in (90, 80)]
print(json.dumps(said + asked))
"""


# What the loops of the programs of one pass that are counted spill, per score.
COUNT_SPILLS = """
import json
from sage_kernels.measure.compile import Case
from sage_kernels.measure.instructions import case_rows
for kernel, head_dim in (("dqdkdv", 64), ("dqdkdv_wide", 128)):
    rows = case_rows(Case(kernel, 5, 90, head_dim, True))
    print(json.dumps([row["per_score"] for row in rows if row["kind"] == "spill"]))
"""


def run_where_triton_compiles(code, *arguments):
    """The JSON that it prints, line by line."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled():
    found = run_where_triton_compiles(COMPILE, json.dumps(CASES))
    return {case: Compiled(*fields) for case, fields in zip(CASES, found, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} sm_{case.capability}")
def test_levels_compile_to_the_tensor_core_instructions_they_promise(compiled, case):
    found = compiled[case]
    assert complaint(case, found, recorded_spills=found.spills) is None
    assert 0 < found.registers <= 255
    assert (found.int8_instructions > 0) == compiling.is_int8(case)
    int8 = FORWARD_LEVELS[case.level].int8 if case.kernel == "forward" else "all but dP"
    assert (found.float16_instructions > 0) == (int8 != "QKV" and case.kernel not in ("dv", "sla2_top_blocks"))
    assert found.registers <= (compiling.launch_of(case).max_registers or 255)
    if case.level in HOPPER and case.kernel == "forward":
        assert found.spills == 0


def test_one_pass_spills_nothing_in_the_loop_that_is_counted():
    assert run_where_triton_compiles(COUNT_SPILLS) == [[0], [0]]


def test_matmuls_that_wait_for_one_another_are_seen():
    assert run_where_triton_compiles(ASSEMBLE) == [[[], ["C7519"], ["asked"], []]]


def test_the_command_compiles_every_kernel_of_every_level_for_every_gpu():
    cases = set(compiling.cases())
    for capability in (80, 89, 90, 100, 120):
        for head_dim in (64, 128):
            expected = {("forward", level) for level in FORWARD if capability == 90 or level not in HOPPER}
            expected |= {
                (kernel, level)
                for level in BACKWARD if capability == 90 or level not in HOPPER_BACKWARD
                for kernel in BACKWARD_LEVELS[level].kernels(head_dim)
            }  # fmt: skip
            assert expected == {case[:2] for case in cases if case[2:4] == (capability, head_dim)}
    assert len(cases) == len(list(compiling.cases()))


def test_the_command_compiles_every_program_of_every_sla2_level_for_every_gpu():
    cases = list(compiling.sla2_cases())
    kernels = {(level.kernel, i) for i, level in enumerate(LEVELS)} | {("sla2_mix", 1), ("sla2_key_blocks", 3)}
    kernels |= {(kernel, 0) for kernel in ("sla2_linear_query", "sla2_query", "sla2_key")}
    assert {kernel for kernel in CANDIDATES if kernel.startswith("sla2_")} < {kernel for kernel, _ in kernels}
    once = {(f"sla2_{program}", 0) for program in ("list", "top_blocks", "sequence_mean")}
    for capability in (80, 89, 90, 100, 120):
        for head_dim, expected in ((64, kernels | once), (128, kernels)):
            assert expected == {case[:2] for case in cases if case[2:4] == (capability, head_dim)}
    assert len(set(cases)) == len(cases)


def test_a_limit_of_registers_is_the_compilers_too(monkeypatch):
    """The table's, for the GPU whose table it is; and none where a launch has none."""
    options = []
    monkeypatch.setattr(compiling.triton, "compile", lambda *_, **kw: options.append(kw["options"]))
    measured = {("sla2_forward", 3, 64, False): Launch(64, 64, 4, 3, 168)}
    monkeypatch.setattr(compiling, "measured_launches", lambda: measured)
    for capability in (90, 80):
        compiling.compiled_kernel(Case("sla2_forward", 3, capability, 64, False))
    assert [x["maxnreg"] for x in options] == [168, None]
    assert [x["num_stages"] for x in options] == [3, 1]


FINE = Compiled(128, spills=3, shared=90 << 10, int8_instructions=8, float16_instructions=4, serialized=())


@pytest.mark.parametrize(
    ("change", "spills", "expected"),
    [
        ({}, 3, None),
        ({"int8_instructions": 0}, 3, "no INT8 tensor-core instruction"),
        ({"spills": 4}, 3, "4 spill instructions, 3 recorded"),
        ({"spills": 2}, 3, None),
        ({"shared": 100 << 10}, 3, "102400 bytes of shared memory, the GPU has 101376"),
        ({"serialized": ["C7510", "C7514"]}, 3, "matmuls wait for one another: C7510, C7514"),
    ],
)
def test_faults(change, spills, expected):
    assert complaint(Case("forward", 4, 89, 64, True), FINE._replace(**change), spills) == expected


def test_a_16_bit_level_needs_no_int8_instruction():
    found = FINE._replace(int8_instructions=0)
    assert complaint(Case("forward", 0, 89, 64, True), found, 3) is None
    assert complaint(Case("dq_16bit", 0, 89, 64, True), found, 3) is None
    assert complaint(Case("dq", 1, 89, 64, True), found, 3) == "no INT8 tensor-core instruction"
    for kernel, level in (("sla2_forward_16bit", 2), ("sla2_key_blocks", 3), ("sla2_mix", 1), ("sla2_key", 0)):
        assert complaint(Case(kernel, level, 89, 64, False), found, 3) is None
    assert complaint(Case("sla2_forward", 3, 89, 64, False), found, 3) == "no INT8 tensor-core instruction"


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
        assert (compiling._count_int8(line), compiling._count_float16(line)) == (1, 0)
    for line in FLOAT16:
        assert (compiling._count_int8(line), compiling._count_float16(line)) == (0, 1)
    neither = (
        "ld.global.s8 %r1, [%rd1];\ncvt.rn.f16.f32 %rs1, %f1;\nmma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {};"
    )
    assert (compiling._count_int8(neither), compiling._count_float16(neither)) == (0, 0)
    assert compiling._count_int8("\n".join(INT8 + FLOAT16)) == 3


def test_the_record_names_every_kernel_and_nothing_else():
    cases = [*compiling.cases(), *compiling.sla2_cases()]
    assert set(json.loads(COMPILE_RECORD.read_text())) == {f"sm_{case.capability} {case.name}" for case in cases}
