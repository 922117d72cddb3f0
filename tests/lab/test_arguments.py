"""Commands as dataclasses: which options a field becomes, and what a line then means."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from sage_lab.command_line import (
    POSITIONAL,
    Arguments,
    Parser,
    add_options,
    from_zero,
    input_file,
    output_folder,
    positive,
    read_arguments,
)


@dataclass(frozen=True, kw_only=True)
class Try(Arguments):
    files: Annotated[tuple[Path, ...], POSITIONAL, input_file, "what to read"]
    layers: Annotated[tuple[int, ...], from_zero]
    cube: Annotated[tuple[int, int], positive] = (4, 2)
    op: Annotated[Literal["one", "two"], "which"] = "one"
    some: tuple[Literal["a", "b"], ...] = ()
    share: Annotated[float | None, "100% or less"] = None
    qk_norm: bool = False
    folder: Annotated[Path, output_folder] = Path("runs/try")

    def __post_init__(self):
        if self.op == "two" and self.qk_norm:
            raise ValueError("qk_norm: expected op one, got two")


def read(line):
    parser = Parser(prog="try")
    add_options(parser, Try)
    return read_arguments(parser, line.split())


HERE = Path(__file__)


def test_fields_become_options_with_their_names_types_and_defaults():
    plain = read(f"{HERE} --layers 0")
    assert plain == Try(files=(HERE,), layers=(0,))
    line = f"{HERE} {HERE} --layers 1 2 --cube 3 5 --op two --some b a --share 0.5"
    assert read(f"{line} --folder x --json y") == Try(
        files=(HERE, HERE), layers=(1, 2), cube=(3, 5), op="two", some=("b", "a"), share=0.5,
        folder=Path("x"), json=Path("y"),
    )  # fmt: skip
    assert read(f"{HERE} --layers 0 --qk-norm").qk_norm


def test_help_names_every_option_and_its_default(capsys):
    with pytest.raises(SystemExit, match="0"):
        read("--help")
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("FILE what to read", "which (default: one)"):
        assert words in shown
    assert "--cube CUBE CUBE (default: 4 2)" in shown
    assert "--share SHARE 100% or less" in shown
    assert "--folder FOLDER (default: runs/try)" in shown


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--layers 0", "arguments are required: FILE"),
        (f"{HERE}", "arguments are required: --layers"),
        (f"{HERE} --layers 0 --some c", "argument --some: invalid choice: 'c'"),
        (f"{HERE} --layers 0 --cube 3", "argument --cube: expected 2 arguments"),
    ],
)
def test_a_wrong_line_ends_in_one_line(line, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        read(line)
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_what_options_keep_together_is_asked_of_all_and_a_default_path_is_checked(monkeypatch, tmp_path, capsys):
    with pytest.raises(ValueError, match="qk_norm: expected op one, got two"):
        read(f"{HERE} --layers 0 --op two --qk-norm")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    with pytest.raises(SystemExit, match="2"):
        read(f"{HERE} --layers 0")
    assert "argument --folder: expected a folder where files can be written" in capsys.readouterr().err
