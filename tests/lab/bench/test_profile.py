"""The profile of the Hopper kernels: Nsight Compute's report is read right."""

import pytest

pytest.importorskip("triton")
from sage_lab.bench import profile

LAUNCH = """  {name} (2752, 1, 1)x(512, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Section: GPU Speed Of Light Throughput
    Metric Name             Metric Unit Metric Value
    SM Frequency                    Ghz         1.79
    Elapsed Cycles                cycle    4,355,254
    Duration                         {unit}     {ms}
    L2 Cache Throughput               %        23.38
    SM: Issue Active                                                                    %        {issue}
    SM: Inst Executed Pipe Xu                                                           %        49.92
    SM: Pipe Tensor Cycles Active                                                       %        46.86
    SM: Pipe Tensor Type Hmma Hgmma Qgmma Imma Igmma Bmma Bgmma Cycles Active           %        40.00
    SM: Pipe Alu Cycles Active                                                          %        38.59
    SM: Pipe Fma Cycles Active                                                          %        20.08
    SM: Pipe Fmaheavy Cycles Active                                                     %         9.79
    Stall Barrier                   inst         2.51
    Stall Wait                      inst         1.03
    Stall Not Selected              inst         0.81
    Section: Command line profiler metrics
    l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum                                           0
    l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum                                 138,412,032
    l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed            %        57.25
    l1tex__data_pipe_lsu_wavefronts_mem_shared.sum                                         1,258,291,200
"""


def launch(name="hopper_program", unit="ms", ms="1,002.42", issue="52.18"):
    return LAUNCH.format(name=name, unit=unit, ms=ms, issue=issue)


def test_every_launch_of_a_report_is_read_in_order():
    text = "==PROF== Connected\n[1] python3\n" + launch() + "\n" + launch("query_program", issue="49.29")
    first, second = profile.parsed(text)
    stalls = {"stall_barrier": 2.51, "stall_wait": 1.03, "stall_not_selected": 0.81}
    conflicts = {"shared_wavefronts": 1258291200, "store_conflicts": 138412032, "load_conflicts": 0}
    units = {"tensor": 46.86, "issue": 52.18, "exp2": 49.92, "alu": 38.59, "fma": 20.08, "l2": 23.38, "shared": 57.25}
    assert first == units | stalls | conflicts | {"profiled_ms": 1002.42, "profiled_ghz": 1.79, "clocks": 4355254}
    assert second["issue"] == 49.29
    assert profile.parsed(launch(unit="us"))[0]["profiled_ms"] == pytest.approx(1.00242)
    megahertz = launch().replace("Ghz         1.79", "Mhz         990.5")
    assert profile.parsed(megahertz)[0]["profiled_ghz"] == pytest.approx(0.9905)


@pytest.mark.parametrize("text", [launch().replace("Stall Wait", "Stall Else"), launch(unit="hour")])
def test_a_report_that_lacks_something_is_an_error(text):
    with pytest.raises(ValueError, match=r"text: expected a line .* of every launch"):
        profile.parsed(launch() + text)
