"""The READMEs say what the records say."""

import json
import re

import matplotlib.pyplot as plt
import pytest
from sage_course import outline, readme
from sage_course.figures import overview_figure
from sage_course.readme import SECTIONS, rewritten
from sage_course.results import kernels as kernel_results
from sage_course.results import prediction as prediction_results
from sage_course.results import tables as results
from sage_course.results.claims import claims, hypothesis
from sage_course.results.kernels import BENCH
from sage_course.results.pretraining import final_losses, pretrain_runs
from sage_course.results.tables import LAYERS, NOISE, PRETRAIN, TABLE2
from sage_lab.experiments.table2 import PAPER_TABLE2
from sage_lab.records import REPOSITORY, Record, read_record, write_record


@pytest.mark.parametrize("name", SECTIONS)
def test_measured_parts_are_in_step_and_a_stale_one_is_noticed(name, monkeypatch):
    text = (REPOSITORY / name).read_text()
    assert rewritten(name) == text, "run `python -m sage_lab readme`"
    for section in SECTIONS[name]:
        monkeypatch.setitem(readme.SECTIONS, name, {section: lambda: "something else"})
        assert rewritten(name) != text
    monkeypatch.setitem(readme.SECTIONS, name, {"no such part": lambda: ""})
    with pytest.raises(ValueError, match="no such part"):
        rewritten(name)


def test_a_notebook_without_its_minutes_is_named(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    first_cell = {"cells": [{"source": "# 13 · Title\n\n**Time** 5 minutes"}]}
    (tmp_path / "notebooks" / "13_title.ipynb").write_text(json.dumps(first_cell))
    monkeypatch.setattr(outline, "repository", lambda: tmp_path)
    with pytest.raises(ValueError, match=r"13_title\.ipynb: expected .* about N minutes"):
        readme.courses()


def test_links_and_pictures_exist():
    for name in (*SECTIONS, "kernels/README.md"):
        folder = (REPOSITORY / name).parent
        for target in re.findall(r"\]\(([^)#]+)\)", (REPOSITORY / name).read_text()):
            assert (folder / target).exists(), f"{name}: {target}"


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_table2_has_the_worst_layer_of_each_model_and_the_papers():
    record = read_record(TABLE2)
    header, _, *lines, _, caption = results.table2().splitlines()
    assert cells(header)[1:] == list(PAPER_TABLE2)
    assert [cells(line)[0].partition(", ")[0] for line in lines] == ["with QK-norm", "without QK-norm", "paper"]
    for line, qk_norm in zip(lines, (True, False), strict=False):
        worst = max(record.select(qk_norm=qk_norm, tensor="dQ"), key=lambda row: row["rel_l2"])["layer"]
        name, *shown = cells(line)
        assert name.endswith(f", layer {worst}")
        rows = record.select(qk_norm=qk_norm, layer=worst)
        assert shown == [f"{row['cosine']:.4f} / {row['rel_l2']:.4f}" for row in rows]
    assert cells(lines[2])[1:] == [f"{cosine:.4f} / {rel_l2:.4f}" for cosine, rel_l2 in PAPER_TABLE2.values()]
    for capture in record.provenance["captures"]:
        assert f"step {capture['run']['step']:,} of {capture['run']['steps']:,}" in caption


def test_the_overview_shows_the_worst_layer_with_qk_norm():
    record = read_record(TABLE2)
    larger = [row | {"rel_l2": (1 if row["qk_norm"] else 3) * row["rel_l2"]} for row in record.rows]
    figure = overview_figure(Record({}, larger), read_record(BENCH))
    worst = max(record.select(qk_norm=True, tensor="dQ"), key=lambda row: row["rel_l2"])["layer"]
    written = [text.get_text() for text in figure.axes[0].texts]
    for row in record.select(qk_norm=True, layer=worst):
        assert written[written.index(row["tensor"]) + 1] == f"{row['rel_l2']:.1%}"
    plt.close(figure)


def test_pretraining_has_every_main_cell_and_the_claims():
    runs = read_record(PRETRAIN)
    text = results.pretraining()
    for size in runs.provenance["plan"]["tokens_per_step"]:
        assert f"{size:,} tokens per step" in text.splitlines()[0]
        for kind in ("exact", "SageBwd, K smoothed"):
            losses = final_losses(pretrain_runs(runs, kind, size)).values()
            assert f"({min(losses):.4f} to {max(losses):.4f}, {len(losses)} seeds)" in text
    for claim in claims(runs, read_record(LAYERS)):
        assert f"| {claim.paper} | {claim.ours} | {claim.verdict} |" in text
    assert text.endswith(hypothesis(runs, read_record(NOISE)))


SPEED_PLAN = {"layers": 24, "width": 1024, "heads": 16, "tokens_per_device": 65536}


@pytest.fixture
def step_times(tmp_path, monkeypatch):
    """step_times(rates) -> lines of the part. rates: {(attention, N, GPUs, parallel): tokens per second}."""
    monkeypatch.setattr(results, "read_record", lambda name: read_record(tmp_path / f"{name}.json"))

    def write(rates):
        rows = [
            dict(zip(("attention", "context", "devices", "parallel"), place, strict=True))
            | {"ms_median": 1e6 / rate, "tokens_per_second": rate}
            for place, rate in rates.items()
        ]
        write_record(tmp_path / f"{results.PRETRAIN_SPEED}.json", rows, command="c", plan=SPEED_PLAN)
        return results.pretraining_speed().splitlines()

    return write


def test_step_times_compare_sagebwd_with_both_exact_attentions(step_times):
    ways = [(4096, 1, "none"), (16384, 1, "none"), (4096, 2, "ddp")]
    rates = {"exact": (1000, 500, 1900), "flash_attention_2": (800, 400, 1500), "sagebwd": (900, 480, 1800)}
    rates = {(name, *way): rate for name, of in rates.items() for way, rate in zip(ways, of, strict=True)}
    _, _, header, _, *lines, _, pick, _, flash, _, _ = step_times(rates)
    others = ["PyTorch's pick", "FlashAttention-2", "one device"]
    assert cells(header)[6:] == [f"against {other}" for other in others]
    assert [cells(line)[3] for line in lines] == ["PyTorch's pick", "FlashAttention-2", "SageBwd"] * 3
    assert cells(lines[5]) == ["4096", "2", "ddp", "SageBwd", f"{1e6 / 1800}", "1,800", "0.95", "1.20", "2.00"]
    assert pick.endswith("the exact attention that PyTorch picks: 0.90 (N=4096), 0.96 (N=16384).")
    assert flash.endswith("FlashAttention-2: 1.12 (N=4096), 1.20 (N=16384).")
    # An interrupted measurement: SageBwd at one length, FlashAttention-2 at the other.
    way, other, _ = ways
    rates = {("exact", *way): 1000, ("sagebwd", *way): 900, ("exact", *other): 500, ("flash_attention_2", *other): 400}
    *_, pick, _, _ = step_times(rates)
    assert pick.endswith("the exact attention that PyTorch picks: 0.90 (N=4096).")


def test_limits_has_every_profiled_kernel():
    record = read_record("profile_h200")
    _, _, *lines = kernel_results.limits().split("\n\n")[0].splitlines()
    assert [cells(line)[0] for line in lines] == [f"{row['kernel']}, D={row['head_dim']}" for row in record.rows]
    for line, row in zip(lines, record.rows, strict=True):
        profiled = "" if row["tensor"] is None else f"{row['tensor']:.0f}%"  # cuDNN's kernels aren't looked into
        assert cells(line)[1] == profiled
        assert cells(line)[-1].endswith("capped") == row["power_capped"]


def made_record(tmp_path, name, rows):
    facts = {"triton": "3", "date": "2026-01-02T03:04", "commit": "0123456789"}
    (tmp_path / name).write_text(json.dumps({"provenance": facts, "rows": rows}))
    return read_record(tmp_path / name)


def test_gains_are_times_of_flash_attention_over_those_of_int8(tmp_path, monkeypatch):
    def row(level, direction, head_dim, ms, **more):
        shape = {"part": "prediction", "gpu": "A", "scope": "op", "causal": False, "head_dim": head_dim}
        return shape | {"level": level, "direction": direction, "ms_predicted": ms} | more

    rows = [row("FlashAttention-2", x, d, 6.0 * d) for x in ("fwd", "fwd+bwd") for d in (64, 128)]
    rows += [row("INT8", x, d, (3.0 if x == "fwd" else 12.0) * d) for x in ("fwd", "fwd+bwd") for d in (64, 128)]
    rows += [row("INT8", "fwd", 64, 99.0, causal=True), {"part": "H200", "level": 3}]
    record = made_record(tmp_path, "predicted.json", rows)
    monkeypatch.setattr(prediction_results, "read_record", lambda name: record)
    assert cells(prediction_results.gains().splitlines()[2]) == ["A", "2.00", "2.00", "0.50", "0.50"]


def test_spills_are_before_and_after(tmp_path, monkeypatch):
    def rows(first, second):
        case = {"capability": 86, "head_dim": 64, "level": 3}
        return [case | {"kernel": "dq", "spills_in_loops": first}, case | {"kernel": "dv", "spills_in_loops": second}]

    before, after = made_record(tmp_path, "a.json", rows(7, 0)), made_record(tmp_path, "b.json", rows(1, 0))
    monkeypatch.setattr(prediction_results, "read_record", lambda name: after if "compiled" in str(name) else before)
    _, _, *lines, _, _ = prediction_results.spills().splitlines()
    assert [cells(line) for line in lines] == [["dq, level 3", "", "", "7 → 1", "", "", ""]]
