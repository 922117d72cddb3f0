"""The tables of times that were taken in turn, from made-up records."""

import pytest
from sage_course.results import paired as paired_results
from sage_course.results.paired import PAIRED, PAIRED_PINNED, PAIRED_SPARSE, peer_ratios, ratio_lines, turns
from sage_lab.records import how_timed, read_record, write_record

SHAPE = {"n_q": 1024, "heads": 16, "kv_heads": 16, "head_dim": 128, "causal": False, "layout": "bhnd"}
SHAPE |= {"scope": "autograd", "direction": "fwd+bwd", "cuda_graph": False, "protocol": "paired"}
GROUPED = {"n_q": 8192, "heads": 64, "kv_heads": 8, "causal": True}


def row(provider, ms, host_us=10.0, **changed):
    return SHAPE | {"provider": provider, "ms_median": ms, "host_us": host_us, "rel_l2": ms / 100} | changed


def times(ours, cudnn, **changed):
    """Of one turn. Ours last, as no turn needs to begin with it."""
    return [row("sdpa_cudnn", cudnn, 44.4, **changed), row("sage_kernels", ours, 333.3, **changed)]


ROWS = [
    *times(2.0, 1.0), row("fa4", 3.0, 22.2), row("sage_kernels, unbiased", 2.1), *times(4.0, 6.0, **GROUPED),
    *times(2.0, 5.0, direction="fwd"), *times(2.0, 1.5, layout="bnhd"), *times(1.0, 2.5, cuda_graph=True),
]  # fmt: skip


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """write(name, rows, missing): a record that the tables read."""
    monkeypatch.setattr(paired_results, "read_record", lambda name: read_record(tmp_path / f"{name}.json"))
    return lambda name, rows, missing=(): write_record(tmp_path / f"{name}.json", rows, command="c", missing=missing)


def test_each_turn_is_compared_with_ours_of_the_same_turn():
    assert [len(of) for _, of in turns(ROWS)] == [4, 2, 2, 2, 2]
    header, lines = ratio_lines(ROWS)
    columns = dict(zip(header, zip(*lines, strict=True), strict=True))
    assert columns["cuDNN"] == ("0.50", "1.50", "2.50", "0.75", "2.50")
    assert columns["FlashAttention-4"] == ("1.50", "", "", "", "")
    assert columns["layout"] == ("bhnd",) * 3 + ("bnhd", "bhnd")
    assert "mask" not in columns


def test_who_is_alone_is_compared_with_nobody():
    assert peer_ratios([row("fa4", 1.0)]) == {}
    assert list(turns([row("fa4", 1.0, protocol="alone")])) == []
    # Of several of ours the fastest.
    assert peer_ratios([row("sage_kernels", 2.0), row("sage_kernels", 4.0), row("flex", 3.0)]) == {"flex": 1.5}


def test_the_table_of_speed_has_a_line_per_shape(recorded):
    recorded(PAIRED, ROWS, [{"provider": "cudnn_fp8", "missing": "not installed"}])
    header, _, *lines = paired_results.paired_speed("fwd+bwd").split("\n\n")[0].splitlines()
    assert cells(header)[1:] == [
        *paired_results.PEER_NAMES.values(),
        "our host time, us",
        "cuDNN's",
        "FlashAttention-4's",
    ]
    assert [cells(line) for line in lines] == [
        ["N=1,024, D=128", "", "0.50", "1.50", "", "", "333", "44", "22"],
        ["N=8,192, D=128, causal, 64 / 8 heads", "", "1.50", "", "", "", "333", "44", ""],
    ]
    assert "| 2.50 |" in paired_results.paired_speed("fwd")
    _, described, errors = paired_results.paired_speed("fwd+bwd").split("\n\n")
    assert described.endswith("that the record gives: cuDNN, FP8.")
    ours = "ours 0.0200 to 0.0400, FlashAttention-4 0.0300 to 0.0300, ours with an unbiased O 0.0210 to 0.0210."
    assert errors.endswith(f": cuDNN 0.0100 to 0.0600, {ours}")


def test_layouts_and_graphs_stand_beside_each_other(recorded):
    recorded(PAIRED, ROWS)
    _, _, *lines = paired_results.paired_ways().split("\n\n")[0].splitlines()
    assert [cells(line)[1:] for line in lines] == [
        ["0.50", "0.75", "2.50", "+5.0%"],
        ["1.50", "", "", ""],
    ]


def test_the_pinned_triton_stands_beside_the_other(recorded):
    recorded(PAIRED, ROWS)
    longer = {"n_q": 2048}  # which the other record lacks
    recorded(PAIRED_PINNED, [*times(2.0, 1.6), *times(4.0, 2.0, **longer)])
    _, _, *lines = paired_results.paired_pinned().split("\n\n")[0].splitlines()
    assert [cells(line)[1:] for line in lines] == [["0.50", "0.80"], ["", "0.50"]]


def test_the_sparse_table_has_a_line_per_mask_and_direction(recorded):
    rows = [line for mask in ("random", "skewed") for line in times(2.0, 26.0, mask=mask, n_q=32760, heads=12)]
    recorded(PAIRED_SPARSE, rows)
    header, _, *lines = paired_results.paired_sparse().split("\n\n")[0].splitlines()
    assert cells(header) == ["N", "mask", "", "ours, ms", "cuDNN"]
    assert cells(lines[1]) == ["32,760", "skewed", "forward and backward", "2.00", "13.00"]


def test_rows_that_say_nothing_were_timed_alone():
    assert how_timed([{}, {"protocol": "alone"}]) == "timed alone"
    assert how_timed([{"protocol": "paired"}]) == "timed in turn"
    assert how_timed([{"protocol": "paired"}, {}]) == "timed alone, timed in turn"


def test_a_video_model_is_compared_with_flash_attention_4_at_every_length(recorded):
    found = [
        {"what": what, "tokens": tokens, "provider": provider, "ms_median": ms}
        for what, at in {"step": (2, 5, 8), "sampling": (10, 9, 20), "sampling, CUDA graph": (3, 6, 30)}.items()
        for tokens, provider, ms in ((64, "sla2", at[0]), (64, "flash_attention_4", at[1]), (64, "cudnn", 1),
                                     (9999, "flash_attention_4", at[2]), (9999, "sla2", at[0]))
    ]  # fmt: skip
    recorded(paired_results.VIDEO, found)
    said = paired_results.video_times()
    assert "2.5 and 4.0 times as long for a training step (64 and 9,999 tokens)" in said
    assert "2.0 and 10.0 for a sample, each pass a CUDA graph (0.9 and 2.0 without graphs)" in said
