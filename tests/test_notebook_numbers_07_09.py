"""The numbers that notebooks 07, 08 and 09 claim, on the same inputs or the same records."""

import json
import math
import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from torch.testing import assert_close

from sage_ref.attention import attention_backward, attention_forward
from sage_ref.plotting import KIND_COLORS, PEAK, TERA_SLOTS, draw_instructions, ladder_figure, panels, roofline_figure
from sage_ref.quantization import fake_quantize, integer_matmul, quantize, quantized_matmul
from sage_ref.recorded import Record, read_record
from sage_ref.tracing import relative_l2

SIZES = (1024, 2048, 4096, 8192, 16384)


@pytest.fixture(scope="module")
def bench():
    return read_record("bench_h200")


@pytest.fixture(scope="module")
def instructions():
    return read_record("instructions_sm90")


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
    def test_forward_ladder(self, bench, d):
        times = [milliseconds(bench, level, d) for level in range(5)]
        assert min(times) == times[4]
        assert 1 < times[0] / times[1] < 4 / 3
        assert times[2] > times[1]
        assert times[2] > 1.1 * times[3] > times[4]
        flash = milliseconds(bench, None, d, provider="sdpa_flash", scope="autograd")
        assert flash / times[4] >= {128: 1.7, 64: 1.4}[d]
        assert flash > times[0]

    def test_level_2_is_slower_than_no_int8_at_head_size_64(self, bench):
        assert milliseconds(bench, 2, 64) > milliseconds(bench, 0, 64)

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
            / milliseconds(bench, "4/3", d, n_q=n, **where)
            for n in SIZES
        }
        assert speed_up[1024] < 1 < speed_up[8192]

    def test_quantising_is_a_large_share_of_short_sequences_only(self, bench):
        share = {
            n: 1 - milliseconds(bench, 4, 128, n_q=n) / milliseconds(bench, 4, 128, n_q=n, scope="op") for n in SIZES
        }
        assert share[1024] > 2 * share[8192]


class TestInstructions:
    @pytest.mark.parametrize("d", [64, 128])
    def test_conversions_of_level_2_are_those_in_its_source(self, instructions, d):
        assert per_score(instructions, "forward", 2, d, "conversion") == 1 + 1 + d / 128
        assert per_score(instructions, "forward", 3, d, "conversion") == 0
        assert per_score(instructions, "forward", 4, d) < per_score(instructions, "forward", 3, d)

    @pytest.mark.parametrize("d", [64, 128])
    def test_tensor_cores_and_issue_slots_in_turn_explain_the_times(self, bench, instructions, d):
        for level in range(5):
            rates = (4096 if level < 1 else 8192, 4096 if level < 2 else 8192)
            clocks = sum(2 * d / rate for rate in rates) + per_score(instructions, "forward", level, d) / 128
            model = 4 * d / clocks * PEAK["bf16"] / 4096
            tops = 4 * 4 * 2048 * 8192**2 / milliseconds(bench, level, d) / 1e9
            assert 0.5 < tops / model < 1

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
from sage_kernels.compile import Case
from sage_kernels.instructions import case_rows
print(json.dumps(list(case_rows(Case("forward", 4, 90, 64, False)))))
"""


class TestInstructionCounter:
    @pytest.fixture(autouse=True)
    def counter(self):
        pytest.importorskip("triton")
        from sage_kernels import instructions

        self.counter = instructions

    def test_takes_the_loop_with_the_exponentials_of_one_tile(self):
        kinds = ["arithmetic", "conversion", "exp2", "matmul", "rest"]
        assert [self.counter.kind_of(line) for line in self.counter.hot_loop(CODE, scores=1)] == kinds
        assert [self.counter.kind_of(line) for line in self.counter.hot_loop(CODE, scores=2)][0] == "matmul"

    @pytest.mark.parametrize("scores", [3, 100])
    def test_refuses_code_without_such_a_loop(self, scores):
        with pytest.raises(ValueError, match=f"code: expected a loop with {scores} exponentials"):
            self.counter.hot_loop(CODE, scores)

    def test_the_record_is_what_it_counts(self, instructions):
        if instructions.provenance["triton"] != metadata.version("triton"):
            pytest.skip("recorded with another compiler")
        # A process of its own: the compiler can't run where the interpreter does.
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-c", COUNT]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == instructions.select(kernel="forward", level=4, head_dim=64)

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


class TestFlashAttention:
    def test_memory_traffic(self):
        once, scores = 4 * 8192 * 128 * 2, 4 * 8192**2 * 2
        assert once / 1e6 == pytest.approx(8.4, abs=0.1)
        assert (once + scores) / 1e6 == pytest.approx(545, abs=1)

    @pytest.mark.parametrize(("hidden", "temperature"), [(False, 1), (True, math.log(2))])
    def test_forgotten_mask_and_forgotten_log2_e_are_large_errors(self, hidden, temperature):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(100, 32, generator=generator).half().double() for _ in range(3))
        s = q @ k.mT / math.sqrt(32) * temperature
        s = torch.cat([s, torch.full((100, 28), -math.inf if hidden else 0.0, dtype=s.dtype)], -1)
        o = torch.softmax(s, -1)[:, :100] @ v
        assert relative_l2(o, attention_forward(q, k, v).output) > 0.05


ROUNDER = 12582912.0


def as_float(accumulator):
    return (0x4B400000 + accumulator).to(torch.int32).view(torch.float32) - ROUNDER


class TestRounder:
    def test_reads_integers_up_to_two_to_the_22(self):
        sizes = torch.arange(2**22 - 50, 2**22 + 1)
        for sign in (1, -1):
            assert torch.equal(as_float(sign * sizes).long(), sign * sizes)
        assert as_float(torch.tensor(2**22 + 1)) != 2**22 + 1
        assert 127 * 127 * 256 < 2**22

    def test_rounds_to_even_and_wraps(self):
        x = torch.linspace(-127, 127, 100_001)
        assert torch.equal((x + ROUNDER).view(torch.int32).to(torch.int8), torch.round(x).to(torch.int8))
        assert (torch.tensor(127.6) + ROUNDER).view(torch.int32).to(torch.int8) == -128

    def test_moving_the_maximum_takes_the_rounding_back(self):
        def fma(a, b, c):
            return (a.double() * b + c.double()).float()

        generator = torch.Generator().manual_seed(0)
        s_hat, log2_127 = torch.round(11_000 * torch.randn(64, 128, generator=generator)), math.log2(127)
        errors = {}
        for moved in (False, True):
            s = torch.tensor(0.005)
            m = s_hat.amax(-1) * s
            t = fma(s, ROUNDER, m - log2_127)
            m = fma(-s, ROUNDER, t) + log2_127 if moved else m
            p = torch.exp2(fma(ROUNDER + s_hat, s.double(), -t[:, None]))
            exact = torch.logsumexp(s_hat.double() * s.double() * math.log(2), -1) / math.log(2)
            errors[moved] = (torch.log2(p.double().sum(-1) / 127) + m.double() - exact).abs().max()
        assert errors[True] < 1e-4
        assert errors[False] > 1e-3


class TestGroups:
    column = torch.arange(16)
    order = column.reshape(2, 4, 2).permute(1, 0, 2).flatten()

    def test_twelve_of_sixteen_would_move_and_none_after_reordering(self):
        holder, wanted = self.column % 8 // 2, self.column // 4
        assert (holder != wanted).sum() == 12
        assert torch.equal(holder[self.order], wanted)

    def test_it_is_the_order_of_the_kernels(self):
        pytest.importorskip("triton")
        from sage_kernels.ladder import prepare_forward

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
        here = Record({"gpu": "another GPU"}, bench.rows)
        figure = ladder_figure(bench, direction, title="Title", here=here)
        for ax, head_dim in zip(figure.axes, (128, 64), strict=True):
            levels = {"fwd": 5, "bwd": 4}[direction]
            heights = [patch.get_height() for patch in ax.patches]
            size = {"scope": "kernel", "n_q": 8192, "causal": False, "direction": direction}
            expected = {row["level"]: row["tops"] for row in bench.select(head_dim=head_dim, **size)}
            assert heights == [expected[level] for level in range(levels)]
            assert any("another GPU" in line.get_label() for line in ax.lines)

    def test_roofline(self, bench, instructions):
        (ax,) = roofline_figure(bench, instructions, title="Title").axes
        roof, no_overlap = (line.get_ydata() for line in ax.lines[:2])
        assert max(roof) == pytest.approx(PEAK["INT8"])
        assert all(low < high for low, high in zip(no_overlap, roof, strict=True))
        assert ax.lines[0].get_xdata().max() * TERA_SLOTS > PEAK["INT8"]
        assert len(ax.lines) == 4 + 10

    def test_instructions(self, instructions):
        _, (ax,) = panels(1)
        rows = instructions.select(kernel="forward", level=2, head_dim=64)
        draw_instructions(ax, {"a": rows, "b": []}, title="Title")
        tops = [patch.get_y() + patch.get_height() for patch in ax.patches]
        assert_close(max(tops), sum(row["per_score"] for row in rows))
