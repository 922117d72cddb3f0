"""A kernel's predicted time: what is counted, how long that takes, which launch is chosen, what the command says.

The machine code and the GPUs are made up, so that the results can be worked out by hand.
"""

import argparse
import json

import pytest

pytest.importorskip("triton")
from sage_kernels.common.candidates import Launch
from sage_lab.bench import choose, predict, predict_check
from sage_lab.bench.compile import Case
from sage_lab.bench.instructions import tile_loops
from sage_lab.bench.machine_loop import Demand, bytes_of, demand, multiply_adds_of
from sage_lab.bench.timing_model import (
    Gpu,
    Kernel,
    clocks,
    gpus,
    milliseconds,
    tiles_per_clock,
    warps_per_scheduler,
)
from sage_lab.plan import FinishedParts
from sage_lab.records import RECORDED, read_record

NOTHING = Demand(*[0] * len(Demand._fields))
# One clock per multiply-add, result and byte of each scheduler, and per warp's instruction where 32 threads share it.
GPU = Gpu("made up", 86, 10, 1.0, 1000, 4, 4, 128, 128, 128, 4, 48, 100 << 10)


# What is counted


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("IMMA.16832.S8.S8.SAT R104, R32.reuse.ROW, R164.COL, R140", ("int8", 16 * 8 * 32)),
        ("HMMA.16816.F32.BF16 R172, R204, R172, RZ", ("float16", 16 * 8 * 16)),
        ("IGMMA.64x128x32.S8.S8 R24, gdesc[UR20], R24", ("int8", 64 * 128 * 32 // 4)),
        ("HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR8].tnspB, R88", ("float16", 64 * 64 * 16 // 4)),
        ("HFMA2.BF16 R1, R2, R3, R4", (None, 0)),
    ],
)
def test_matmuls_are_told_apart(instruction, expected):
    assert multiply_adds_of(instruction) == expected


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("LDSM.16.M88.4 R4, [R5]", 512),
        ("LDSM.16.MT88.2 R4, [R5]", 256),
        ("STSM.16.M88.4 [R80+0x10000], R56", 512),
        ("LDS.128 R4, [R5]", 512),
        ("STS.64 [R5], R4", 256),
        ("STS.U16 [R5], R4", 128),
        ("LDGSTS.E.BYPASS.128 [R5], [R6.64]", 512),
        ("LDL.LU R4, [R1]", 128),
        ("SHFL.BFLY PT, R4, R5, 0x1, 0x1f", 128),
        ("HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR8], R88", 64 * 16 * 2 // 4),
        ("IGMMA.64x128x32.S8.S8 R24, gdesc[UR20], R24", (64 + 128) * 32 // 4),
        ("LDGDEPBAR", 0),
        ("LEA R1, R2, R3", 0),
    ],
)
def test_bytes_of_shared_memory_are_counted(instruction, expected):
    assert bytes_of(instruction) == expected


def sass(*lines):
    """What the disassembler would print: a label ends with a colon, all else is an instruction."""
    return "\n".join(
        f"{x}" if x.endswith(":") else f"        /*{i:04x}*/                   {x} ;" for i, x in enumerate(lines)
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


def test_loops_over_tiles_are_those_with_matmuls_and_no_such_loop_inside():
    assert [len(loop) for loop in tile_loops(CODE)] == [len(UNMASKED) + 1, len(MASKED) + 1]


def test_the_loop_without_a_mask_is_counted():
    assert demand(CODE, 1) == Demand(
        instructions=6, float32=2, integer=1, special=1, other=3, bytes=0, int8=16 * 8 * 32, float16=0
    )
    assert demand(CODE, 2) is None


# How long it takes


def test_a_warp_alone_takes_the_sum_and_many_those_of_the_busiest_unit():
    asked = NOTHING._replace(instructions=8, float32=10, special=30, int8=20)
    assert clocks(asked, GPU) == {
        "tensor cores": 20, "float32": 10, "integer": 0, "special": 30, "shared memory": 0, "other": 0,
    }  # fmt: skip
    assert tiles_per_clock(asked, GPU, 1) == pytest.approx(1 / 60)
    # Two warps: one meets the other at a unit as often as that is there, 10, 30 and 20 of 60 clocks.
    assert tiles_per_clock(asked, GPU, 2) == pytest.approx(2 / (10 * 7 / 6 + 30 * 9 / 6 + 20 * 8 / 6))
    assert tiles_per_clock(asked, GPU, 10**4) == pytest.approx(1 / 30, rel=1e-3)
    assert tiles_per_clock(asked._replace(instructions=50), GPU, 10**4) == 1 / 50
    assert tiles_per_clock(asked, GPU, 0.5) == pytest.approx(0.5 / 60)


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, 4), ({"registers": 85}, 5), ({"registers": 129}, 3), ({"shared": 33 << 10}, 2), ({"shared": 100 << 10}, 0)],
)
def test_how_many_warps_share_a_scheduler(change, expected):
    kernel = Kernel(64, 64, num_warps=4, registers=128, shared=10 << 10, demand=NOTHING)
    assert warps_per_scheduler(kernel._replace(**change), GPU) == expected


def test_the_time_is_that_of_all_tiles():
    kernel = Kernel(64, 128, 4, 255, 90 << 10, NOTHING._replace(instructions=1, float32=1000))
    # 3 heads of 8 x 4 tiles; a tile is a warp of each of 4 schedulers, 1000 clocks; 10 multiprocessors at 1 GHz.
    assert milliseconds(kernel, GPU, 3, 512, False) == pytest.approx(3 * 32 * 1000 / 10 / 1e6)
    assert milliseconds(kernel, GPU, 3, 512, True) == pytest.approx(3 * (1 + 1 + 2 + 2 + 3 + 3 + 4 + 4) * 1e-4)


def test_rates_follow_from_data_sheets():
    """What NVIDIA's white papers say of a multiprocessor: dense multiply-adds per clock, 16 bit and INT8."""
    rates = {name: (round(gpu.float16 / 8) * 8, round(gpu.int8 / 8) * 8) for name, gpu in gpus().items()}
    assert rates["A100-SXM-80GB"] == (1024, 2048)
    assert rates["RTX 3090"] == rates["RTX 4090"] == rates["RTX 5090"] == (256, 1024)
    assert rates["H100-SXM"] == rates["H200"] == (2048, 4096)


# Which launch is chosen

FORWARD = Case("forward", 4, 86, 64, True)


def row(launch, spills=0, in_loops=0, clocks=1000, instructions=100, shared=10 << 10):
    """A candidate that takes so many clocks per tile of one warp."""
    asked = NOTHING._replace(instructions=instructions, float32=clocks)
    names = {name: getattr(FORWARD, name) for name in ("capability", "kernel", "level", "head_dim")}
    names |= {"registers": 255, "shared": shared, "spills": spills, "spills_in_loops": in_loops}
    return names | launch._asdict() | asked._asdict() | {"instructions_per_score": instructions / 64}


def pick(monkeypatch, tmp_path, rows, case=FORWARD):
    """What is chosen if the compiler makes this of the candidates, and the launches that were compiled."""
    made, seen = {choose.table_launch(x): x for x in rows}, []

    def compiled(jobs, parts, workers):
        seen.extend(job.launch for job in jobs)
        return [made[job.launch] for job in jobs]

    monkeypatch.setattr(choose, "candidates", lambda *_: tuple(made))
    monkeypatch.setattr(choose, "compiled", compiled)
    (found,) = choose.chosen([case], FinishedParts(tmp_path / "x.json", ()), 1)
    return choose.table_launch(found), seen


SMALL, LARGE = Launch(64, 128, 4, 2), Launch(128, 128, 8, 2)


def staged(launch, stages):
    return launch._replace(num_stages=stages)


def test_the_fastest_that_does_not_spill_in_its_loop_is_chosen(monkeypatch, tmp_path):
    fast = row(LARGE, clocks=500)
    threes = [row(staged(x, 3)) for x in (SMALL, LARGE)]
    assert pick(monkeypatch, tmp_path, [row(SMALL), fast, *threes]) == (LARGE, [SMALL, LARGE, staged(LARGE, 3)])
    spilling = fast | {"spills_in_loops": 2}
    assert pick(monkeypatch, tmp_path, [row(SMALL, spills=9), spilling, *threes])[0] == SMALL
    too_large = fast | {"shared": 99 * 1024 + 1}
    assert pick(monkeypatch, tmp_path, [row(SMALL), too_large, *threes])[0] == SMALL
    failed = {name: fast[name] for name in ("kernel", "capability", *Launch._fields)} | {"problem": "CompilationError"}
    assert pick(monkeypatch, tmp_path, [row(SMALL), failed, *threes])[0] == SMALL


def test_one_stage_is_tried_only_where_two_spill_and_three_must_be_faster(monkeypatch, tmp_path):
    one, three = staged(SMALL, 1), staged(SMALL, 3)
    rows = [row(SMALL, in_loops=3), row(one, in_loops=1), row(three)]
    assert pick(monkeypatch, tmp_path, rows) == (one, [SMALL, one])
    hardly = row(three, clocks=980, instructions=90)
    assert pick(monkeypatch, tmp_path, [row(SMALL), row(one, clocks=1), hardly])[0] == SMALL
    assert pick(monkeypatch, tmp_path, [row(SMALL), row(one, clocks=1), row(three, clocks=900)])[0] == three


def test_near_ties_go_to_the_fewest_instructions(monkeypatch, tmp_path):
    rows = [row(SMALL, clocks=1000, instructions=90), row(LARGE, clocks=980, instructions=95)]
    rows += [row(staged(launch, 3)) for launch in (SMALL, LARGE)]
    assert choose.predicted(rows[0]) > choose.predicted(rows[1])
    assert pick(monkeypatch, tmp_path, rows)[0] == SMALL


def test_a_kernel_of_which_nothing_fits_is_an_error(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="expected one that fits sm_86 forward level 4 D64 causal, found none"):
        pick(monkeypatch, tmp_path, [row(SMALL, shared=1 << 20), row(staged(SMALL, 1), shared=1 << 20)])


def test_what_a_killed_run_compiled_is_not_compiled_again(monkeypatch, tmp_path):
    jobs = [FORWARD._replace(launch=launch) for launch in (SMALL, LARGE, staged(SMALL, 1))]
    seen = []

    class Pool:
        """In this process, and killed before the third."""

        def __init__(self, workers):
            self.map = map

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    def counted(job):
        if len(seen) == 2:
            seen.append("killed")
            raise KeyboardInterrupt
        seen.append(job.launch)
        return row(job.launch)

    monkeypatch.setattr(choose, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(choose, "counted", counted)
    with pytest.raises(KeyboardInterrupt):
        choose.compiled(jobs, FinishedParts(tmp_path / "x.json", ()), 1)
    rows = choose.compiled(jobs, FinishedParts(tmp_path / "x.json", ()), 1)
    assert seen == [SMALL, LARGE, "killed", staged(SMALL, 1)]
    assert rows == [row(job.launch) for job in jobs]


@pytest.mark.parametrize(("digest", "again"), [("as it was", []), ("changed", [64])])
def test_a_killed_run_goes_on_unless_the_programs_have_changed(monkeypatch, tmp_path, digest, again):
    seen, kills = [], [True, False]

    def chosen(asked, parts, workers):
        for case in asked:
            yield from parts.rows(case.name, lambda case=case: seen.append(case.head_dim) or [row(SMALL)])
            if kills.pop(0):
                raise KeyboardInterrupt
            kills.append(False)

    def choose_all():
        parser = argparse.ArgumentParser()
        choose.add_options(parser)
        options = parser.parse_args(["--capability", "86", "--record", str(tmp_path / "table.json")])
        options.command = "choose"
        choose.run(options)

    monkeypatch.setattr(choose, "chosen", chosen)
    monkeypatch.setattr(choose, "kernels", lambda capability: [FORWARD, FORWARD._replace(head_dim=128)])
    monkeypatch.setattr(choose, "sources", lambda: "as it was")
    with pytest.raises(KeyboardInterrupt):
        choose_all()
    monkeypatch.setattr(choose, "sources", lambda: digest)
    choose_all()
    assert seen == [64, *again, 128]


# What the command says


def run(*arguments):
    parser = argparse.ArgumentParser()
    predict.add_options(parser)
    options = parser.parse_args(arguments)
    options.command = "predict"
    predict.run(options)


def test_the_answer_names_the_gpu_and_says_that_it_is_a_prediction(capsys):
    run("--gpu", "RTX 4090")
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "INT8 attention" in line]
    assert said.startswith("Predicted for the RTX 4090, 8,192 tokens, against FlashAttention-2: INT8 attention forward")


@pytest.mark.parametrize(
    ("gains", "expected"),
    [([1.2, 1.3], "pays"), ([1.0, 1.3], "pays at one head size"), ([1.04, 0.8], "does not pay")],
)
def test_the_verdict(gains, expected):
    assert predict.verdict(gains) == expected


def test_a_gpu_without_a_data_sheet_is_an_error():
    with pytest.raises(ValueError, match="gpu: expected some of A100-SXM-80GB, .*, got RTX 9090"):
        run("--gpu", "RTX 9090")


def test_int8_with_quantisation_against_flash_attention(monkeypatch):
    """Kernels of 1 ms each: FlashAttention-2's backward has 5 of level 0's 7 matmuls, INT8 passes over memory."""
    monkeypatch.setattr(predict, "kernel_ms", lambda *_: 1.0)
    gpu, n = GPU._replace(memory_gb_s=1.0), 1000
    pass_ms = 8192 * n / 1e6  # a byte per number
    assert predict.op_ms(gpu, predict.PEER, "fwd", 64, n, False) == 1.0
    assert predict.op_ms(gpu, predict.PEER, "fwd+bwd", 64, n, False) == pytest.approx(1 + 5 / 7 + 4 * pass_ms)
    assert predict.op_ms(gpu, predict.INT8, "fwd+bwd", 64, n, False) == pytest.approx(2 + (11 + 9) * pass_ms)


def test_every_listed_gpu_and_check_is_recorded(tmp_path, capsys):
    run("--check", "--record", str(tmp_path / "x.json"))
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert {x["gpu"] for x in rows if x["part"] == "prediction"} == set(gpus())
    levels = sum(map(len, predict.PORTABLE.values()))
    assert sum(x["part"] == "H200" for x in rows) == 2 * levels
    others = [x for x in rows if x["part"] == "published"]
    assert len(others) == len(list(predict_check.against_others()))
    assert all(x["source"] for x in others)
    committed = read_record(RECORDED / "predicted.json").rows
    assert committed == rows, "the launches that `choose` has compiled have changed: record `predict --check` again"
