"""The command bench without a GPU: Triton's interpreter runs our kernels, and a made-up machine says how long."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from sage_kernels.common.candidates import DEFAULTS, Launch, candidates
from sage_kernels.sagebwd import ladder as sagebwd_ladder
from sage_kernels.sla2 import ladder as sla2_ladder
from sage_lab.bench import dense, rates, sparse, tuning
from sage_lab.bench.bench_command import Bench
from sage_lab.bench.measure import Case, Provider, Turn, by_autograd, judged, measure
from sage_lab.bench.problem import MaskedProblem, Problem, Shape
from sage_lab.bench.ratios import pays_from
from sage_lab.bench.timing import Captured, Gpu, Timing
from sage_lab.command_line import Failed
from sage_lab.records import read_record

import sage_ref

OURS = "sage_kernels"
SHAPE = Shape(1, 2, 1, 48, 32, True)
DIRECTIONS = ("fwd", "bwd", "fwd+bwd")
pytestmark = pytest.mark.no_gpu  # on a GPU bench itself runs


class Cpu(Gpu):
    """A machine on which everything takes a quarter of a millisecond."""

    device, dtype = "cpu", torch.float16

    def paired(self, calls, repetitions):
        for call in calls.values():
            call()
        return dict.fromkeys(calls, Timing(0.25, 0.25, 0.25, repetitions))

    def alone(self, call):
        return self.paired({"": call}, 1)[""]

    def captured(self, run):
        outputs = run()

        def replay():
            for old, new in zip(outputs, run(), strict=True):
                old.copy_(new)

        return Captured(replay, outputs)

    def host_microseconds(self, call):
        return 250.0

    def peak_megabytes(self, call):
        return 1.0


CPU = Cpu()


class Short(Bench):
    """A bench with one turn of each shape: a backward pass."""

    @property
    def measurement(self):
        found = super().measurement
        return found._replace(turns=lambda *where: list(found.turns(*where))[1:2])


class Small(Bench):
    """A bench with one small shape."""

    @property
    def shapes(self):
        return [SHAPE]


class SmallSparse(Short):
    @property
    def shapes(self):
        return [Shape(1, 1, 1, 160, 32)]


@pytest.fixture
def bench(tmp_path):
    """bench(kind, **options) -> the record of the command. FlexAttention, which it would compile, is left out."""

    def run(kind, **options):
        path = tmp_path / "record.json"
        kind(json=path, without=("flex",), **options).run("python -m sage_lab bench", CPU)
        return read_record(path)

    return run


def test_a_user_gets_complete_rows(bench, capsys):
    record = bench(Small)
    found = [(row["op"], row["provider"], row["direction"], row["cuda_graph"]) for row in record.rows]
    kinds = [*((direction, False) for direction in DIRECTIONS), ("fwd+bwd", True)]
    names = [("sagebwd", OURS), ("sagebwd", f"{OURS}, unbiased"), ("attention", "sdpa_flash")]
    assert found == [(*name, *kind) for kind in kinds for name in names]
    of_all = {
        "heads": 2, "kv_heads": 1, "n_q": 48, "head_dim": 32, "causal": True, "layout": "bhnd",
        "dtype": "float16", "protocol": "paired", "scope": "autograd", "ms_median": 0.25, "repetitions": 16,
        "host_us": 250.0, "peak_mb": 1.0,
    }  # fmt: skip
    for row in record.rows:
        assert list(row) == list(record.rows[0])
        assert of_all.items() <= row.items()
        factor = {"fwd": 1, "bwd": 2.5, "fwd+bwd": 3.5}[row["direction"]]
        assert row["tops"] == round(factor * 4 * 2 * 48**2 * 32 / 2 / 0.25 / 1e9, 1)
    errors = {(row["provider"], row["direction"]): row["rel_l2"] for row in record.rows}
    for direction in DIRECTIONS:
        assert errors["sdpa_flash", direction] < 0.002 < errors[OURS, direction] < 0.1
        assert 0.002 < errors[f"{OURS}, unbiased", direction] < 0.1
    assert errors[f"{OURS}, unbiased", "fwd"] != errors[OURS, "fwd"]
    reasons = {row["provider"]: row["missing"] for row in record.provenance["missing"]}
    assert reasons.keys() == {"sdpa_cudnn", "fa4", "cudnn_fp8", "sageattention"}  # flex was left out
    printed = capsys.readouterr().out
    assert all(f"not timed: {provider}, {reason}" in printed for provider, reason in reasons.items())
    assert "| 48 | 2 | 1 | 32 | True | bhnd | autograd | fwd | False | 1.00 |" in printed


def test_every_level_has_a_turn_per_scope_and_direction():
    """The kernels alone are judged where launches are tuned, below."""
    kernel, op, *_ = turns = list(dense.ladder_turns(SHAPE, CPU))
    ours = [[provider.level for provider in providers if provider.name == OURS] for _, providers in turns]
    found = [(case.scope, case.direction, levels) for (case, _), levels in zip(turns[:4], ours, strict=False)]
    directions = ("fwd", [*range(5)]), ("bwd", [*range(4)])
    assert found == [(scope, *direction) for direction in directions for scope in ("kernel", "op")]
    assert [case.direction for case, _ in turns[4:]] == list(DIRECTIONS)
    assert judged(op.case, op.providers[3])[1] == judged(kernel.case, kernel.providers[3])[1] < 0.1


def test_sparse_peers_have_the_mask_that_we_have(bench):
    record = bench(SmallSparse, op="sla2")
    found = [(row["mask"], row["direction"], row["provider"], row["level"]) for row in record.rows]
    assert found == [("random", "bwd", *name) for name in ((OURS, 3), (OURS, 2), ("sdpa_flash", None))]
    # One of two blocks of 128 keys: 2 of 3 blocks of 64.
    assert {(row["selected_blocks"], row["op"], row["sparsity"]) for row in record.rows} == {
        (2, "sla2", 0.97), (2, "attention", 0.0),
    }  # fmt: skip
    missing = {row["provider"] for row in record.provenance["missing"]}
    assert missing == {"sdpa_cudnn", "fa4", "sla_triton", "vsa"}
    turns = sparse.user_turns(Shape(1, 1, 1, 160, 32), CPU)
    assert [(case.problem.mask, case.direction) for case, _ in turns] == [*product(sparse.MASKS, DIRECTIONS)]


def test_the_sparse_ladder_has_every_level():
    turns = list(sparse.ladder_turns(Shape(1, 1, 1, 160, 32), CPU, (0.5,)))
    ours = [[provider.level for provider in providers if provider.name == OURS] for _, providers in turns]
    assert [(case.scope, case.direction) for case, _ in turns] == [
        ("kernel", "fwd"), ("op", "fwd"), *(("autograd", direction) for direction in DIRECTIONS), ("kernel", "bwd"),
    ]  # fmt: skip
    assert ours == [[*range(4)]] * 2 + [[3, 2]] * 3 + [[0]]
    assert judged(turns[2].case, turns[2].providers[0])[1] < 0.1


def sdpa(case, *, exchanged=False):
    is_causal = case.problem.shape.causal != exchanged
    return by_autograd(case, lambda *x: F.scaled_dot_product_attention(*x, is_causal=is_causal, enable_gqa=True))


def fails(case):
    raise NotImplementedError("no such\nlayout")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_only_who_is_right_is_timed(direction):
    def wrong(case):
        return sdpa(case, exchanged=True)

    providers = [Provider("wrong", wrong), Provider("right", sdpa), Provider("fails", fails)]
    *missing, row = measure([Turn(Case(Problem(SHAPE, CPU), direction), providers)])
    assert row["provider"] == "right"
    assert [x["provider"] for x in missing] == ["wrong", "fails"]
    assert row["rel_l2"] < 0.002
    assert missing[0]["missing"].startswith(f"RuntimeError: {'O' if direction == 'fwd' else 'd'}")
    assert "expected a relative L2 error below 0.1, got " in missing[0]["missing"]
    assert missing[1]["missing"] == "NotImplementedError: no such layout"


def test_ours_must_be_right_or_the_command_fails_after_the_others_were_timed(monkeypatch, capsys):
    def exchanged(query, key, value, is_causal, **options):
        return F.scaled_dot_product_attention(query, key, value, is_causal=not is_causal, enable_gqa=True)

    monkeypatch.setattr(sage_ref, "sagebwd_attention", exchanged)
    with pytest.raises(Failed, match="our function could not be timed in 8 cases, the first is {'missing': 'Runtime"):
        Small(without=("flex",)).run("bench", CPU)
    assert "| sdpa_flash | None | autograd | fwd+bwd | True | 0.25 |" in capsys.readouterr().out


def test_a_graph_that_writes_something_else_is_refused():
    """The replay of this capture does nothing: outputs stay 0."""

    class Lazy(Cpu):
        def captured(self, run):
            return Captured(lambda: None, run())

    with pytest.raises(RuntimeError, match="relative L2"):
        judged(Case(Problem(SHAPE, Lazy()), "fwd+bwd", cuda_graph=True), Provider("right", sdpa))


def test_queries_that_nobody_judges_have_no_gradient():
    problem = MaskedProblem(Shape(1, 1, 1, 3000, 64), 0.5, "random", CPU)
    assert problem.judged_queries == 2048
    assert problem.judged_grad_output[:, :, 2048:].abs().sum() == 0
    assert torch.equal(problem.judged_grad_output[:, :, :2048], problem.grad_output[:, :, :2048])


def test_of_a_skewed_mask_every_query_selects_the_first_block():
    random, skewed = (
        MaskedProblem(Shape(1, 2, 2, 8192, 64), 0.97, mask, CPU).peer_mask for mask in ("random", "skewed")
    )
    assert random.sum(-1).unique().tolist() == skewed.sum(-1).unique().tolist() == [2]
    assert skewed[..., 0].all()
    assert random[..., 0].float().mean() < 0.2


def test_int8_pays_from_where_no_longer_length_costs_more_than_a_twentieth():
    where = dict.fromkeys(("heads", "kv_heads"), 16) | {"protocol": "paired", "layout": "bhnd", "scope": "autograd"}
    where |= {"direction": "fwd+bwd", "cuda_graph": False, "mask": None, "head_dim": 128}
    rows = []
    for causal, slow in ((False, (512, 2048)), (True, ())):
        for n in (512, 1024, 2048, 4096):
            ours = 1.1 if n in slow else 1.04
            for provider, ms in ((OURS, ours), ("sdpa_flash", 2.0), ("sdpa_cudnn", 1.0), ("fa4", 0.1)):
                rows.append(where | {"n_q": n, "causal": causal, "provider": provider, "ms_median": ms})
    ignored = [row | {"head_dim": 64, "direction": "fwd"} for row in rows]
    assert pays_from(rows + ignored) == {"D=128": 4096, "D=128 causal": 0}


def test_lengths_and_head_sizes_can_be_chosen():
    assert Bench(n=(3000,), head_dim=(64,)).shapes == [*dense.user_shapes((3000,), (64,))]
    assert {(shape.batch, shape.heads, shape.n) for shape in dense.user_shapes((3000,), (64,))} == {(10, 32, 3000)}
    assert {shape.kv_heads for shape in dense.user_shapes()} == {8, 16, 32}
    assert [(x.heads, x.n) for x in Bench(op="sla2", levels=True, n=(8192, 75600)).shapes] == [(12, 8192), (40, 75600)]


@pytest.mark.parametrize(("commit", "again"), [("one", 3), ("two", 4)])
def test_a_run_goes_on_where_it_was_stopped_unless_the_commit_is_a_different_one(commit, again, monkeypatch, tmp_path):
    """Four turns of one shape, the second of which is interrupted the first time."""
    measured = []

    class Interrupted(Cpu):
        def paired(self, calls, repetitions):
            return dict.fromkeys(calls, Timing(0.25, 0.25, 0.25, repetitions))

        def peak_megabytes(self, call):
            measured.append(1)
            if len(measured) == 4:
                raise KeyboardInterrupt
            return 1.0

    def directions():
        Small(json=tmp_path / "record.json", without=("flex",)).run("bench", Interrupted())
        return recorded()

    def recorded():
        return [row["direction"] for row in read_record(tmp_path / "record.json").rows]

    monkeypatch.setenv("SAGE_REF_COMMIT", "one")
    with pytest.raises(KeyboardInterrupt):
        directions()
    of_one = 3  # ours, ours unbiased, sdpa_flash
    assert recorded() == ["fwd"] * of_one
    monkeypatch.setenv("SAGE_REF_COMMIT", commit)
    assert directions() == ["fwd"] * of_one + ["bwd"] * of_one + ["fwd+bwd"] * 2 * of_one
    assert len(measured) == 4 + again * of_one
    assert (len(list(tmp_path.iterdir())) == 1) == (commit == "one")  # of a different commit the finished turns stay


# Rates of memory


def test_a_rate_counts_what_all_programs_read_and_a_sum_that_lacks_a_tile_is_refused(monkeypatch):
    (row,) = rates.rate_rows(CPU, sizes=[2**16], count=3, total=3 * 5 * 2**14)
    assert row["terabytes_per_second"] == round(3 * 5 * 2**14 / 0.25e9, 3)
    monkeypatch.setattr(rates, "read", lambda buffer, sums, rounds, of=rates.read: of(buffer, sums, rounds - 1))
    with pytest.raises(RuntimeError, match="^read_kernel: expected the last program's sums of 5 tiles"):
        list(rates.rate_rows(CPU, sizes=[2**16], count=3, total=3 * 5 * 2**14))


# Launch tables


@pytest.mark.parametrize("op", ["sagebwd", "sla2"])
def test_every_kernel_that_is_tuned_belongs_to_a_level_that_is_right(op):
    problems = {
        "sagebwd": Problem(Shape(1, 1, 1, 128, 32, True), CPU),
        "sla2": MaskedProblem(Shape(1, 1, 1, 160, 32), 0.5, gpu=CPU),
    }
    seen, passes = set(), set()
    for kernel in tuning.kernels(op):
        if kernel.head_dim == 64 and kernel.causal == (op == "sagebwd"):
            seen.add(kernel.kernel)
            case, provider = tuning.level_of(kernel, problems[op])
            if (case.direction, kernel.level) not in passes:
                passes.add((case.direction, kernel.level))
                assert judged(case, provider)[1] < 0.1
    assert len(seen) == {"sagebwd": 7, "sla2": 7}[op]
    assert max(kernel.level for kernel in tuning.kernels(op)) == {"sagebwd": 4, "sla2": 3}[op]  # none of Hopper's


def test_one_kernel_has_the_launch_and_the_others_have_their_own():
    tried, place = Launch(16, 32, 4, 1), (64, False, torch.device("cpu"))
    for kernel, ladder in (("dq", sagebwd_ladder), ("sla2_mix", sla2_ladder)):
        with tuning.launched_as(tuning.Kernel(kernel, 1, 64, False), tried):
            assert ladder.choose_launch(kernel, 1, *place) == tried
            assert ladder.choose_launch(kernel, 2, *place) == DEFAULTS[kernel]
        assert ladder.choose_launch(kernel, 1, *place) == DEFAULTS[kernel]


def test_the_fastest_launch_that_is_right_is_kept(monkeypatch):
    """Of the candidates the first fails, the second is wrong, and of the others the last is fastest."""
    kernel = next(kernel for kernel in tuning.kernels() if len(candidates(kernel.kernel, kernel.level)) > 2)
    launches = candidates(kernel.kernel, kernel.level)
    wrong = [launches[1]]

    def level(case, level):
        launch = sagebwd_ladder.choose_launch(kernel.kernel, kernel.level, 64, True, torch.device("cpu"))
        if launch == launches[0]:
            raise RuntimeError("too much shared memory")
        case.problem.gpu.ms = 100 - launches.index(launch)
        return sdpa(case, exchanged=launch in wrong)

    class Uneven(Cpu):
        def alone(self, call):
            return Timing(self.ms, self.ms, self.ms, 1)

    monkeypatch.setitem(dense.LADDERS, "fwd", (None, level))
    problem = Problem(SHAPE, Uneven())
    row = tuning.fastest(kernel, problem)
    assert row == kernel._asdict() | launches[-1]._asdict() | {"ms_median": 101 - len(launches)}
    wrong.extend(launches)
    with pytest.raises(RuntimeError, match="no candidate of Case"):
        tuning.fastest(kernel, problem)
