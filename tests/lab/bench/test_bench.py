"""The command bench on the CPU: Triton's interpreter runs our kernels, a made-up clock times, peers are made up too."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fake_gpu import fake_gpu

pytest.importorskip("triton")
from sage_course.results.paired import ratio_lines, turns
from sage_lab.__main__ import main
from sage_lab.bench import bench, bench_command, contenders, ladder_bench, sla2_bench, sla2_case, sparse_bench
from sage_lab.bench import paired as paired_module
from sage_lab.bench.bench import Case, Shape
from sage_lab.bench.contenders import Absent
from sage_lab.bench.judge import exact_head, require_close
from sage_lab.bench.paired import host_microseconds, paired, timing
from sage_lab.bench.peers import PEERS, Peer
from sage_lab.records import read_record

# What a row of times has.
COLUMNS = [
    *("op", "level", "provider", "dtype", "batch", "heads", "kv_heads", "n_q", "n_k", "head_dim", "causal", "layout"),
    *("sparsity", "scope", "direction", "protocol", "cuda_graph", "ms_median", "ms_p20", "ms_p80", "repetitions"),
    *("tops", "rel_l2", "host_us"),
]
SHAPE = Shape(1, 2, 1, 48, 32, True)
ON_CPU = {"dtype": torch.float16, "device": "cpu"}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="made for the interpreter; bench runs there")


def right(query, key, value, is_causal):
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)


def wrong(query, key, value, is_causal, **options):
    return right(query, key, value, not is_causal)


def fails_backward(query, key, value, is_causal):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise NotImplementedError("no backward\npass here")

    return Fails.apply(right(query, key, value, is_causal))


@pytest.fixture
def clock(monkeypatch):
    """PEERS: one that is right, one wrong, one whose package is missing, one that fails. Few repetitions."""
    clock = fake_gpu(monkeypatch)
    clock.tick = 0.5
    monkeypatch.setattr(paired_module, "WARM_UPS", 0)
    monkeypatch.setattr(contenders, "paired", lambda runs, repetitions: paired(runs, repetitions=1))
    monkeypatch.setattr(contenders, "host_microseconds", lambda run: host_microseconds(run, repetitions=1))
    monkeypatch.setattr(sla2_bench, "measure", lambda run: timing([0.5]))
    peers = {"right": Peer(right), "wrong": Peer(wrong), "fails": Peer(fails_backward)}
    peers["absent"] = Peer(right, "its-package", "no_module_of_this_name")
    for module in (bench, contenders, sla2_case):
        monkeypatch.setattr(module, "PEERS", peers)
    for module in (bench, ladder_bench):
        monkeypatch.setattr(module, "Case", partial(Case, **ON_CPU))
    return clock


def test_rows_are_complete_and_only_who_is_right_is_timed(clock, capsys):
    absent = Absent()
    rows = list(bench.bench_shape(SHAPE, absent))
    assert all(list(row) == COLUMNS for row in rows)
    found = [(row["op"], row["provider"], row["direction"], row["cuda_graph"]) for row in rows]
    kinds = [("fwd", False), ("bwd", False), ("fwd+bwd", False), ("fwd+bwd", True)]
    names = [("sagebwd", "sage_kernels"), ("sagebwd", "sage_kernels, unbiased"), ("attention", "right")]
    assert found == [(*name, *kind) for kind in kinds for name in names]
    for row in rows:
        assert (row["heads"], row["kv_heads"], row["n_q"], row["head_dim"], row["causal"]) == (2, 1, 48, 32, True)
        assert (row["protocol"], row["scope"], row["layout"]) == ("paired", "autograd", "bhnd")
        assert row["ms_median"] == 0.5
    errors = {row["provider"]: row["rel_l2"] for row in rows}
    assert errors["right"] < 0.002 < errors["sage_kernels"] < 0.1
    assert 0.002 < errors["sage_kernels, unbiased"] < 0.1
    assert errors["sage_kernels, unbiased"] != errors["sage_kernels"]
    reasons = {row["provider"]: row["missing"] for row in absent.rows}
    assert reasons["absent"].startswith("its-package: ModuleNotFoundError: No module named 'no_module_of_this_name'")
    assert reasons["wrong"].startswith("RuntimeError: O: expected a relative L2 error below 0.1, got ")
    assert reasons["fails"] == "NotImplementedError: no backward pass here"
    printed = capsys.readouterr().out
    assert all(f"not timed: {provider}, {reason}" in printed for provider, reason in reasons.items())


def test_ours_must_be_right_or_the_command_fails_after_the_others_were_timed(clock, monkeypatch, capsys):
    monkeypatch.setattr(bench, "_sagebwd", wrong)
    monkeypatch.setattr(bench, "SHAPES", (SHAPE,))
    monkeypatch.setattr(bench_command, "require_gpu", lambda: None)
    with pytest.raises(SystemExit) as stop:
        main(["bench"])
    assert stop.value.code == 1
    printed = capsys.readouterr()
    assert "bench: ours was not timed 2 times, at first in {'missing': 'RuntimeError: " in printed.err
    assert "| right | None | autograd | fwd+bwd | True | 0.5 |" in printed.out


def test_a_graph_that_writes_something_else_is_refused(clock, monkeypatch):
    """Of a capture whose replay does nothing: outputs that stay 0."""
    captured = contenders.captured
    monkeypatch.setattr(contenders, "captured", lambda run: captured(run)._replace(replay=lambda: None))
    with pytest.raises(RuntimeError, match="relative L2"):
        Case(SHAPE, **ON_CPU).ours().graph_entry()


def test_layouts_are_views_of_one_shape():
    for layout, strides in (("bhnd", (3072, 1536, 32, 1)), ("bnhd", (3072, 32, 64, 1))):
        query, key, *_ = Case(SHAPE._replace(layout=layout), **ON_CPU).tensors
        assert query.shape == (1, 2, 48, 32)
        assert query.stride() == strides
        assert key.shape == (1, 1, 48, 32)


@pytest.mark.parametrize("layout", bench.LAYOUTS)
def test_a_peer_gets_the_cases_own_memory(clock, layout):
    case = Case(SHAPE._replace(layout=layout), **ON_CPU)
    seen = []

    def attention(query, key, value, is_causal):
        seen.append(tuple((x.data_ptr(), x.stride()) for x in (query, key, value)))
        return right(query, key, value, is_causal)

    entry = case._contender("right", attention).entry("fwd")
    entry.run()
    assert set(seen) == {tuple((x.data_ptr(), x.stride()) for x in case.tensors[:3])}


def test_the_judge_of_grouped_queries_sums_over_the_group(inputs):
    query, key, value, grad_output = inputs(40, 40, 16, heads=4, kv_heads=2)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output = right(*leaves, True)
    gradients = torch.autograd.grad(output, leaves, grad_output)
    exact = exact_head(query, key, value, grad_output, is_causal=True, scale=0.25)
    for found, expected in zip((output, *gradients), exact, strict=True):
        assert require_close(found, expected) < 1e-12


def test_all_shapes_have_as_many_queries():
    assert {shape.batch * shape.n * shape.heads * shape.head_dim for shape in bench.SHAPES} == {32768 * 2048}
    assert len(set(bench.SHAPES)) == len(bench.SHAPES) == 44


def measurement(measured):
    """A measurement of three shapes; the second is interrupted the first time."""

    def bench_shape(shape, absent):
        measured.append(shape)
        if measured == [("a", 1), ("b", 2)]:
            raise KeyboardInterrupt
        absent.note("fa4", "not here", {"name": shape[0]})
        times = {"direction": "fwd", "cuda_graph": False, "host_us": 1.0, "tops": 1.0, "rel_l2": 0.0}
        yield {"provider": "sage_kernels", "level": None, "scope": shape[0], "ms_median": shape[1] * 1.0, **times}

    return SimpleNamespace(__name__="made up", SHAPES=(("a", 1), ("b", 2), ("c", 3)), bench_shape=bench_shape)


def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SAGE_REF_COMMIT", "one")
    measured, record = [], tmp_path / "paired.json"
    made_up = measurement(measured)
    timed = partial(bench_command.timed, made_up, record=record, command="c")
    with pytest.raises(KeyboardInterrupt):
        timed(made_up.SHAPES)
    assert [row["scope"] for row in read_record(record).rows] == ["a"]
    measured.clear()
    (row, missing) = timed([("c", 3)])  # another part, then all
    assert (row["scope"], missing["missing"]) == ("c", "not here")
    assert [row["scope"] for row in timed(made_up.SHAPES)[::2]] == ["a", "b", "c"]
    assert measured == [("c", 3), ("b", 2)]
    assert "('a', 1): measured before" in capsys.readouterr().out
    found = read_record(record)
    assert [row["scope"] for row in found.rows] == ["a", "b", "c"]
    assert [row["name"] for row in found.provenance["missing"]] == ["a", "b", "c"]
    assert [path.name for path in tmp_path.iterdir()] == ["paired.json"]


def test_times_of_another_commit_are_not_gone_on_with(tmp_path, monkeypatch):
    measured = []
    made_up = measurement(measured)
    for commit in ("one", "two"):
        monkeypatch.setenv("SAGE_REF_COMMIT", commit)
        bench_command.timed(made_up, [("c", 3)], tmp_path / "paired.json", "c")
    assert measured == [("c", 3)] * 2


def test_only_shapes_that_were_asked_for():
    shapes = bench_command.chosen(bench.SHAPES, n=[1024], head_dim=[64])
    assert {(shape.n, shape.head_dim) for shape in shapes} == {(1024, 64)}
    assert len(shapes) == 4
    with pytest.raises(ValueError, match=r"head_dim: expected some of \[64, 128\], got \[96\]"):
        bench_command.chosen(bench.SHAPES, n=None, head_dim=[96, 64])


def test_a_peer_can_be_left_out(clock):
    absent = Absent(["right"])
    assert absent.present(["right", "wrong"], {}) == ["wrong"]
    assert absent.rows == [{"missing": "left out with --without", "provider": "right"}]


def test_levels_are_timed_in_turn_with_the_peers(clock):
    rows = list(ladder_bench.bench_shape(Shape(1, 1, 1, 32, 32, False)))
    assert all(list(row) == COLUMNS for row in rows)
    for direction, levels in (("fwd", [0, 1, 2, 3, 4]), ("bwd", [0, 1, 2, 3])):
        for scope in ("kernel", "op"):
            of = [row for row in rows if (row["scope"], row["direction"]) == (scope, direction)]
            assert [row["level"] for row in of] == [*levels, None]
            assert of[-1]["provider"] == "right"
    assert len(list(turns(rows))) == 4 + 3
    assert len(ratio_lines(rows)[1]) == 4 + 3


@pytest.fixture
def sparse(clock, monkeypatch):
    """The sparse measurements with peers that are right: dense attention, and softmax over the selected blocks."""

    def masked(block_mask, block_kv, n):
        seen = block_mask.repeat_interleave(128, -2).repeat_interleave(block_kv, -1)[..., :n, :n]
        return lambda query, key, value: F.scaled_dot_product_attention(query, key, value, attn_mask=seen)

    monkeypatch.setitem(contenders.PEERS, "dense", Peer(right))
    monkeypatch.setitem(contenders.PEERS, "masked", Peer(right))
    monkeypatch.setattr(sla2_case, "SPARSE_PEERS", {"masked": masked})
    for module in (sla2_bench, sparse_bench):
        monkeypatch.setattr(module, "SPARSE_PEERS", {"masked": masked})
        monkeypatch.setattr(module, "DENSE_PEERS", ("dense",))
        monkeypatch.setattr(module, "Case", partial(sla2_case.Case, **ON_CPU))
    monkeypatch.setattr(sla2_case, "DENSE_PEERS", ("dense",))
    return clock


def test_sparse_peers_have_the_mask_that_we_have(sparse, monkeypatch):
    monkeypatch.setattr(sparse_bench, "MASKS", ("skewed",))
    rows = list(sparse_bench.bench_shape(sla2_case.Shape(1, 1, 160, 32)))
    found = [(row["mask"], row["direction"], row["provider"], row["level"]) for row in rows]
    names = [("sage_kernels", 3), ("sage_kernels", 2), ("dense", None), ("masked", None)]
    directions = ("fwd", "bwd", "fwd+bwd")
    assert found == [("skewed", to, *name) for to in directions for name in names]
    assert all(row["protocol"] == "paired" and row["host_us"] is not None for row in rows)
    # One of two blocks of 128 keys: half of the operations.
    assert {(row["selected_blocks"], row["op"]) for row in rows} == {(2, "sla2"), (2, "attention")}


def test_of_a_skewed_mask_every_query_selects_the_first_block():
    shape = sla2_case.Shape(1, 2, 8192, 64)
    random, skewed = (sparse_bench.draw_mask(shape, kind, "cpu") for kind in sparse_bench.MASKS)
    assert random.sum(-1).unique().tolist() == skewed.sum(-1).unique().tolist() == [2]
    assert skewed[..., 0].all()
    assert random[..., 0].float().mean() < 0.2


def test_the_sparse_ladder_says_what_was_timed_alone(sparse, monkeypatch):
    monkeypatch.setattr(sla2_bench, "SPARSITIES", (0.5,))
    monkeypatch.setattr(sla2_bench, "peak_memory", lambda step: 1.0)
    rows = list(sla2_bench.bench_shape(sla2_case.Shape(1, 1, 96, 32)))
    assert {row["protocol"] for row in rows if row["scope"] == "part"} == {"alone"}
    assert {row["protocol"] for row in rows if row["scope"] != "part"} == {"paired"}
    kernels = [(row["provider"], row["level"]) for row in rows if (row["scope"], row["direction"]) == ("kernel", "fwd")]
    assert kernels == [*(("sage_kernels", level) for level in range(4)), ("masked", None)]
    (backward,) = (row for row in rows if (row["scope"], row["direction"]) == ("kernel", "bwd"))
    assert (backward["provider"], backward["level"]) == ("sage_kernels", 0)
    assert {row["peak_mb"] for row in rows if row["direction"] == "fwd+bwd"} == {1.0}
    json.dumps(rows)


def test_every_peer_of_the_real_list_can_be_asked_for():
    """Without its package it says which one; PyTorch's own need none."""
    for provider, peer in PEERS.items():
        reason = peer.why_missing()
        assert reason is None or reason.startswith(f"{peer.package}: "), provider
    assert PEERS["sdpa_cudnn"].why_missing() is None
