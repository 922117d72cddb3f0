"""The command bench on the CPU: Triton's interpreter runs our kernels, a made-up clock times, peers are made up too."""

import warnings

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
import triton
from sage_kernels.common import launch_tables
from sage_kernels.common.candidates import DEFAULTS, candidates
from sage_kernels.common.launch import choose_launch
from sage_lab.__main__ import main
from sage_lab.bench import bench_command, contenders, sparse, timing, tuning
from sage_lab.bench.case import COLUMNS, Case, Measurement, Shape
from sage_lab.bench.judge import require_close
from sage_lab.bench.peers import PEERS, Peer
from sage_lab.bench.ratios import turns
from sage_lab.bench.sparse import SparseCase
from sage_lab.records import read_record

import sage_ref

OURS = "sage_kernels"
SHAPE = Shape(1, 2, 1, 48, 32, True)
OF_SPARSE_CASES = {"selected_blocks", "mask", "part", "peak_mb"}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="made for the interpreter; bench runs there")


def right(query, key, value, is_causal, **options):
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)


def wrong(query, key, value, is_causal, **options):
    return right(query, key, value, not is_causal)


def fails(query, key, value, is_causal):
    raise NotImplementedError("no such\nlayout")


def masked(block_mask, block_kv, n):
    """A right sparse peer."""
    seen = block_mask.repeat_interleave(128, -2).repeat_interleave(block_kv, -1)[..., :n, :n]
    return lambda query, key, value: F.scaled_dot_product_attention(query, key, value, attn_mask=seen)


@pytest.fixture
def bench(clock, monkeypatch, tmp_path):
    """bench(*arguments) -> the record of the command, whose shapes and repetitions are few.

    Of the peers one is right, one wrong, one's package is missing, one fails; FlexAttention reads masks.
    """
    clock.tick = 0.25
    monkeypatch.setattr(timing, "WARM_UPS", 0)
    monkeypatch.setattr(timing, "ALONE_MS", 0)
    monkeypatch.setattr(timing, "ALONE_REPETITIONS", 1)
    monkeypatch.setattr("sage_lab.bench.case.host_microseconds", lambda call: 250.0)
    monkeypatch.setattr(Case, "repetitions", 1)
    monkeypatch.setattr(Case.__init__, "__defaults__", (torch.float16, "cpu"))
    monkeypatch.setattr(bench_command, "require_gpu", lambda: None)
    monkeypatch.setattr(sparse, "SPARSITIES", (0.5,))
    monkeypatch.setattr(sparse, "MASKS", ("skewed",))
    monkeypatch.setattr(sparse, "peak_memory", lambda step: 1.0)
    monkeypatch.setattr(sparse, "alone", lambda step: timing.paired({"": step}, 1)[""])
    peers = {"sdpa_flash": Peer(right), "sdpa_cudnn": Peer(wrong), "fa4": Peer(fails)}
    peers["cudnn_fp8"] = Peer(right, "its-package", "no_module_of_this_name")
    for name, peer in (peers | {"flex": Peer(right, sparse=masked)}).items():
        monkeypatch.setitem(PEERS, name, peer)
    monkeypatch.setattr(sparse, "SPARSE_PEERS", ("flex",))
    monkeypatch.setattr(sparse, "DENSE_PEERS", ("sdpa_flash",))
    small = {"sagebwd": SHAPE, "sla2": Shape(1, 1, 1, 160, 32)}
    for (op, levels), measurement in bench_command.MEASUREMENTS.items():
        shapes = (small[op]._replace(heads=1, causal=False) if levels else small[op],)
        monkeypatch.setitem(bench_command.MEASUREMENTS, (op, levels), measurement._replace(shapes=shapes))

    def run(*arguments):
        main(["bench", "--json", str(tmp_path / "record.json"), *arguments])
        return read_record(tmp_path / "record.json")

    return run


def test_a_user_gets_complete_rows_and_only_who_is_right_is_timed(bench, capsys):
    record = bench()
    assert all(list(row) == [name for name in COLUMNS if name not in OF_SPARSE_CASES] for row in record.rows)
    found = [(row["op"], row["provider"], row["direction"], row["cuda_graph"]) for row in record.rows]
    kinds = [("fwd", False), ("bwd", False), ("fwd+bwd", False), ("fwd+bwd", True)]
    names = [("sagebwd", OURS), ("sagebwd", f"{OURS}, unbiased"), ("attention", "sdpa_flash"), ("attention", "flex")]
    assert found == [(*name, *kind) for kind in kinds for name in names]
    for row in record.rows:
        assert (row["heads"], row["kv_heads"], row["n_q"], row["head_dim"], row["causal"]) == (2, 1, 48, 32, True)
        assert (row["protocol"], row["scope"], row["layout"], row["dtype"]) == ("paired", "autograd", "bhnd", "float16")
        assert (row["ms_median"], row["repetitions"]) == (0.25, 1)
        factor = {"fwd": 1, "bwd": 2.5, "fwd+bwd": 3.5}[row["direction"]]
        assert row["tops"] == round(factor * 4 * 2 * 48**2 * 32 / 2 / 0.25 / 1e9, 1)
    errors = {row["provider"]: row["rel_l2"] for row in record.rows}
    assert errors["sdpa_flash"] < 0.002 < errors[OURS] < 0.1
    assert 0.002 < errors[f"{OURS}, unbiased"] < 0.1
    assert errors[f"{OURS}, unbiased"] != errors[OURS]
    reasons = {row["provider"]: row["missing"] for row in record.provenance["missing"]}
    assert reasons["cudnn_fp8"].startswith("ImportError: its-package: ModuleNotFoundError: No module named")
    assert reasons["sdpa_cudnn"].startswith("RuntimeError: O: expected a relative L2 error below 0.1, got ")
    assert reasons["fa4"] == "NotImplementedError: no such layout"
    printed = capsys.readouterr().out
    assert all(f"not timed: {provider}, {reason}" in printed for provider, reason in reasons.items())
    assert "| 48 | 2 | 1 | 32 | True | bhnd | autograd | fwd | False | 1.00 |  |  |  | 1.00 |" in printed


def test_levels_are_timed_in_turn_with_the_peers(bench):
    rows = bench("--levels").rows
    for direction, levels in (("fwd", [0, 1, 2, 3, 4]), ("bwd", [0, 1, 2, 3])):
        for scope in ("kernel", "op"):
            of = [row for row in rows if (row["scope"], row["direction"]) == (scope, direction)]
            assert [row["level"] for row in of] == [*levels, None, None]
            assert [row["provider"] for row in of[-2:]] == ["sdpa_flash", "flex"]
    assert len(list(turns(rows))) == 4 + 3


def test_sparse_peers_have_the_mask_that_we_have(bench):
    rows = bench("--op", "sla2").rows
    assert all(list(row) == list(COLUMNS) for row in rows)
    found = [(row["mask"], row["direction"], row["provider"], row["level"]) for row in rows]
    names = [(OURS, 3), (OURS, 2), ("sdpa_flash", None), ("flex", None)]
    assert found == [("skewed", to, *name) for to in ("fwd", "bwd", "fwd+bwd") for name in names]
    assert all(row["protocol"] == "paired" and row["host_us"] is not None for row in rows)
    # One of two blocks of 128 keys: 2 of 3 blocks.
    assert {(row["selected_blocks"], row["op"], row["sparsity"]) for row in rows} == {
        (2, "sla2", 0.5), (2, "attention", 0.0),
    }  # fmt: skip


def test_the_sparse_ladder_says_what_was_timed_alone(bench):
    rows = bench("--op", "sla2", "--levels").rows
    assert all(list(row) == list(COLUMNS) for row in rows)
    assert {row["protocol"] for row in rows if row["scope"] == "part"} == {"alone"}
    assert {row["protocol"] for row in rows if row["scope"] != "part"} == {"paired"}
    assert len({row["part"] for row in rows if row["scope"] == "part"}) == 7
    kernels = [(row["provider"], row["level"]) for row in rows if (row["scope"], row["direction"]) == ("kernel", "fwd")]
    assert kernels == [*((OURS, level) for level in range(4)), ("flex", None)]
    backward = [row for row in rows if (row["scope"], row["direction"]) == ("kernel", "bwd")]
    assert [(row["provider"], row["level"]) for row in backward] == [(OURS, 0)]
    assert 0 < backward[0]["rel_l2"] < 0.1
    assert {row["peak_mb"] for row in rows if row["direction"] == "fwd+bwd"} == {1.0}
    assert {row["peak_mb"] for row in rows if row["direction"] != "fwd+bwd"} == {None}
    masked = [row for row in rows if row["provider"] == "flex" and row["scope"] == "autograd"]
    assert {row["part"] for row in masked} == {"1 blocks of 128 keys"}


def test_ours_must_be_right_or_the_command_fails_after_the_others_were_timed(bench, monkeypatch, capsys):
    monkeypatch.setattr(sage_ref, "sagebwd_attention", wrong)
    with pytest.raises(SystemExit) as stop:
        bench("--without", "flex")
    assert stop.value.code == 1
    printed = capsys.readouterr()
    assert "bench: our function could not be timed in 2 cases, the first is {'missing': 'RuntimeError: " in printed.err
    assert "| sdpa_flash | None | autograd | fwd+bwd | True | 0.25 |" in printed.out
    assert "not timed: flex, RuntimeError: left out with --without" in printed.out


def test_a_graph_that_writes_something_else_is_refused(bench, monkeypatch):
    """The replay of this capture does nothing: outputs stay 0."""
    captured = contenders.captured
    monkeypatch.setattr(contenders, "captured", lambda call: captured(call)._replace(replay=lambda: None))
    with pytest.raises(RuntimeError, match="relative L2"):
        Case(SHAPE).peer("sdpa_flash").graph_entry()


def test_of_a_skewed_mask_every_query_selects_the_first_block():
    case = SparseCase(Shape(1, 2, 2, 8192, 64), 0.97, "random", device="cpu")
    random = case.wide_mask(2)
    case.mask = "skewed"
    skewed = case.wide_mask(2)
    assert random.sum(-1).unique().tolist() == skewed.sum(-1).unique().tolist() == [2]
    assert skewed[..., 0].all()
    assert random[..., 0].float().mean() < 0.2


def test_a_run_goes_on_where_it_was_stopped_unless_the_commit_is_a_different_one(bench, monkeypatch, tmp_path):
    """Three lengths, the second of which is interrupted the first time."""
    measured = []

    def measure(shape, absent):
        measured.append(shape.n)
        if measured == [1, 2]:
            raise KeyboardInterrupt
        absent.tried({"fa4": fails}, {"n": shape.n})
        times = {"direction": "fwd", "cuda_graph": False, "host_us": 1.0, "tops": 1.0, "rel_l2": 0.0}
        yield {"provider": OURS, "level": None, "scope": shape.n, "ms_median": 1.0, "protocol": "alone", **times}

    shapes = tuple(SHAPE._replace(n=n) for n in (1, 2, 3))
    monkeypatch.setitem(bench_command.MEASUREMENTS, ("sagebwd", False), Measurement("made up", shapes, measure))
    monkeypatch.setenv("SAGE_REF_COMMIT", "one")
    with pytest.raises(SystemExit, match="130"):
        bench()
    assert [row["scope"] for row in bench("--n", "3").rows] == [1, 3]
    record = bench()
    assert [row["scope"] for row in record.rows] == [row["n"] for row in record.provenance["missing"]] == [1, 2, 3]
    assert measured == [1, 2, 3, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
    for commit in ("one", "two"):
        monkeypatch.setenv("SAGE_REF_COMMIT", commit)
        bench("--n", "3")
    assert measured[4:] == [3, 3]


# Launch tables


@pytest.mark.parametrize("op", ["sagebwd", "sla2"])
def test_every_kernel_that_is_tuned_gives_the_right_results(bench, op):
    cases = {"sagebwd": Case(Shape(1, 1, 1, 128, 64, True)), "sla2": SparseCase(Shape(1, 1, 1, 256, 64), 0.5)}
    seen = set()
    for kernel in tuning.kernels(op):
        if kernel.head_dim == 64 and kernel.causal == (op == "sagebwd") and kernel.kernel not in seen:
            seen.add(kernel.kernel)
            run, exact = tuning.prepared_run(kernel, cases[op])
            found = run(DEFAULTS[kernel.kernel])
            assert found
            for name, x in found.items():
                require_close(x, exact[name], name=name)
    assert len(seen) == {"sagebwd": 7, "sla2": 7}[op]
    assert max(kernel.level for kernel in tuning.kernels(op)) == {"sagebwd": 4, "sla2": 3}[op]  # none of Hopper's


@pytest.mark.parametrize("op", ["sagebwd", "sla2"])
def test_the_fastest_launch_that_is_right_is_used_and_an_interrupted_run_goes_on(
    bench, clock, op, monkeypatch, tmp_path
):
    """On a made-up GPU. Of the candidates the first fails and the second is wrong, of the others the last is fastest.

    At first the fourth kernel gives nothing right.
    """
    every, measured = tuning.kernels(op), []

    def prepared_run(kernel, _):
        measured.append(kernel)
        launches, is_broken = candidates(kernel.kernel, kernel.level), len(measured) == 4

        def run(launch):
            place = launches.index(launch)
            if place == 0:
                raise RuntimeError("too much shared memory")
            is_wrong = is_broken or (place == 1 and len(launches) > 2)
            clock.ms += 0 if is_wrong else 100 - place
            return {"dQ": torch.full((1, 1, 4, 8), 1.2 if is_wrong else 1.0)}

        return run, {"dQ": torch.ones(1, 1, 4, 8)}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "RTX")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    monkeypatch.setattr("sage_lab.records.provenance", lambda command: {"gpu": "RTX", "triton": triton.__version__})
    monkeypatch.setattr(tuning, "case_of", lambda *_: None)
    monkeypatch.setattr(tuning, "prepared_run", prepared_run)
    monkeypatch.setattr(tuning, "compile_candidates", lambda operation, kernels, _: measured.append(len(kernels)))
    with pytest.raises(RuntimeError, match="no candidate of Case"):
        main(["bench", "--tune", "--op", op])
    main(["bench", "--tune", "--op", op])
    assert measured == [len(every), *every[:3], len(every) - 2, *every[2:]]
    table = launch_tables.users_table("RTX", op)
    assert list(table.parent.iterdir()) == [table]
    launch_tables.table_for.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kernel in every:
            launch = choose_launch(*kernel, torch.device("cuda", 0))
            assert launch == candidates(kernel.kernel, kernel.level)[-1]
    launch_tables.table_for.cache_clear()
