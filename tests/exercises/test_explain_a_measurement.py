"""Exercise 19 quotes measurements and what its models make of them: both are those of the record."""

import re

import pytest
from sage_lab.records import read_record

from exercises.variants import read_text
from exercises.worker import define

NAME = "19_explain_a_measurement"
PROGRAMS = {"ours": "sage_kernels", "cudnn": "sdpa_cudnn", "fa4": "fa4"}
SELECTED = {
    "forward": {"direction": "fwd"},
    "forward, causal": {"direction": "fwd", "causal": True},
    "forward, D = 64": {"direction": "fwd", "head_dim": 64},
    "both passes": {"direction": "fwd+bwd"},
    "both passes, causal": {"direction": "fwd+bwd", "causal": True},
    "both passes, D = 64": {"direction": "fwd+bwd", "head_dim": 64},
    "both passes, CUDA graph": {"direction": "fwd+bwd", "cuda_graph": True},
}
USUAL = {"scope": "autograd", "layout": "bhnd", "cuda_graph": False, "causal": False, "head_dim": 128}


def master_of(variant):
    return define("explain_a_measurement", read_text(NAME, "master.py", variant).encode(), "master.py")


def recorded(label, program, n):
    rows = read_record("paired_h200").select(**USUAL | SELECTED[label], provider=PROGRAMS[program], n_q=n)
    (row,) = (row for row in rows if row["heads"] == row["kv_heads"])
    assert row["batch"] * n == 32768
    assert row["heads"] * row["head_dim"] == 2048
    return row["ms_median"]


@pytest.mark.parametrize("variant", [1, 2])
def test_measured_times_are_the_records_and_the_pages(variant):
    master, page = master_of(variant), read_text(NAME, "README.md", variant)
    for label, programs in master.MEASURED_MS.items():
        for program, times in programs.items():
            assert times == tuple(recorded(label, program, n) for n in master.LENGTHS), (label, program)
    table = re.search(r"<!-- measured -->\n(.*?)<!-- /measured -->", page, re.DOTALL)[1]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert found == [
        ["" if number else label, program, *(f"{ms:.3f}" for ms in times)]
        for label, programs in master.MEASURED_MS.items()
        for number, (program, times) in enumerate(programs.items())
    ]


def test_the_right_answers_are_what_the_models_say():
    """Each model comes closer to the measured time than the explanation that it speaks against."""
    master = master_of(1)
    forward, causal = master.MEASURED_MS["forward"]["ours"], master.MEASURED_MS["forward, causal"]["ours"]
    ours = master.line(2048, forward[1], 8192, forward[3])
    for n, measured, unmasked in zip(master.LENGTHS, causal, forward, strict=True):
        predicted = master.causal_ms(ours, n, 128, 128)
        assert predicted == pytest.approx(measured, rel=0.1 if n == 1024 else 0.05)  # as the page says
        diagonal_alone = unmasked * (predicted - ours[0]) / (ours[1] * n)
        assert n > 2048 or abs(predicted - measured) < abs(diagonal_alone - measured)
    # why_short: a CUDA graph removes at most a tenth of what we take longer. why_d64: cuDNN is slower with D = 64, too.
    labels = "both passes", "both passes, CUDA graph"
    with_host, graph = (x["ours"][0] / x["cudnn"][0] - 1 for x in map(master.MEASURED_MS.get, labels))
    assert graph > 0.9 * with_host
    cudnn = master.MEASURED_MS["forward"]["cudnn"][4], master.MEASURED_MS["forward, D = 64"]["cudnn"][4]
    assert cudnn[1] > 1.3 * cudnn[0]
    # which_claim: in both passes we are behind where the forward lines cross, and FlashAttention-4 is ahead everywhere.
    both = master.MEASURED_MS["both passes"]
    assert both["ours"][2] > both["cudnn"][2]
    assert all(fa4 < min(times) for fa4, *times in zip(both["fa4"], both["ours"], both["cudnn"], strict=True))


def test_what_the_page_of_the_second_variant_says():
    master = master_of(2)
    both, masked = (master.MEASURED_MS[label] for label in ("both passes", "both passes, causal"))
    ours, cudnn = (master.line(master.LENGTHS, both[name]) for name in ("ours", "cudnn"))
    assert round(master.break_even(ours, cudnn, 1.0)) == 11268
    for n, measured in zip(master.LENGTHS, masked["ours"], strict=True):
        predicted = (ours[0] + ours[1] * n) * (1 - master.causal_saving(ours, n, 128, 128))
        assert 0.93 * measured < predicted < 0.99 * measured
    assert both["cudnn"][4] > both["ours"][4] > masked["ours"][4] > masked["cudnn"][4]
