"""`climb`: what it counts in machine code, how often, where it places a kernel, and the board that keeps results."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from sage_lab.__main__ import main
from sage_lab.climb import child
from sage_lab.climb.board import add, board_rows
from sage_lab.climb.child import ask
from sage_lab.climb.command import place
from sage_lab.climb.counting import UNITS, Part, clocks_column, executions_of, group_of, is_copy, parts
from sage_lab.climb.launches import Executions, executions
from sage_lab.climb.problems import RECORD
from sage_lab.climb.sentence import costliest
from sage_lab.records import read_record

TWO_PASSES, ONE_PASS = (str(Path(__file__).with_name(f"{name}.py")) for name in ("two_passes", "one_pass"))
KNOWN = Executions("program", 8, {"a.py:1": 600, "a.py:2": 1200, "a.py:9": 8, "b.py:3": 100}, False)
# A loop without a mask, the same with one, another loop, each instruction below its line.
CODE = """
//## File "/x/a.py", line 9
        /*0000*/                   MOV R1, R2 ;
.L_x_1:
//## File "/x/a.py", line 1
        /*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0020*/                   MUFU.EX2 R5, R3 ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0050*/                   FSEL R3, R3, R4, P0 ;
        /*0060*/                   MUFU.EX2 R5, R3 ;
        /*0070*/               @P1 BRA `(.L_x_2) ;
.L_x_3:
//## File "/x/b.py", line 3
        /*0080*/                   LDG.E R3, [R4.64] ;
        /*0090*/               @P1 BRA `(.L_x_3) ;
"""


def test_a_loop_that_is_there_twice_counts_once_and_each_as_often_as_its_lines_ran():
    found = {
        tuple(x.partition(" ")[0].partition(".")[0] for x in part.instructions): part for part in parts(CODE, KNOWN)
    }
    assert {names: part.executions for names, part in found.items()} == {
        ("MOV",): 8, ("LDG", "BRA"): 100, ("HMMA", "MUFU", "BRA"): 600,
    }  # fmt: skip
    assert found["HMMA", "MUFU", "BRA"].lines == ["a.py:1"] * 3
    other = Part(["HMMA.16816", "HMMA.16816"], ["a.py:1"] * 2, 600)  # one matmul more: a loop of its own
    assert not is_copy(other, found["HMMA", "MUFU", "BRA"])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["a.py:1"] * 70 + ["a.py:2"] * 20 + ["a.py:9"] * 15, 600),
        (["a.py:1"] * 20 + ["a.py:2"] * 70, 600),  # a function that is called twice
        (["a.py:1"] * 5 + ["a.py:2"] * 95, 1200),
        (["triton.py:1"], 8),
    ],
)
def test_most_instructions_decide_how_often_a_loop_runs(lines, expected):
    assert executions_of(lines, KNOWN) == expected


def test_lines_of_one_block_ran_equally_often(tmp_path):
    """Python counts a statement of several lines more than once."""
    path = tmp_path / "a.py"
    path.write_text(
        "def f():\n    x = (\n        1)\n    for j in range(3):\n        y = (\n            2)\n        z = 3\n"
    )
    hits = Counter({(str(path), line): count for line, count in {2: 2, 3: 1, 4: 4, 5: 6, 6: 3, 7: 3}.items()})
    assert executions(hits) == {f"a.py:{line}": 2 if line < 5 else 3 for line in range(2, 8)}


def test_kinds_of_instructions():
    names = {
        "tensor cores": "IGMMA.64x128x32", "exp2": "MUFU.EX2", "conversions": "F2I.S8", "arithmetic": "FMNMX",
        "moves": "SHFL.BFLY", "memory": "LDSM.16", "spills": "LDL.LU", "rest": "LDC R1",
    }  # fmt: skip
    assert {group: group_of(name) for group, name in names.items()} == dict(zip(names, names, strict=True))


def counted(source, target, problem):
    problems = [list(problem)]
    executions = ask(
        "trace", source, False, targets=[target if source.startswith("level") else None], problems=problems
    )
    return ask("count", source, False, targets=[target], problems=problems, executions=executions, workers=1)[0]


def test_levels_and_readers_kernels_go_through_one_door():
    """What is counted now is what the record has; a first attempt is behind all levels, and its autotuner is named."""
    row, recorded = counted("level4", 90, (64, False)), read_record(RECORD)
    (before,) = recorded.select(name="level4", target=90, head_dim=64, causal=False)
    assert {name: row[name] for name in ("clocks", "instructions", "spills")} == pytest.approx(
        {name: before[name] for name in ("clocks", "instructions", "spills")}, rel=0.02, abs=0.01
    )
    row = counted(TWO_PASSES, 86, (64, True))
    assert place(row).startswith("6 of 6, after level")
    assert 4 < row["exp2"] < 4.5  # two passes, no tile that the mask hides is left out, and some for each row
    assert row["tensor cores"] == pytest.approx(2 * 3 * 64 / 2048 * 32, rel=0.01)
    assert row["config"].startswith("the first of 2 configurations, BLOCK: 64")


def test_launches_that_need_values_can_not_be_counted(tmp_path):
    path = tmp_path / "reader.py"
    path.write_text("def attention(q, k, v, is_causal=False):\n    return q * float(q.abs().max())\n")
    executions = [[None, [64, False], []]]
    with pytest.raises(ValueError, match="reader.py: expected launches that need no values of tensors.*, line 2: "):
        ask("count", str(path), False, targets=[90], problems=[[64, False]], executions=executions, workers=1)


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "a syntax error": ("def attention(:", "got SyntaxError"),
        "no function": ("x = 1", "expected a function attention(q, k, v, is_causal=False), found none"),
        "an end": ("raise SystemExit(3)", "got SystemExit, line 1: 3"),
        "a crash": ("import os\nos._exit(3)", "expected a result, its process crashed with status 3"),
        "a hang": ("while True:\n    pass", "expected an end of `check` within 8 s, it hangs or is slow"),
    }.values(),
)
def test_a_file_that_does_not_work_is_one_sentence(tmp_path, monkeypatch, text, said):
    monkeypatch.setitem(child.SECONDS, "check", 8 if "while" in text else 300)
    path = tmp_path / "reader.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=".") as caught:
        ask("check", str(path), False)
    assert str(caught.value).startswith(f"{path}: expected ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_kernel_is_not_placed(monkeypatch, capsys):
    wrong = [
        ["one head", 0, ["value", "Scale once.", "row 0 is off", 1.0]],
        ["really INT8", 0, ["not INT8", "", "", None]],
    ]
    monkeypatch.setattr("sage_lab.climb.command.ask", lambda action, *_, **__: {"check": wrong}[action])
    with pytest.raises(SystemExit, match="1"):
        main(["climb", "level0"])
    printed = capsys.readouterr()
    assert "| one head | value. Scale once. row 0 is off |" in printed.out
    assert printed.err.endswith("level0: not placed, because it is wrong in one head\n")


ROW = {"name": "mine", "target": 90, "head_dim": 128, "causal": False, "date": "2026-01-01", "clocks": 0.1}


def test_a_board_keeps_what_several_processes_add_at_once_and_refuses_other_files(tmp_path):
    board = tmp_path / "board.json"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: add(board, [ROW | {"name": str(number)}], "climb"), range(8)))
    assert sorted(row["name"] for row in board_rows(board)) == list("01234567")
    for content in ("junk", json.dumps({"provenance": {}, "rows": [{"name": "level 0"}]})):
        board.write_text(content)
        with pytest.raises(ValueError, match=": expected "):
            add(board, [ROW], "climb")
        assert board.read_text() == content


def test_a_board_is_shown_with_our_levels(tmp_path, capsys):
    board = tmp_path / "board.json"
    add(board, [ROW, ROW | {"name": "yours", "gpu": "H", "ms_median": 2.5, "target": 90}], "climb")
    main(["climb", "--board", str(board)])
    shown = capsys.readouterr().out.splitlines()
    assert "| sm_90 | 0.100 clocks a score | mine | 2026-01-01 |" in shown
    assert sum("level" in line and line.startswith("| sm_90") for line in shown) == 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"around_share": 0.5}, "what runs around f takes 50% of the clocks"),
        ({"spills": 2.0}, "2.0 of 12.0 instructions per score move spilled registers"),
        ({"memory, clocks": 9}, "the GPU's memory sets the pace of f"),
        ({"tensor_share": 0.7}, "take 70% of the clocks; INT8 operands take half"),
        ({"tensor_share": 0.7, "is_16bit": False}, "little else is left to save"),
        ({}, 'the issue slots are busiest; 5.0 of 12.0 instructions per score are "moves" (level 4'),
        ({"units for exp2, clocks": 8}, '1.5 of 12.0 instructions per score are "conversions" (level 3'),
    ],
)
def test_the_sentence_names_what_costs_most(changes, said):
    row = {
        "target": 90,
        "head_dim": 64,
        "causal": False,
        "program": "f",
        "config": "",
        "line": "f.py:3",
        "of_line": 2.0,
    }
    row |= {"around_share": 0.1, "tensor_share": 0.3, "is_16bit": True, "instructions": 12.0, "spills": 0.0}
    row |= {clocks_column(unit): 0.1 for unit in (*UNITS, "memory")} | {"issue slots, clocks": 0.2}
    row |= {"exp2": 1.0, "conversions": 1.5, "arithmetic": 4.0, "moves": 5.0, "memory": 0.1, "rest": 0.2}
    found = costliest(row | changes)
    assert found.startswith("On sm_90 (D=64, no mask) ")
    assert said in found
    assert found.endswith("f.py:3 has most instructions, 2.0 per score.")


@pytest.mark.gpu
def test_on_a_gpu_a_kernel_is_timed_in_turn_with_ours(tmp_path):
    main(["climb", ONE_PASS, "--json", str(tmp_path / "climb.json"), "--board", str(tmp_path / "board.json")])
    rows = read_record(tmp_path / "climb.json").rows
    names = {"one_pass", "level0", "level4", "FlashAttention-2"}
    assert all(names <= {row["name"] for row in rows if row["head_dim"] == d} for d in (64, 128))
    assert {row["name"] for row in board_rows(tmp_path / "board.json")} == {"one_pass"}
    assert torch.cuda.get_device_name() == rows[0]["gpu"]
