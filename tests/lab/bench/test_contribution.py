"""Measurements by others: a right file passes, and what is spoilt in it is refused with a sentence that says so."""

import json
import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from sage_lab.__main__ import main
from sage_lab.bench import contribution
from sage_lab.bench.contribution import CONTRIBUTED, RULES, complaints, file_name, folder_complaints

FIRST = {"n_q": 1024, "scope": "autograd"}


def about(**facts):
    """Return what changes these facts of a file."""
    return lambda content: content["provenance"].update(facts)


def rows(**columns):
    """Return what changes these columns in the rows of the first turn; a function gets the row."""

    def change(content):
        for row in content["rows"]:
            if all(row[name] == value for name, value in FIRST.items()):
                row.update({name: x(row) if callable(x) else x for name, x in columns.items()})

    return change


def times(factor):
    """Return what multiplies every time, and makes TOPS and ratios follow: a consistent lie."""

    def change(content):
        for row in content["rows"]:
            row.update({name: factor * row[name] for name in ("ms_median", "ms_p20", "ms_p80")})
            row["tops"] /= factor

    return change


def without(provider, level):
    def change(content):
        kept = [row for row in content["rows"] if (row["provider"], row["level"]) != (provider, level)]
        content["rows"] = kept
        content["provenance"]["ratios"] = contribution.ratios_of(kept)

    return change


def of_several_files(content):
    """Take the times of one peer from another file."""
    for row in content["rows"]:
        row["turn"] += "of another file" * (row["provider"] == "sdpa_flash")


TOMORROW = (datetime.now(UTC) + timedelta(days=1)).isoformat()
SPOILT = {  # what is spoilt -> (the rule that finds it, what spoils it, a part of the sentence)
    "no rows": ("keys", lambda content: content.update(rows=[]), "got no provenance, or no rows"),
    "no driver": ("keys", lambda content: content["provenance"].pop("driver"), "got nothing as driver"),
    "no errors": ("keys", lambda content: content["rows"][3].pop("rel_l2"), "got a row without rel_l2"),
    "a list in a row": ("keys", rows(n_q=[1]), "got no provenance"),
    "ratios are a text": ("keys", about(ratios="all 1"), "got ratios that is no list"),
    "NaN": ("numbers", rows(rel_l2=math.nan), "got nan in /rows/0/rel_l2"),
    "an infinite check": ("numbers", lambda content: content["provenance"]["checks"][0].update(O=math.inf), "got inf"),
    "a time as text": ("columns", rows(ms_median="0.72"), "got ms_median = '0.72'"),
    "a time of 0": ("columns", rows(ms_p20=0.0), "got ms_p20 = 0.0"),
    "half a repetition": ("columns", rows(repetitions=16.5), "got repetitions = 16.5"),
    "no version": ("columns", about(triton=None), "got triton = None"),
    "a branch": ("commit", about(commit="main"), "got main"),
    "a short commit": ("commit", about(commit="0123456"), "got 0123456"),
    "other sources": ("sources", about(commit="0123456789" * 4 + "-dirty"), "commit or discard your changes"),
    "a future": ("date", about(date=TOMORROW), f"got {TOMORROW}"),
    "no time zone": ("date", about(date="2026-11-26T04:00:00"), "a time with its zone"),
    "no date": ("date", about(date="yesterday"), "got yesterday"),
    "an unknown card": ("card", about(gpu="A card"), "got A card with peak = None"),
    "no card's peak": ("card", about(gpu="A card", peak=[66100.0, 165.0]), "got A card with peak = [66100.0, 165.0]"),
    "half a peak": ("card", about(gpu="A card", peak=[100]), "got A card with peak = [100]"),
    "a capability as text": ("capability", about(capability="8.9"), "got '8.9'"),
    "unknown launches": ("launches", about(launches="mine"), "got 'mine'"),
    "an unknown provider": ("providers", rows(provider="mine"), "got mine"),
    "timed alone": ("protocol", rows(protocol="alone"), "got alone of sage_kernels"),
    "ours is missing": ("points", without("sage_kernels", "4/3"), "got 0 of sage_kernels at (1024, 16, 16, 128"),
    "no kernels in 16 bit": ("points", without("sage_kernels", 0), "got 0 of level 0"),
    "no FlashAttention-2": ("points", without("sdpa_flash", None), "got 0 of sdpa_flash"),
    "a point twice": ("points", lambda content: content["rows"].append(content["rows"][0]), "got 2 of sage_kernels"),
    "another shape": ("points", rows(heads=8), "got a turn at (1024, 8, 16"),
    "another batch": ("points", rows(batch=1), "got batch, n_k and dtype 1, 1024, bfloat16"),
    "of several files": ("turn", of_several_files, "times from different files can't be compared, got 2 marks"),
    "few repetitions": ("repetitions", rows(repetitions=3), "got 3 of sage_kernels"),
    "unequal repetitions": ("balance", lambda content: content["rows"][0].update(repetitions=20), "got [16, 20] at"),
    "percentiles": ("percentiles", rows(ms_p20=lambda row: 1.01 * row["ms_median"]), "expected p20 <= median"),
    "scatter": ("scatter", rows(ms_p80=lambda row: 2 * row["ms_median"]), "end what else uses the GPU"),
    "beyond the peak": ("peak", times(0.3), "whose matmuls alone take"),
    "microseconds": ("unit", times(1000), "got"),
    "TOPS": ("tops", rows(tops=lambda row: 1.1 * row["tops"]), "whose time says"),
    "a wrong kernel": ("rel_l2", rows(rel_l2=0.11), "got 0.11 of sage_kernels"),
    "a check is missing": ("checks", lambda content: content["provenance"]["checks"].pop(), "got no check at (2048,"),
    "half a check": ("checks", lambda content: content["provenance"]["checks"][0].pop("dQ"), "got a check without dQ"),
    "a failed check": ("failed checks", lambda content: content["provenance"]["checks"][0].update(dK=0.3), "0.3 for"),
    "a ratio": ("ratios", lambda content: content["provenance"]["ratios"][0].update(sdpa_flash=2.0), "got 2.0 for"),
    "no ratios": ("ratios", about(ratios=[]), "got None for sdpa_flash"),
}  # fmt: skip


def test_a_right_file_is_accepted_also_of_an_unknown_card_with_its_peak(contributed):
    assert complaints(contributed) == []
    about(gpu="A card", peak=[661.0, 165.0])(contributed)
    assert complaints(contributed) == []


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_spoilt_is_refused_by_the_rule_that_is_there_for_it(contributed, what):
    name, spoil, words = SPOILT[what]
    spoil(contributed)
    (complaint,) = [found for found in complaints(contributed) if found.startswith(f"{name}: expected ")]
    assert words in complaint


def test_every_rule_has_a_spoilt_file():
    rules = {rule.name for rule in (*contribution.FORM, *contribution.ABOUT, *RULES)}
    assert rules == {name for name, *_ in SPOILT.values()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the file is copied
@given(data=st.data())
def test_no_number_and_no_fact_can_be_changed_alone(contributed, data):
    """A time that is changed by more than rounding contradicts TOPS or ratios; nothing that is removed goes unseen."""
    text = json.dumps(contributed)
    content = json.loads(text)
    row = data.draw(st.sampled_from(content["rows"]))
    name = data.draw(st.sampled_from(("ms_median", "tops")))
    row[name] *= data.draw(st.one_of(st.floats(0.01, 0.98), st.floats(1.02, 100)))
    assert complaints(content)
    content = json.loads(text)
    holder = data.draw(st.sampled_from([content["provenance"], *content["rows"]]))
    needed = contribution.NEEDED if "turn" in holder else (*contribution.FACTS, *contribution.LISTS)
    holder[data.draw(st.sampled_from(needed))] = data.draw(st.sampled_from((math.nan, -math.inf)))
    assert complaints(content)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_no_content_crashes_the_rules(contributed, data):
    content = json.loads(json.dumps(contributed))
    about = content["provenance"]
    holder = data.draw(st.sampled_from([content, about, *content["rows"], *about["checks"], *about["ratios"]]))
    holder[data.draw(st.sampled_from(sorted(holder)))] = data.draw(ANYTHING)
    assert all(": expected " in complaint for complaint in complaints(content))


def test_every_contributed_file_keeps_the_rules():
    assert folder_complaints(CONTRIBUTED) == []


def test_a_folder_has_each_measurement_once_under_the_name_of_its_card(contributed, tmp_path, capsys):
    path = tmp_path / file_name("NVIDIA GeForce RTX 4090", contributed["provenance"]["commit"])
    assert path.name == "NVIDIA_GeForce_RTX_4090_0123456.json"
    path.write_text(json.dumps(contributed))
    assert folder_complaints(tmp_path) == []
    main(["bench", "--check-contribution", str(path)])
    assert capsys.readouterr().out == f"{path}: nothing wrong\n"
    about(commit="9876543210" * 4)(contributed)
    second = tmp_path / "NVIDIA_GeForce_RTX_4090_9876543.json"
    second.write_text(json.dumps(contributed))
    (tmp_path / "large.json").write_text(" " * (contribution.LARGEST_FILE + 1))
    (tmp_path / "other.json").write_text(json.dumps(contributed))
    assert folder_complaints(tmp_path) == [
        "NVIDIA_GeForce_RTX_4090_9876543.json: turn: expected a new measurement, got one that is in "
        "NVIDIA_GeForce_RTX_4090_0123456.json too",
        "large.json: size: expected at most 200000 bytes, got 200001",
        "other.json: name: expected NVIDIA_GeForce_RTX_4090_9876543.json, got other.json",
    ]
    with pytest.raises(SystemExit, match="1"):
        main(["bench", "--check-contribution", str(path), str(tmp_path / "other.json")])
    assert "got 1 of 2 that don't" in capsys.readouterr().err
