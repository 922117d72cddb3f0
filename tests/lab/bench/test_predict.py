"""A kernel's predicted time: its counted demand, the model, the launch that is chosen, and the command `predict`.

The machine code and the GPUs are made up, so that the results can be worked out by hand.
"""

import contextlib
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
from sage_kernels.common.candidates import Launch
from sage_lab.__main__ import main
from sage_lab.bench import choose, cost_model, predict
from sage_lab.bench.compile import Case
from sage_lab.bench.cost_model import Demand, Gpu, Kernel, gpus, milliseconds, tiles_per_clock, warps_per_scheduler
from sage_lab.bench.instructions import tile_loops
from sage_lab.bench.machine_loop import demand, demand_of
from sage_lab.records import RECORDED, read_record

NOTHING = Demand(*[0] * len(Demand._fields))
# One clock per multiply-add, result and byte of each scheduler, and per warp's instruction where 32 threads share it.
GPU = Gpu("made up", 86, 10, 1.0, 1000, 4, 4, 128, 128, 128, 4, 48, 100 << 10)
INSTRUCTIONS = {  # -> multiply-adds in INT8 and in 16 bit, bytes of shared memory
    "IMMA.16832.S8.S8.SAT R104, R32.reuse.ROW, R164.COL, R140": (16 * 8 * 32, 0, 0),
    "HMMA.16816.F32.BF16 R172, R204, R172, RZ": (0, 16 * 8 * 16, 0),
    "IGMMA.64x128x32.S8.S8 R24, gdesc[UR20], R24": (64 * 128 * 32 // 4, 0, (64 + 128) * 32 // 4),
    "HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR8].tnspB, R88": (0, 64 * 64 * 16 // 4, 64 * 16 * 2 // 4),
    "HFMA2.BF16 R1, R2, R3, R4": (0, 0, 0),
    "LDSM.16.M88.4 R4, [R5]": (0, 0, 512),
    "LDSM.16.MT88.2 R4, [R5]": (0, 0, 256),
    "STSM.16.M88.4 [R80+0x10000], R56": (0, 0, 512),
    "LDS.128 R4, [R5]": (0, 0, 512),
    "STS.64 [R5], R4": (0, 0, 256),
    "STS.U16 [R5], R4": (0, 0, 128),
    "LDGSTS.E.BYPASS.128 [R5], [R6.64]": (0, 0, 512),
    "LDL.LU R4, [R1]": (0, 0, 128),
    "SHFL.BFLY PT, R4, R5, 0x1, 0x1f": (0, 0, 128),
    "LDGDEPBAR": (0, 0, 0),
    "LEA R1, R2, R3": (0, 0, 0),
}


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_matmuls_and_bytes_of_shared_memory_are_counted(instruction):
    found = demand_of([instruction])
    assert (found.int8, found.float16, found.bytes) == INSTRUCTIONS[instruction]


def sass(*lines):
    """Machine code as the disassembler prints it: a label ends with a colon, all else is an instruction."""
    return "\n".join(
        x if x.endswith(":") else f"        /*{i:04x}*/                   {x} ;" for i, x in enumerate(lines)
    )


MASKED = ["IMMA.16832.S8.S8 R0, R1, R2, R3", "MUFU.EX2 R0, R1", *["FSEL R0, R1, R2, P0"] * 3, "STL [R1], R0"]
UNMASKED = [
    "IMMA.16832.S8.S8 R0, R1, R2, R3", "@P0 MUFU.EX2 R0, R1", "FADD2 R0, R1, R2", "I2FP.F32.S32 R0, R1",
    "UMOV UR1, 0x1",
]  # fmt: skip
HEADS = [
    ".L_x_1:", "LDL R0, [R1]", ".L_x_2:", *UNMASKED, "@P0 BRA `(.L_x_2)", ".L_x_3:", *MASKED, "@P1 BRA `(.L_x_3)",
    "@P2 BRA `(.L_x_1)",
]  # fmt: skip
CODE = sass(*HEADS, ".L_x_4:", "SYNCS.PHASECHK P0", "@P0 BRA `(.L_x_4)")


def test_the_inner_loop_without_a_mask_is_counted():
    assert [len(loop) for loop in tile_loops(CODE)] == [len(UNMASKED) + 1, len(MASKED) + 1]
    assert demand(CODE, 1) == Demand(
        instructions=6, float32=2, integer=1, special=1, other=3, bytes=0, int8=16 * 8 * 32, float16=0
    )
    assert demand(CODE, 2) is None


def test_a_warp_alone_takes_the_sum_and_many_those_of_the_busiest_unit():
    needed = NOTHING._replace(instructions=8, float32=10, special=30, int8=20)
    assert cost_model.clocks(needed, GPU) == {
        "tensor cores": 20, "float32": 10, "integer": 0, "special": 30, "shared memory": 0, "other": 0,
    }  # fmt: skip
    assert tiles_per_clock(needed, GPU, 1) == pytest.approx(1 / 60)
    # Two warps: one meets the other at a unit as often as that is there, 10, 30 and 20 of 60 clocks.
    assert tiles_per_clock(needed, GPU, 2) == pytest.approx(2 / (10 * 7 / 6 + 30 * 9 / 6 + 20 * 8 / 6))
    assert tiles_per_clock(needed, GPU, 10**4) == pytest.approx(1 / 30, rel=1e-3)
    assert tiles_per_clock(needed._replace(instructions=50), GPU, 10**4) == 1 / 50
    assert tiles_per_clock(needed, GPU, 0.5) == pytest.approx(0.5 / 60)


def test_how_many_warps_share_a_scheduler():
    kernel = Kernel(64, 64, num_warps=4, registers=128, shared=10 << 10, demand=NOTHING)
    changes = [{}, {"registers": 85}, {"registers": 129}, {"shared": 33 << 10}, {"shared": 100 << 10}]
    assert [warps_per_scheduler(kernel._replace(**change), GPU) for change in changes] == [4, 5, 3, 2, 0]


def test_the_time_is_that_of_all_tiles():
    kernel = Kernel(64, 128, 4, 255, 90 << 10, NOTHING._replace(instructions=1, float32=1000))
    # 3 heads of 8 x 4 tiles; a tile is a warp of each of 4 schedulers, 1000 clocks; 10 multiprocessors at 1 GHz.
    assert milliseconds(kernel, GPU, 3, 512, False) == pytest.approx(3 * 32 * 1000 / 10 / 1e6)
    assert milliseconds(kernel, GPU, 3, 512, True) == pytest.approx(3 * (1 + 1 + 2 + 2 + 3 + 3 + 4 + 4) * 1e-4)


def test_rates_follow_from_data_sheets():
    """Dense multiply-adds per clock of a multiprocessor, 16 bit and INT8, as NVIDIA's white papers have them."""
    rates = {name: (round(gpu.float16 / 8) * 8, round(gpu.int8 / 8) * 8) for name, gpu in gpus().items()}
    assert rates["A100-SXM-80GB"] == (1024, 2048)
    assert rates["RTX 3090"] == rates["RTX 4090"] == rates["RTX 5090"] == (256, 1024)
    assert rates["H100-SXM"] == rates["H200"] == (2048, 4096)


# Which launch is chosen

FORWARD = Case("forward", 4, 86, 64, True)
SMALL, LARGE = Launch(64, 128, 4, 2), Launch(128, 128, 8, 2)


def staged(launch, stages):
    return launch._replace(num_stages=stages)


def row(launch, spills=0, in_loops=0, clocks=1000, instructions=100, shared=10 << 10):
    """A candidate that takes so many clocks per tile of one warp."""
    needed = NOTHING._replace(instructions=instructions, float32=clocks)
    names = {name: getattr(FORWARD, name) for name in ("capability", "kernel", "level", "head_dim")}
    names |= {"registers": 255, "shared": shared, "spills": spills, "spills_in_loops": in_loops}
    return names | launch._asdict() | needed._asdict() | {"instructions_per_score": instructions / 64}


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """chosen(rows) -> the launch that `choose` takes if the compiler makes these rows of the candidates, and the
    launches that were compiled.
    """
    pool = SimpleNamespace(map=map)  # compiles in this process
    monkeypatch.setattr(choose, "ProcessPoolExecutor", lambda workers: contextlib.nullcontext(pool))
    monkeypatch.setattr(choose, "kernels", lambda capability: [FORWARD])

    def run(rows):
        made, compiled = {choose.table_launch(x): x for x in rows}, []
        monkeypatch.setattr(choose, "candidates", lambda *_: tuple(made))
        monkeypatch.setattr(choose, "counted", lambda case: compiled.append(case.launch) or made[case.launch])
        main(["choose", "--capability", "86", "--json", str(tmp_path / "table.json")])
        (found,) = read_record(tmp_path / "table.json").rows
        return choose.table_launch(found), compiled

    return run


THREES = [row(staged(x, 3)) for x in (SMALL, LARGE)]
FAST = row(LARGE, clocks=500)
FAILED = {name: FAST[name] for name in ("kernel", "capability", *Launch._fields)} | {"problem": "CompilationError"}


@pytest.mark.parametrize(
    ("rows", "expected"),
    {
        "the fastest": ([row(SMALL), FAST, *THREES], LARGE),
        "not one that spills in its loop": ([row(SMALL, spills=9), FAST | {"spills_in_loops": 2}, *THREES], SMALL),
        "not one that is too large": ([row(SMALL), FAST | {"shared": 99 * 1024 + 1}, *THREES], SMALL),
        "not one that failed": ([row(SMALL), FAILED, *THREES], SMALL),
        "one stage, where two spill": ([row(SMALL, in_loops=3), row(staged(SMALL, 1), in_loops=1)], staged(SMALL, 1)),
        "three stages are hardly faster": ([row(SMALL), row(staged(SMALL, 3), clocks=980, instructions=90)], SMALL),
        "three stages are faster": ([row(SMALL), row(staged(SMALL, 3), clocks=900)], staged(SMALL, 3)),
        "the fewest instructions of near ties": (
            [row(SMALL, instructions=90), row(LARGE, clocks=980, instructions=95), *THREES],
            SMALL,
        ),
    }.values(),
)
def test_the_launch_that_is_chosen(chosen, rows, expected):
    assert chosen(rows)[0] == expected


def test_stages_are_tried_only_where_they_may_help(chosen):
    one, three = row(staged(SMALL, 1), clocks=1), row(staged(SMALL, 3))
    assert chosen([row(SMALL), one, three])[1] == [SMALL, staged(SMALL, 3)]
    assert chosen([row(SMALL, in_loops=3), one, three])[1] == [SMALL, staged(SMALL, 1)]


def test_a_kernel_of_which_nothing_fits_is_an_error(chosen, capsys):
    with pytest.raises(SystemExit):
        chosen([row(SMALL, shared=1 << 20), row(staged(SMALL, 1), shared=1 << 20)])
    assert "expected one that fits sm_86 forward level 4 D64 causal, found none" in capsys.readouterr().err


def test_the_record_follows_from_the_compiled_table_and_the_answer_says_that_it_is_a_prediction(tmp_path, capsys):
    main(["predict", "--check", "--json", str(tmp_path / "x.json")])
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    committed = read_record(RECORDED / "predicted.json").rows
    assert committed == rows, "the launches that `choose` has compiled have changed: record `predict --check` again"
    assert {x["gpu"] for x in rows if x["part"] == "prediction"} == set(gpus())
    assert all(x["source"] for x in rows if x["part"] == "published")
    capsys.readouterr()
    main(["predict", "--gpu", "RTX 4090"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "INT8 attention" in line]
    assert line.startswith("Predicted for the RTX 4090, 8,192 tokens, against FlashAttention-2: INT8 attention forward")
    verdicts = {(1.2, 1.3): "pays", (1.0, 1.3): "pays at one head size", (1.04, 0.8): "does not pay"}
    assert {gains: predict.verdict(gains) for gains in verdicts} == verdicts
