"""The numbers that notebooks 08 and 09 claim, on the same inputs or the same records."""

import ast
import json
import math
import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from sage_course.figures import (
    KIND_COLORS,
    PEAK,
    TERA_SLOTS,
    UNIT_COLORS,
    busy,
    busy_figure,
    draw_activity,
    draw_instructions,
    draw_units,
    ladder_figure,
    level_clocks,
    panels,
    power_figure,
    roofline_figure,
    unit_clocks,
)
from sage_lab.records import REPOSITORY, Record, read_record
from torch.testing import assert_close

from sage_ref.attention import attention_backward, attention_forward
from sage_ref.quantization import fake_quantize, integer_matmul, quantize, quantized_matmul
from sage_ref.tracing import relative_l2

SIZES = (1024, 2048, 4096, 8192, 16384)


@pytest.fixture(scope="module")
def bench():
    return read_record("bench_h200")


@pytest.fixture(scope="module")
def instructions():
    return read_record("instructions_sm90")


@pytest.fixture(scope="module")
def profile():
    return read_record("profile_h200")


def milliseconds(bench, level, head_dim, **changed):
    row = {"scope": "kernel", "provider": "sage_kernels", "direction": "fwd", "n_q": 8192, "causal": False} | changed
    (found,) = bench.select(level=level, head_dim=head_dim, **row)
    return found["ms_median"]


def per_score(instructions, kernel, level, head_dim, *kinds):
    rows = instructions.select(kernel=kernel, level=level, head_dim=head_dim)
    assert rows
    return sum(row["per_score"] for row in rows if not kinds or row["kind"] in kinds)


class TestRecord:
    """What the prose says of the recorded times: orderings and ranges, not values."""

    @pytest.mark.parametrize("d", [64, 128])
    def test_backward_ladder(self, bench, d):
        times = [milliseconds(bench, level, d, direction="bwd") for level in range(4)]
        assert min(times) == times[0]
        assert min(times[1:]) == times[3]
        assert times[2] > times[1]
        assert times[3] < milliseconds(bench, None, d, provider="sdpa_flash", scope="autograd", direction="bwd")

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("d", [64, 128])
    def test_forward_and_backward_need_a_few_thousand_tokens(self, bench, d, causal):
        where = {"scope": "autograd", "direction": "fwd+bwd", "causal": causal}
        speed_up = {
            n: milliseconds(bench, None, d, provider="sdpa_flash", n_q=n, **where)
            / bench.select(provider="sage_kernels", head_dim=d, n_q=n, **where)[0]["ms_median"]
            for n in SIZES
        }
        assert speed_up[1024] < 1 < speed_up[8192]


class TestInstructions:
    def test_spills_appear_where_the_register_budget_is_exceeded(self, instructions):
        for level, program, kernel in (
            (0, "dkdv", "dkdv_16bit"),
            (1, "dkdv", "dkdv"),
            (1, "dq", "dq"),
            (3, "dk", "dk"),
        ):
            rows = instructions.select(kernel=kernel, level=level, head_dim=128)
            launch, accumulators = rows[0], 2 if program == "dkdv" else 1
            height = launch["block_q"] if program == "dq" else launch["block_kv"]
            needed = (accumulators * height * 128 + 2 * launch["block_q"] * launch["block_kv"]) // (
                32 * launch["num_warps"]
            )
            spills = per_score(instructions, kernel, level, 128, "spill")
            assert (needed > 255) == (spills > 0.5), (level, program)

    @pytest.mark.parametrize("d", [64, 128])
    def test_an_int8_matmul_of_the_backward_adds_more_than_it_saves(self, instructions, d):
        int8 = sum(per_score(instructions, kernel, 1, d) for kernel in ("dq", "dkdv"))
        float16 = sum(per_score(instructions, kernel, 0, d) for kernel in ("dq_16bit", "dkdv_16bit"))
        assert (int8 - float16) / 5 > (2 * d / 4096 - 2 * d / 8192) * 128

    @pytest.mark.parametrize("d", [64, 128])
    def test_level_5_moves_and_spills_nothing(self, instructions, d):
        """P stays in its thread: what moves are the scales and the rows' maxima."""
        assert per_score(instructions, "forward", 5, d, "move", "spill") < 0.2
        assert per_score(instructions, "forward", 5, d) < 0.75 * per_score(instructions, "forward", 4, d)

    def test_kinds_are_drawn_completely(self, instructions):
        assert {row["kind"] for row in instructions.rows} == set(KIND_COLORS)


# A spin on a barrier, the loop over tiles in a larger one, and twice the exponentials after it.
CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0008*/               @P2 BRA `(.L_x_0) ;
.L_x_1:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
.L_x_2:
        /*0020*/              @!P0 FADD R3, R3, R4 ;
        /*0030*/                   F2I.S8.NTZ R5, R3 ;
        /*0038*/                   MUFU.EX2 R5, R3 ;
        /*0040*/                   IGMMA.64x128x32.S8.S8 R24, gdesc[UR8], R24 ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/                   MUFU.EX2 R5, R3 ;
        /*0068*/               @P0 BRA `(.L_x_1) ;
        /*0070*/                   BRA `(.L_x_3);
.L_x_3:
"""


COUNT = """
import json
from sage_lab.bench.compile import Case
from sage_lab.bench.instructions import case_rows
print(json.dumps([list(case_rows(Case("forward", level, 90, 64, False))) for level in (4, 5)]))
"""


class TestInstructionCounter:
    @pytest.fixture(autouse=True)
    def counter(self):
        pytest.importorskip("triton")
        from sage_lab.bench import instructions

        self.counter = instructions

    def test_takes_the_loop_with_the_exponentials_of_one_tile(self):
        kinds = ["arithmetic", "conversion", "exp2", "matmul", "rest"]
        assert [self.counter.kind_of(line) for line in self.counter.hot_loop(CODE, scores=1)] == kinds
        assert [self.counter.kind_of(line) for line in self.counter.hot_loop(CODE, scores=2)][0] == "matmul"

    @pytest.mark.parametrize("scores", [3, 100])
    def test_refuses_code_without_such_a_loop(self, scores):
        with pytest.raises(ValueError, match=f"code: expected a loop with {scores} exponentials"):
            self.counter.hot_loop(CODE, scores)

    def test_refuses_a_loop_over_more_than_one_tile(self):
        with pytest.raises(ValueError, match="code: expected a loop with 1 exponentials"):
            self.counter.hot_loop(CODE.replace("FADD R3, R3, R4", "MUFU.EX2 R3, R4"), scores=1)

    def test_of_the_loops_that_add_to_memory_it_takes_the_shortest(self):
        code = CODE.replace("F2I.S8.NTZ R5, R3", "UTMAREDG.2D.ADD [UR8], [UR4]")
        kinds = ["arithmetic", "rest", "exp2", "matmul", "rest"]
        assert [self.counter.kind_of(line) for line in self.counter.adding_loop(code)] == kinds
        with pytest.raises(ValueError, match="code: expected a loop that adds to memory, found none"):
            self.counter.adding_loop(CODE)

    def test_the_record_is_what_it_counts(self, instructions):
        if instructions.provenance["triton"] != metadata.version("triton"):
            pytest.skip("recorded with another compiler")
        # A process of its own: the compiler can't run where the interpreter does.
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-c", COUNT]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        recorded = [instructions.select(kernel="forward", level=level, head_dim=64) for level in (4, 5)]
        assert json.loads(done.stdout) == recorded

    @pytest.mark.parametrize(
        ("instruction", "kind"),
        [
            ("MUFU.EX2 R1, R2", "exp2"), ("MUFU.RCP R1, R2", "rest"), ("I2FP.F32.S32 R1, R2", "conversion"),
            ("FMNMX R1, R2, R3, !PT", "maximum"), ("VIMNMX3 R1, R2, R3, R4, !PT", "maximum"),
            ("IMAD.MOV.U32 R1, RZ, RZ, R2", "move"), ("IMAD R1, R2, R3, R4", "rest"),
            ("LDL.64 R1, [R2]", "spill"), ("LDS R1, [R2]", "rest"),
        ],
    )  # fmt: skip
    def test_kind(self, instruction, kind):
        assert self.counter.kind_of(instruction) == kind


class TestGroups:
    column = torch.arange(16)
    order = column.reshape(2, 4, 2).permute(1, 0, 2).flatten()

    def test_it_is_the_order_of_the_kernels(self):
        pytest.importorskip("triton")
        from sage_kernels.sagebwd.ladder import prepare_forward

        value = torch.randn(1, 1, 128, 32, generator=torch.Generator().manual_seed(0)).half()
        as_is, grouped = (
            prepare_forward(value, value, value, level, scale=1.0, smooth_k=False).v_hat.transposed for level in (3, 4)
        )
        regroup = torch.arange(128).reshape(-1, 16)[:, self.order].flatten()
        assert torch.equal(grouped, as_is[..., regroup])


class TestBackward:
    def test_a_scale_per_query_serves_dq_and_not_dk(self):
        generator = torch.Generator().manual_seed(0)
        q, k, v, do = (torch.randn(256, 32, generator=generator, dtype=torch.float64) for _ in range(4))
        do = do * torch.exp(torch.randn(256, 1, generator=generator, dtype=torch.float64))
        forward = attention_forward(q, k, v)
        exact = attention_backward(do, q, k, v, forward.output, forward.log_sum_exp)
        c, q_hat = 1 / math.sqrt(32), quantize(q)
        ds_hat, per_key = quantize(exact.grad_scores, (1, None)), quantize(exact.grad_scores, (None, 1))
        assert relative_l2(quantized_matmul(ds_hat, quantize(k)) * c, exact.grad_query) < 0.03
        with pytest.raises(ValueError, match="one scale along the contraction"):
            quantized_matmul(ds_hat.mT, q_hat)
        factored_out = integer_matmul(ds_hat.values.mT, q_hat.values) * ds_hat.scale.mean() * q_hat.scale * c
        assert relative_l2(factored_out, exact.grad_key) > 0.3
        assert relative_l2(quantized_matmul(per_key.mT, q_hat) * c, exact.grad_key) < 0.04

    def test_a_constant_scale_for_p_loses_dv(self):
        generator = torch.Generator().manual_seed(0)
        q, k, do = (torch.randn(2048, 64, generator=generator) for _ in range(3))
        scores = 0.3 * q @ k.mT / 8
        p = torch.exp(scores[:, :64] - scores.logsumexp(-1, keepdim=True))
        dv = p.mT @ do
        assert relative_l2((torch.round(127 * p) / 127).mT @ do, dv) > 0.99
        assert relative_l2(fake_quantize(p, (128, 1)).mT @ do, dv) < 0.02


class TestFigures:
    @pytest.mark.parametrize("direction", ["fwd", "bwd"])
    def test_ladder(self, bench, direction):
        elsewhere = [row for row in bench.rows if row["level"] not in (4, 5)]  # a GPU that isn't Hopper
        here = Record({"gpu": "another GPU"}, elsewhere)
        figure = ladder_figure(bench, direction, title="Title", here=here)
        for ax, head_dim in zip(figure.axes, (128, 64), strict=True):
            heights = [patch.get_height() for patch in ax.patches]
            size = {"scope": "kernel", "n_q": 8192, "causal": False, "direction": direction}
            expected = {row["level"]: row["tops"] for row in bench.select(head_dim=head_dim, **size)}
            assert heights == [expected[level] for level in range(len(expected))]
            assert any("another GPU" in line.get_label() for line in ax.lines)

    def test_roofline(self, bench, instructions):
        (ax,) = roofline_figure(bench, instructions, title="Title").axes
        roof, no_overlap = (line.get_ydata() for line in ax.lines[:2])
        assert max(roof) == pytest.approx(PEAK["INT8"])
        assert all(low < high for low, high in zip(no_overlap, roof, strict=True))
        assert ax.lines[0].get_xdata().max() * TERA_SLOTS > PEAK["INT8"]
        size = {"scope": "kernel", "n_q": 8192, "causal": False, "direction": "fwd"}
        assert len(ax.lines) == 4 + len(bench.select(**size))

    def test_instructions(self, instructions):
        _, (ax,) = panels(1)
        rows = instructions.select(kernel="forward", level=2, head_dim=64)
        draw_instructions(ax, {"a": rows, "b": []}, title="Title")
        tops = [patch.get_y() + patch.get_height() for patch in ax.patches]
        assert_close(max(tops), sum(row["per_score"] for row in rows))


SHAPE = {"head_dim": 128, "block_q": 192, "block_kv": 128}
HOPPER_ROWS = [
    {"kernel": "forward", "level": 5, **SHAPE, "kind": kind, "per_score": count}
    for kind, count in {
        "matmul": 0.125, "exp2": 1.0, "conversion": 2.0, "maximum": 0.5, "arithmetic": 3.0, "move": 0.1, "spill": 0.0,
        "rest": 1.0,
    }.items()
]  # fmt: skip


def program_rows(kernel, level, head_dim):
    own, other = "block_kv", "block_q"
    if kernel.split("_")[0] in ("forward", "dq"):  # the others stream queries
        own, other = other, own
    return [row | {"kernel": kernel, "level": level, "head_dim": head_dim, own: 64, other: 128} for row in HOPPER_ROWS]


def profiled(kernel, head_dim, **changed):
    shares = {"tensor": 40.0, "issue": 50.0, "exp2": 30.0, "alu": 20.0, "l2": 10.0}
    times = {"profiled_ms": 2.0, "profiled_ghz": 1.5, "sustained_ghz": 1.7, "sustained_watts": 690.0}
    return {"kernel": kernel, "head_dim": head_dim, "power_capped": True, **shares, **times} | changed


WHERE = {"gpu": "a GPU", "commit": "0123456789", "date": "2026-11-21T00:00:00"}


class TestUnits:
    """Clocks that each unit of a multiprocessor needs for a score, by hand and against the profiler's record."""

    def test_forward_by_hand(self):
        clocks = unit_clocks(HOPPER_ROWS)
        assert clocks["tensor"] == 2 * 128 / 4096
        assert clocks["exp2"] == 1 / 16
        assert clocks["alu"] == pytest.approx(2.6 / 64)
        assert clocks["issue"] == pytest.approx(7.725 / 128)
        assert clocks["l2"] == pytest.approx(2 * 128 / 192 / (5120 / 132))
        assert clocks["turns"] == pytest.approx(1 / 16 + 1 / 16 + 2.6 / 64 + 4.125 / 128)

    @pytest.mark.parametrize(
        ("kernel", "level", "tensor", "bytes_per_token"),
        [
            # multiply-adds in units of D at the 16-bit rate, bytes of a tile's token in units of D
            ("forward", 0, 2, 4), ("forward", 1, 1.5, 3), ("forward", 2, 1, 2), ("forward", 4, 1, 2),
            ("dq_16bit", 0, 3, 4), ("dkdv_16bit", 0, 4, 4), ("dq", 1, 2, 4), ("dkdv", 1, 2.5, 5),
            ("dkdv_per_block", 2, 2.5, 5), ("dk", 4, 2, 4), ("dv", 4, 1, 2),
            ("dqdkdv", 5, 3, 13), ("dqdkdv_wide", 5, 3, 13),
        ],
    )  # fmt: skip
    def test_matmuls_and_traffic_of_every_program(self, kernel, level, tensor, bytes_per_token):
        clocks = unit_clocks(program_rows(kernel, level, 64))
        assert clocks["tensor"] == pytest.approx(tensor * 64 / 2048)
        assert clocks["l2"] == pytest.approx(bytes_per_token * 64 / 64 / (5120 / 132))

    def test_a_level_is_the_sum_of_its_programs(self):
        rows = [row for kernel in ("dq", "dk", "dv", "dkdv", "forward") for row in program_rows(kernel, 4, 128)]
        rows += program_rows("dq", 3, 128) + program_rows("dq", 4, 64)
        found = level_clocks(Record({}, rows), 4, 128, "bwd")
        parts = [unit_clocks(program_rows(kernel, 4, 128)) for kernel in ("dq", "dk", "dv")]  # dkdv is for others
        assert found == pytest.approx({unit: sum(part[unit] for part in parts) for unit in parts[0]})
        assert level_clocks(Record({}, rows), 4, 128) == unit_clocks(program_rows("forward", 4, 128))
        assert level_clocks(Record({}, rows), 1, 128, "bwd") == {}

    def test_busy_is_need_over_time(self):
        # 10^9 scores in 2 ms at 1.5 GHz on 132 multiprocessors: 0.396 clocks for each
        found = busy(HOPPER_ROWS, ms=2.0, ghz=1.5, scores=1e9)
        assert set(found) == set(UNIT_COLORS)
        assert found["exp2"] == pytest.approx(100 / 16 / 0.396)

    @pytest.mark.parametrize("d", [64, 128])
    def test_counting_agrees_with_the_profiler(self, instructions, profile, d):
        scores = 4 * 2048 // d * 8192**2
        for row in profile.select(head_dim=d):
            if row["tensor"] is None:  # cuDNN's
                continue
            level = {"forward": 5, "dqdkdv": 5, "dqdkdv_wide": 5, "dkdv_pairs": 6}.get(row["kernel"], 4)
            rows = instructions.select(kernel=row["kernel"], level=level, head_dim=d)
            counted = busy(rows, row["profiled_ms"], row["profiled_ghz"], scores)
            for unit in ("tensor", "exp2", "issue"):
                assert counted[unit] == pytest.approx(row[unit], abs=6), (row["kernel"], unit)


class TestHopper:
    """What sections "What Hopper adds" of notebooks 08 and 09 claim."""

    @pytest.mark.parametrize("d", [64, 128])
    def test_the_forward_leads_past_everything(self, bench, d):
        time = milliseconds(bench, 5, d)
        assert all(time < milliseconds(bench, level, d) for level in range(5))
        for peer in ("sdpa_flash", "sdpa_cudnn"):
            assert time < milliseconds(bench, None, d, provider=peer, scope="autograd")

    @pytest.mark.parametrize("d", [64, 128])
    def test_the_backward_turns_the_loss_into_a_gain(self, bench, d):
        for best in (4, 5):
            time = milliseconds(bench, best, d, direction="bwd")
            assert all(time < milliseconds(bench, level, d, direction="bwd") for level in range(best))
            assert time < milliseconds(bench, None, d, provider="sdpa_flash", scope="autograd", direction="bwd")

    @pytest.mark.parametrize(("direction", "last"), [("fwd", 5), ("bwd", 4)])
    @pytest.mark.parametrize("d", [64, 128])
    def test_the_hopper_level_overlaps_most(self, bench, instructions, d, direction, last):
        share, most = {}, {}
        for level in range(last + 1):
            clocks = level_clocks(instructions, level, d, direction)
            measured = milliseconds(bench, level, d, direction=direction) * PEAK["bf16"] / 4096 * 1e9
            measured /= 4 * 2048 // d * 8192**2
            share[level], most[level] = measured / clocks["turns"], measured / max(clocks[unit] for unit in UNIT_COLORS)
        assert min(share, key=share.get) == last
        assert share[last] < 0.8
        assert min(most.values()) > 1.3

    def test_sharing_a_stream_takes_the_l2_cache_out_of_the_way(self, instructions):
        before, after = (level_clocks(instructions, level, 128) for level in (4, 5))
        assert before["l2"] == max(before[unit] for unit in UNIT_COLORS)
        assert after["l2"] == min(after[unit] for unit in UNIT_COLORS)

    @pytest.mark.parametrize("d", [64, 128])
    def test_one_pass_takes_work_off_every_unit_but_the_l2_cache(self, instructions, d):
        split, one_pass = (level_clocks(instructions, level, d, "bwd") for level in (4, 5))
        assert all(one_pass[unit] < 0.9 * split[unit] for unit in ("tensor", "exp2", "alu", "issue"))
        assert one_pass["l2"] > split["l2"]

    def test_additions_keep_the_l2_cache_busier_than_any_other_program(self, profile):
        l2 = {(row["kernel"], row["head_dim"]): row["l2"] for row in profile.rows if row["tensor"]}
        for one_pass in (("dqdkdv_wide", 128), ("dqdkdv", 64)):
            rest = (busy for name, busy in l2.items() if name[1] == one_pass[1] and name != one_pass)
            assert l2[one_pass] > 1.1 * max(rest)

    def test_who_spills_among_the_hopper_levels(self, instructions):
        spills = {
            (kernel, d): per_score(instructions, kernel, 4, d, "spill")
            for kernel, d in (("dq", 64), ("dkdv", 64), ("dq", 128), ("dk", 128), ("dv", 128))
        }
        assert 0.3 < spills.pop(("dkdv", 64)) < 0.5
        assert not any(spills.values())
        assert per_score(instructions, "dqdkdv", 5, 64, "spill") == 0
        assert per_score(instructions, "dqdkdv_wide", 5, 128, "spill") == 0

    def test_no_unit_is_full(self, profile):
        assert max(row[unit] for row in profile.rows if row["tensor"] for unit in UNIT_COLORS) < 75

    def test_power_holds_down_the_clock(self, profile):
        ours = {(row["kernel"], row["head_dim"]): row for row in profile.rows if row["tensor"]}
        assert all(row["power_capped"] == (kernel != "forward") for (kernel, _), row in ours.items())
        slowest = sorted(ours, key=lambda name: ours[name]["sustained_ghz"])[:2]
        assert set(slowest) == {("dq", 128), ("dk", 128)}

    @pytest.mark.parametrize("causal", [False, True])
    def test_the_backward_passes_cudnn_but_for_128_with_a_mask(self, bench, causal):
        where = {"direction": "bwd", "causal": causal}
        peer = {d: milliseconds(bench, None, d, provider="sdpa_cudnn", scope="autograd", **where) for d in (64, 128)}
        ratio = {d: [peer[d] / milliseconds(bench, level, d, **where) for level in (4, 5)] for d in peer}
        assert 0.95 < ratio[128][0] < ratio[128][1]
        assert (0.97 if causal else 1.05) < ratio[128][1] < (1.05 if causal else 1.2)
        assert 0.8 < ratio[64][0] < 1 < ratio[64][1] < 1.1

    @pytest.mark.parametrize("causal", [False, True])
    def test_forward_and_backward_together(self, bench, causal):
        where = {"scope": "autograd", "direction": "fwd+bwd", "causal": causal}
        for row in bench.select(provider="sage_kernels", **where):
            size = {"head_dim": row["head_dim"], "n_q": row["n_q"]}
            flash, cudnn = (
                bench.select(provider=peer, **where, **size)[0]["ms_median"] / row["ms_median"]
                for peer in ("sdpa_flash", "sdpa_cudnn")
            )
            assert (flash > 1.3) == (row["n_q"] >= 4096), size
            assert cudnn < 1.3, size
            if row["n_q"] >= 8192:
                assert cudnn > 1, size

    def test_a_row_is_in_four_neighbouring_threads(self):
        # The layout that level 5 and backward level 4 name for a matmul's result, and the kernels' maxima rest on.
        lane = torch.arange(32)
        columns = (torch.arange(0, 128, 8)[:, None] + torch.arange(2)).flatten()
        held = torch.zeros(16, 128, dtype=torch.int64)
        for below in (0, 8):
            held[(lane // 4 + below)[:, None], columns + 2 * (lane % 4)[:, None]] += 1
        assert (held == 1).all()

    @pytest.mark.parametrize(
        ("name", "file", "functions"),
        [
            ("08b_hopper_forward", "sagebwd/forward/level5_hopper.py", ["key_tile"]),
            ("08b_hopper_forward", "hopper/toolbox.py", ["release"]),
            ("09b_hopper_backward", "sagebwd/backward/level4/queries.py", ["key_tile", "add_product"]),
            ("09b_hopper_backward", "sagebwd/backward/level5/narrow.py", ["query_tile"]),
            ("09b_hopper_backward", "sagebwd/backward/level5/wide.py", ["add_part"]),
        ],
    )
    def test_code_shown_is_the_code_there_is(self, name, file, functions):
        cells = json.loads((REPOSITORY / "notebooks" / f"{name}.ipynb").read_text())["cells"]
        printed = "".join("".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))
        source = (REPOSITORY / "kernels" / "sage_kernels" / file).read_text()
        for node in ast.parse(source).body:
            if getattr(node, "name", None) in functions:
                functions = [function for function in functions if function != node.name]
                assert ast.get_source_segment(source, node) in printed
        assert not functions


@pytest.fixture(scope="module")
def protocol(instructions):
    """The barriers' simulation, from notebook 08b's own cells."""
    cells = json.loads((REPOSITORY / "notebooks" / "08b_hopper_forward.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = {"MATMUL": 4, "UPDATE": 3, "SOFTMAX": 16, "FETCH": 3}
    for start in ("class Barrier:", "class Program:", "TILES = ", "def warpgroup(program", "def run("):
        (source,) = [source for source in sources if source.startswith(start)]
        exec(source.partition("\nprint(")[0], names)
    return names


class TestProtocol:
    @pytest.mark.parametrize("places", [1, 2, 3, 4])
    @pytest.mark.parametrize("warpgroups", [1, 2, 3])
    def test_every_tile_is_read_by_every_warpgroup(self, protocol, warpgroups, places):
        log = protocol["run"](warpgroups, places)
        assert log["loading warp"].count("fetch") == 3 * 12
        for w in range(warpgroups):
            assert log[f"warpgroup {w}"].count("matmul") == 12 * 2 * 4
            assert log[f"warpgroup {w}"].count("softmax") == 12 * 16
        # a unit works for one at a time
        alone = zip(*(log[f"warpgroup {w}"] for w in range(warpgroups)), strict=False)
        assert all(sum(activity == "matmul" for activity in tick) <= 1 for tick in alone)

    def test_one_arrival_too_many_stops_when_the_ring_is_full(self, protocol):
        for places in (2, 3, 4):
            with pytest.raises(RuntimeError, match=f"deadlock: the loading warp fetched {places} tiles"):
                protocol["run"](3, places, arrivals=4)

    @pytest.mark.parametrize("arrivals", [1, 2])
    def test_too_few_arrivals_give_a_wrong_tile(self, protocol, arrivals):
        with pytest.raises(RuntimeError, match="expected tile 0 and read tile 3"):
            protocol["run"](3, 3, arrivals=arrivals)

    def test_a_loading_warp_that_starts_with_the_wrong_phase_stops_at_once(self, protocol):
        def loading_warp(program):
            yield from program.empty[0].wait(0)

        with pytest.raises(RuntimeError, match="deadlock: the loading warp fetched 0 tiles"):
            protocol["run"](loading_warp=loading_warp)

    def test_three_warpgroups_hide_the_matmuls(self, protocol):
        length = {w: max(map(len, protocol["run"](w).values())) for w in (1, 3)}
        assert length[1] == pytest.approx(12 * (2 * 4 + 16 + 3), abs=5)
        assert length[3] == pytest.approx(3 * 12 * (16 + 3), rel=0.06)


class TestHopperFigures:
    def test_units(self):
        _, (ax,) = panels(1)
        levels = {4: unit_clocks(program_rows("forward", 4, 128)), 5: unit_clocks(HOPPER_ROWS)}
        draw_units(ax, levels, {4: 0.3, 5: 0.2}, title="Title")
        expected = [levels[level][unit] for level in levels for unit in UNIT_COLORS]
        assert [patch.get_height() for patch in ax.patches] == expected
        lines = [line.get_ydata()[0] for line in ax.lines]
        assert lines == [levels[4]["turns"], 0.3, levels[5]["turns"], 0.2]
        assert ax.get_legend_handles_labels()[1][:2] == ["if no two worked at once", "measured"]

    def test_busy(self):
        rows = [profiled("dq", 128), profiled("dq", 64), profiled("dv", 64, tensor=33.0)]
        older = [row | {"per_score": 9.0} for row in program_rows("dq", 3, 64)]
        instructions = Record({}, program_rows("dq", 4, 128) + program_rows("dq", 4, 64) + older)
        scores = {128: 1e9, 64: 2e9}
        figure = busy_figure(Record(WHERE, rows), instructions, {"dq": 4, "dk": 4, "dv": 4}, scores=scores, title="")
        for ax, head_dim, shown in zip(figure.axes, (128, 64), (rows[:1], rows[1:]), strict=True):
            assert [patch.get_height() for patch in ax.patches] == [row[unit] for row in shown for unit in UNIT_COLORS]
            assert [label.get_text() for label in ax.get_xticklabels()] == [row["kernel"] for row in shown]
            counted = busy(program_rows("dq", 4, head_dim), 2.0, 1.5, scores[head_dim])
            # dv's instructions aren't recorded
            assert [line.get_ydata()[0] for line in ax.lines] == [counted[unit] for unit in UNIT_COLORS]

    def test_power(self):
        rows = [profiled("dq", 128), profiled("dq", 64, power_capped=False, sustained_watts=600.0, sustained_ghz=1.98)]
        watts, clocks = power_figure(Record(WHERE, rows), limit=700, title="Title").axes
        assert [line.get_ydata()[0] for line in watts.lines if len(line.get_ydata())] == [690.0, 600.0, 700]
        assert [line.get_ydata()[0] for line in clocks.lines] == [1.7, 1.98]
        assert [line.get_markerfacecolor() == "white" for line in clocks.lines] == [True, False]

    def test_activity(self):
        _, (ax,) = panels(1)
        draw_activity(ax, {"a": ["x", "x", "-", "y"], "b": ["-", "x"]}, {"x": "red", "y": "blue"}, title="Title")
        drawn = [(bar.get_x(), bar.get_width(), round(bar.get_y() + 0.4)) for bar in ax.patches if bar.get_width()]
        assert drawn == [(0, 2, 0), (3, 1, 0), (1, 1, 1)]
        assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
        assert ax.get_legend_handles_labels()[1] == ["x", "y"]
