"""What the compile check compiles, when, and what is a fault. Kernels are compiled in a process of its own, where
Triton compiles: in this one it may interpret.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
import sage_kernels
from sage_kernels.common.candidates import DEFAULTS
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, FORWARD_LEVELS
from sage_kernels.sla2.ladder import HOPPER_BACKWARD, LEVELS
from sage_lab.__main__ import main
from sage_lab.bench import compile as compiling
from sage_lab.bench.compile import INT8, SIXTEEN_BIT, SPILL, Case, Compiled, complaint, count
from sage_lab.bench.instructions import KINDS
from sage_lab.files import read_json
from sage_lab.records import REPOSITORY

EVERY = compiling.every_case()
COMPILE = """
import io, json, re, sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
sys.path.insert(0, "tests/kernels")
import bank_programs
from sage_kernels.sagebwd.forward import program
from sage_lab.__main__ import main
from sage_lab.bench import compile as compiling
from sage_lab.bench.bank_conflicts import conflicts
from sage_lab.bench.compile import Case, compile_kernel, every_case, source_of
from sage_lab.bench.count import Problem, count_of_file, count_of_level
from triton.backends.nvidia.compiler import CUDABackend

found = {}
# What is said of integers that programs are started with: multiples of 16, or 1. A tensor's strides are one argument.
found["multiples"], found["ones"] = set(), set()
for case in every_case():
    source, _ = source_of(case)
    names = source.fn.arg_names
    kinds = {(i,): kind for i, kind in enumerate(source.signature.values())}
    kinds |= {(*at, i): kind for at, kinds in kinds.items() if isinstance(kinds, tuple) for i, kind in enumerate(kinds)}
    found["multiples"] |= {names[at[0]] for at, said in source.attrs.items() if said and kinds[at] == "i32"}
    pointers = [at for at, kind in kinds.items() if isinstance(kind, str) and kind.startswith("*")]
    assert all([["tt.divisibility", 16]] == source.attrs.get(at) for at in pointers), case.name
    given = {(p.num,) for p in source.fn.params if p.is_constexpr}
    found["ones"] |= {names[at[0]] for at, value in source.constants.items() if at not in given and value is not None}
# The command: on a record of what is compiled, and of a program that has changed.
compiling.RECORD = record = Path(sys.argv[1])
found["command"] = []

def command(*arguments):
    only = ["compile", "--only", "sm_80 forward level 0 D64", "--workers", "1"]
    try:
        with redirect_stdout(io.StringIO()) as said:
            main([*only, *arguments])
        compiled = int(re.search(r"(\\d+) were compiled", said.getvalue())[1])
    except SystemExit:
        compiled = "failed"
    found["command"].append([compiled, record.read_text()])

record.write_text(json.dumps({"sm_80 gone": [1, "0"]}))
command("--update")  # a kernel that is not recorded
command()  # one that is
command("--all")
with mock.patch.object(program, "NO_KEY", tl.constexpr(-2.0e30)):
    command()
with mock.patch.object(compiling, "SHARED_MEMORY", compiling.SHARED_MEMORY | {80: 1 << 10}):
    command("--update")  # one at fault
with mock.patch.object(triton, "__version__", "0"):
    command()
record.write_text(json.dumps({"sm_80 forward level 0 D64 causal": [-1, "0"]}))
command()  # one that spills more than recorded
# For 8.9 the assembler says what it says for 8.6, but for the name of a conversion and the header.
code = [compile_kernel(Case("forward", 3, capability, 64, True))[0] for capability in (86, 89)]
found["8.6 and 8.9"] = [re.findall(r"/\\*[0-9a-f]{4,}\\*/ .*", x.replace("F2FP.BF16.F32", "F2FP.BF16")) for x in code]
problem = Problem(90, 64, True)
found["level"] = count_of_level(3, problem)
found["file"] = count_of_file(Path("exercises/22_capstone_attention/master.py"), problem)
# The same numbers stored in two orders.
found["conflicts"] = {}
for program in (bank_programs.stored_as_computed, bank_programs.stored_spread):
    with conflicts() as seen:
        triton.compile(GluonASTSource(program, {}), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    found["conflicts"][program.__name__] = seen
# What the assembler says of a program as Triton wrote it, and without what separates matmuls.
found["separated"] = compile_kernel(Case("forward", 3, 90, 64, True))[1].serialized
make_ptx = CUDABackend.make_ptx
CUDABackend.make_ptx = lambda *arguments: make_ptx(*arguments).replace("wgmma.fence.sync.aligned;", "")
found["not separated"] = compile_kernel(Case("forward", 3, 90, 64, True))[1].serialized
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
    first, same, every, changed, at_fault, other_triton, spilling = compiled["command"]
    record = first[1]
    assert [*json.loads(record)] == ["sources", "sm_80 forward level 0 D64 causal"]  # not that of a kernel that is gone
    assert (first, same) == ([1, record], [0, record])
    assert every == changed == other_triton == [1, record]  # without --update nothing is recorded
    assert at_fault == ["failed", record]
    assert spilling[0] == "failed"


def test_for_8_9_there_is_no_other_machine_code_than_for_8_6(compiled):
    ampere, ada = compiled["8.6 and 8.9"]
    assert len(ampere) > 500
    assert ampere == ada


def test_a_readers_kernel_is_counted_as_ours_are(compiled):
    """The master of exercise 22 in INT8: its small tiles and its masks cost more than twice what level 3 costs."""
    level, file = compiled["level"], compiled["file"]
    assert level.keys() == file.keys()
    assert (level["name"], file["name"]) == ("level 3", "master")
    for row in (level, file):
        kinds = sum(row[kind] for kind in KINDS)
        assert row["instructions"] == pytest.approx(kinds, abs=0.02)
        assert 1 < row["exp2"] < 1.2
    assert 2 < file["clocks"] / level["clocks"] < 3


def test_stores_that_meet_in_a_bank_are_seen(compiled):
    """Two numbers of each thread: neighbouring rows, in neighbouring banks, meet."""
    assert compiled["conflicts"] == {
        "stored_as_computed": ["store of [64, 64] int32: 2 wavefronts for one"],
        "stored_spread": [],
    }


def test_matmuls_that_wait_for_one_another_are_seen(compiled):
    assert (compiled["separated"], compiled["not separated"]) == ([], ["C7519"])


def test_the_record_names_every_kernel_and_nothing_else():
    difference = (set(read_json(compiling.RECORD, "a record")) - {"sources"}) ^ {case.name for case in EVERY}
    assert not difference, f"python -m sage_lab compile --update records them: {sorted(difference)}"


def test_no_digest_is_made_while_all_sources_are_those_of_the_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sage_kernels, "__path__", [str(tmp_path)])
    monkeypatch.setattr(compiling, "RECORD", tmp_path / "record")
    (tmp_path / "kernel.py").write_text("1")
    digest = compiling.sources_digest()
    (tmp_path / "record").write_text(json.dumps({"sources": [0, digest]}))
    main(["compile"])
    assert "no source has changed" in capsys.readouterr().out
    (tmp_path / "kernel.py").write_text("2")
    assert compiling.sources_digest() != digest


def test_every_kernel_that_has_a_launch_is_compiled():
    levels = (*FORWARD_LEVELS.values(), *BACKWARD_LEVELS.values(), *LEVELS.values())
    modules = [*HOPPER_BACKWARD.values(), *(level.hopper for level in levels if level.hopper)]
    launched = {*DEFAULTS, *(kernel for module in modules for kernel in module.LAUNCHES)}
    assert launched <= {case.kernel for case in EVERY if case.capability == 90}
    assert len(EVERY) == len(set(EVERY))


def test_a_launch_is_that_of_the_gpus_table():
    for capability in (90, 80):
        case = Case("sla2_forward", 3, capability, 64, False)
        launch = compiling.launch_of(case)
        _, _, constants, options = compiling.started(case)
        assert (constants["BLOCK_Q"], options) == (launch.block_q, launch.options)
    for is_causal in (False, True):  # with a causal mask the last block of keys is not full either: the longer code
        assert compiling.started(Case("dqdkdv", 5, 90, 64, is_causal))[2]["RAGGED"] is is_causal


FINE = Compiled(
    128, spills=3, shared=90 << 10, int8_instructions=8, float16_instructions=0, serialized=(), conflicts=()
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"int8_instructions": 0}, "expected INT8 tensor-core instructions, found 0"),
        ({"float16_instructions": 4}, "expected no 16-bit tensor-core instructions, found 4"),
        ({"registers": 0}, "0 registers, its launch allows 255"),
        ({"registers": 256}, "256 registers, its launch allows 255"),
        ({"spills": 4}, "4 spill instructions, 3 recorded"),
        ({"spills": 2}, None),
        ({"shared": 100 << 10}, "102400 bytes of shared memory, the GPU has 101376"),
        ({"serialized": ["C7510", "C7514"]}, "matmuls wait for one another: C7510, C7514"),
        ({"conflicts": ["store of [64, 64]"]}, "threads meet in a bank of shared memory: store of [64, 64]"),
    ],
)
def test_faults(change, expected):
    case = Case("forward", 4, 86, 64, True)
    assert complaint(case, FINE._replace(**change), 3) == expected


def test_instructions_are_told_apart():
    """Of Ampere, Hopper and Blackwell; a matmul in TF32 is neither."""
    code = "IMMA.16832.S8.S8 R0; IGMMA.64x128x32.S8.S8 R0; UTCIMMA gdesc[UR4]; HMMA.16816.F32.BF16 R0; LDL.LU R1, [R2];"
    code += (
        "HGMMA.64x64x16.F32 R0; UTCHMMA gdesc[UR4]; HMMA.1688.F32.TF32 R0; STL [R1], R2; LDS R1, [R2]; LDG R1, [R2];"
    )
    assert [count(kind, code) for kind in (INT8, SIXTEEN_BIT, SPILL)] == [3, 3, 2]
