"""Bad command lines, interrupted commands and spoilt files: one line that names it, a status, and nothing lost."""

import contextlib
import importlib
import io
import json
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from process_cases import CONTEXT

pytest.importorskip("triton")
from sage_lab import command_line
from sage_lab.__main__ import COMMANDS, main, read_options
from sage_lab.command_line import BAD_INPUT, FAILED, INTERRUPTED, Failed, Parser, finish
from sage_lab.experiments.video.command import ACTIONS
from sage_lab.records import RECORDED, only_writer, read_record, write_file

PROGRAM = "python -m sage_lab"
TRAIN = (  # noqa: SIM905 (as it is typed)
    "pretrain --corpus text.txt --context 16 --layers 1 --width 16 --heads 2 --tokens 256"
    " --tokens-per-step 32 --tokens-per-pass 32 --validation-sequences 2 --device cpu --no-autocast --folder runs"
).split()
RUN = Path("runs", "small_exact_qk_normFalse_learning_rate0.002_tokens_per_step32_context16_tokens256_seed0.pt")
DEEP = " ".join([*TRAIN, "--layers 3 --heads 4"])
NOISE = "noise run.pt --corpus text.txt --batches 16 --sequences 1 --device cpu --variants bf16"


def status_of(line, capsys):
    """(exit status, the last line on stderr) of a command line; any other exception is a traceback."""
    capsys.readouterr()
    try:
        main(shlex.split(line) if isinstance(line, str) else line)
    except SystemExit as stop:
        lines = capsys.readouterr().err.strip().splitlines()
        return stop.code, lines[-1] if lines else ""
    return 0, ""


@pytest.fixture(scope="module")
def spoilt_files(tmp_path_factory):
    """A folder with a text, a checkpoint, and files that hold something else than their names say."""
    folder = tmp_path_factory.mktemp("spoilt")
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    with contextlib.chdir(folder):
        main(DEEP.split())
    (folder / RUN).rename(folder / "run.pt")
    (folder / "junk").write_bytes(b"\x80\x02junk" * 20)
    (folder / "empty").touch()
    (folder / "cut.pt").write_bytes((folder / "run.pt").read_bytes()[:5000])
    torch.save({"arguments": {}, "step": 3, "losses": [], "model": {}, "optimizer": {}}, folder / "other.pt")
    (folder / "odd.bin").write_bytes(b"123")
    (folder / "empty.bin").touch()
    os.mkfifo(folder / "pipe")  # nobody writes to it
    state = torch.load(folder / "run.pt", weights_only=True)
    for name, step in (("past", -1), ("far", 9)):  # a run of 8 steps
        (folder / name).mkdir()
        torch.save(state | {"step": step}, folder / name / RUN.name)
    return folder


@pytest.fixture
def spoilt(spoilt_files, monkeypatch):
    monkeypatch.chdir(spoilt_files)
    return spoilt_files


BAD = {  # the command line: what its one line says
    "": "arguments are required: command",
    "nope": "invalid choice: 'nope'",
    "info --json /dev/null": "argument --json: expected the name of a file, got '/dev/null'",
    "table1 --n 0": "argument --n: expected at least 1, got 0",
    "train-router --device meta": "argument --device: expected a device of this machine, such as cpu or cuda, got",
    "full-batch --plan gpu --device cpu": "plan: expected cpu on device cpu, got gpu",
    "pretrain --corpus empty": "path: expected text, found 1 empty files for empty",
    "pretrain --corpus empty.bin": "path: expected uint16 tokens, two bytes each, found 0 bytes in empty.bin",
    "pretrain --corpus odd.bin": "path: expected uint16 tokens, two bytes each, found 3 bytes in odd.bin",
    "pretrain --learning-rate nan": "argument --learning-rate: expected a number above 0, got 'nan'",
    "pretrain --seed -1": "argument --seed: expected at least 0, got -1",
    "pretrain --tokens 100": "tokens: expected a multiple of 8192, got 100",
    "pretrain --tokens-per-pass 100": "tokens_per_pass: expected a multiple of 512, got 100",
    "pretrain --snapshots 1 129": "snapshots: expected steps of the run, 1 to 128, got [1, 129]",
    "video": "arguments are required: action",
    "video train --size 30": "size: expected a multiple of patch=4, got 30",
    "video finetune --start junk": "one of the arguments --all --arms is required",
    "video finetune --start junk --all --plan gpu --device cpu": "plan: expected cpu on device cpu, got gpu",
    "video finetune --start text.txt --all": "weights: expected a file of `python -m sage_lab video train`",
    f"{DEEP} --folder far": f"checkpoint: expected at most step 8, far/{RUN.name} has 9",
    f"{DEEP} --folder past": f"checkpoint: expected a complete one that a run saved, got past/{RUN.name}",
    f"{DEEP} --folder far --layers 2": "checkpoint: expected a run with layers=2",
    "pretrain --folder text.txt": "argument --folder: expected the name of a folder, got 'text.txt'",
    "full-batch --folder ''": "argument --folder: expected the name of a folder, got ''",
    "video finetune --folder empty/x": "argument --folder: expected a folder where files can be written, got 'empty/x'",
    "noise pipe": "argument CHECKPOINT: expected a file that can be read, got 'pipe'",
    "pretrain --corpus ''": "argument --corpus: expected a file that can be read, got ''",
    "table1 --n 1 --seeds 1": 'record: expected finite numbers, got "cosine": NaN',
    "pretrain-speed --steps 1": "steps: expected at least 2, got 1",
    "pretrain-speed --contexts 24 --device cpu": "tokens_per_pass: expected a multiple of context=24, got 32",
    "noise junk --corpus text.txt": "checkpoint: expected a complete one that a run saved, got junk",
    "noise cut.pt --corpus text.txt": "checkpoint: expected a complete one that a run saved, got cut.pt",
    "noise run.pt --corpus junk": "corpus: expected that of run.pt, got junk, sha256",
    "capture run.pt --corpus text.txt --layers 3": "layers: expected numbers from 0 to 2, got [3]",
    "capture run.pt --corpus text.txt --layers 0 --heads 4": "heads: expected numbers from 0 to 3, got [4]",
    "capture run.pt --corpus text.txt --layers 0 --context 17": "tokens: expected at most 16 per sequence",
    "compile --only zzz": "only: expected a part of a name such as 'sm_80 forward level 0",
    "bench --n 0": "argument --n: expected at least 1, got 0",
    "bench --op": "argument --op: expected one argument",
    "bench --without flex nobody": "argument --without: invalid choice: 'nobody'",
    "count nothing.py": "argument FILE: expected a file that can be read, got 'nothing.py'",
    "count --target 70": "argument --target: expected one of 80, 86, 89, 90, 120, got '70'",
    "count text.txt --head-dim 64": "text.txt: expected an attention that compiles, got SyntaxError",
}


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_that_names_it(spoilt, capsys, line):
    before = contents(spoilt)
    status, last = status_of(line, capsys)
    assert (status, capsys.readouterr().out) == (BAD_INPUT, "")
    command, action = [*line.split(), "", ""][:2]
    beginnings = (f"{PROGRAM} {command}: ", f"{PROGRAM} {command} {action}: ", f"{PROGRAM}: ")
    assert last.startswith(beginnings)
    assert BAD[line] in last
    assert contents(spoilt) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize(("line", "status"), [("bench", FAILED), ("accuracy", FAILED)])
def test_what_needs_a_gpu_says_so(capsys, line, status):
    found, last = status_of(line, capsys)
    assert found == status
    assert "CUDA device" in last


def test_the_help_of_every_option_has_its_default(capsys):
    for command in (*COMMANDS, *(f"video {action}" for action in ACTIONS)):
        with pytest.raises(SystemExit, match="0"):
            main([*command.split(), "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        if command == "table1":
            assert all(f"(default: {x})" in shown for x in ("1024 2048 4096", "5"))


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("--help >&-", 0, ""),
        ("--help >/dev/full", FAILED, "No space left on device\n"),
        ("nope 2>/dev/full", FAILED, ""),
    ],
)
def test_closed_and_full_streams(line, status, said):
    command = ["bash", "-c", f"unset PYTHONUNBUFFERED; {shlex.quote(sys.executable)} -m sage_lab {line}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.rpartition(": ")[2]) == (status, said)


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        (
            "mkdir gone && cd gone && rmdir ../gone && {python} -m sage_lab info",
            BAD_INPUT,
            "folder: expected one that exi",
        ),
        (
            "echo 'raise ModuleNotFoundError(name=__name__)' > torch.py && {python} -m sage_lab info",
            BAD_INPUT,
            "torch: exp",
        ),
        ("PYTHONIOENCODING=ascii {python} -m sage_lab ½", BAD_INPUT, r"invalid choice: '\xbd'"),
    ],
)
def test_no_folder_no_torch_and_a_terminal_without_greek(line, status, said, tmp_path):
    command = ["bash", "-c", line.format(python=f"PYTHONPATH=$PWD:$PYTHONPATH {shlex.quote(sys.executable)}")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_letters_that_a_terminal_lacks_are_shown_by_number(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert finish("program", lambda: print("½ of \udcff")) == 0
    assert terminal.buffer.getvalue() == b"\\xbd of \\udcff\n"


def test_control_c_waits_for_an_import_and_none_comes_before_a_command_begins(tmp_path, monkeypatch, capsys):
    (tmp_path / "interrupted.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    assert finish("program", lambda: command_line.imported("interrupted")) == INTERRUPTED
    signal.signal(signal.SIGINT, ours)
    assert sys.modules.pop("interrupted").whole
    program = "import sys, sage_lab.__main__, sage_course.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_what_a_command_makes_can_be_used_under_any_umask(tmp_path):
    mask = os.umask(0o777)
    finish("program", lambda: write_file(tmp_path / "new" / "x", "½"))
    os.umask(mask)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "new", tmp_path / "new" / "x")] == [0o700, 0o600]


def test_how_a_command_ends(capsys):
    def ends_with(error):
        def run():
            raise error

        return finish("program", run), capsys.readouterr().err.removeprefix("program: ")

    assert finish("program", lambda: None) == 0
    assert finish("program", lambda: 3) == 3
    assert ends_with(KeyboardInterrupt()) == (INTERRUPTED, "interrupted\n")
    assert ends_with(OSError(28, "No space left", "file")) == (BAD_INPUT, "file: No space left\n")
    assert ends_with(ValueError("n: expected 1, got 2")) == (BAD_INPUT, "n: expected 1, got 2\n")
    assert ends_with(Failed("two\nlines")) == (FAILED, "two\nlines\n")
    assert ends_with(RuntimeError("CUDA out of memory.\n Tried")) == (FAILED, "CUDA out of memory.\n")
    assert ends_with(MemoryError()) == (FAILED, "out of memory\n")
    assert ends_with(OverflowError("int too big to convert")) == (FAILED, "int too big to convert\n")
    assert ends_with(RuntimeError("Storage size overflowed")) == (FAILED, "Storage size overflowed\n")
    for bug in (ValueError("math domain error"), RuntimeError("shape"), KeyError("n"), ZeroDivisionError()):
        with pytest.raises(type(bug)):
            ends_with(bug)


def test_info_says_what_this_machine_runs(tmp_path):
    main(["info", "--json", str(tmp_path / "info.json")])
    facts = json.loads((tmp_path / "info.json").read_text())
    assert facts["torch"] == torch.__version__
    assert re.match("triton|reference, because ", facts["backend chosen by auto"])


def wait_until(happens, seconds=60):
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


LONG = [*TRAIN, "--tokens", str(32 * 10**6), "--reports", "100000"]


def long_run(folder):
    """Train for hours in a process of its own, which Ctrl-C reaches as if it were typed."""
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Path("errors").open("w", encoding="utf-8") as file, contextlib.redirect_stderr(file):
        main(LONG)


def parent_of_a_long_run(folder):
    os.environ[command_line.PARENT] = str(os.getpid())
    if os.fork() == 0:
        long_run(folder)
    os.wait()


def parent_of_a_pool(folder):
    with command_line.process_pool(1, mp_context=get_context("fork")) as pool:
        (folder / "worker").write_text(str(pool.submit(os.getpid).result()))
        time.sleep(600)


def test_control_c_ends_without_a_traceback_and_loses_nothing(text, capsys):
    """Meanwhile no other process gets the same checkpoint; afterwards it goes on."""
    run = CONTEXT.Process(target=long_run, args=(text,))
    run.start()
    wait_until((text / RUN).exists)
    line = f"{PROGRAM} pretrain: path: expected a file that no other process is writing, got {RUN}"
    assert status_of(LONG, capsys) == (BAD_INPUT, line)
    os.kill(run.pid, signal.SIGINT)
    run.join(60)
    assert run.exitcode == INTERRUPTED
    errors = (text / "errors").read_text()
    assert errors.splitlines()[-1] == f"{PROGRAM} pretrain: interrupted"
    assert "Traceback" not in errors
    assert torch.load(text / RUN, weights_only=True)["step"] > 0
    assert sorted(path.name for path in text.iterdir()) == ["errors", "runs", "text.txt"]
    assert list((text / "runs").iterdir()) == [text / RUN]


def test_a_full_disk_is_named_and_the_last_checkpoint_stays(text, capsys):
    main(TRAIN)
    before = contents(text)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        found = status_of([*TRAIN, "--folder", "new"], capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found == (BAD_INPUT, f"{PROGRAM} pretrain: new/{RUN.name}: File too large")
    assert contents(text) == before


def test_a_run_ends_with_the_process_that_started_it(text):
    """As those of `pretrain` do, also when that is killed."""
    run = CONTEXT.Process(target=parent_of_a_long_run, args=(text,))
    run.start()
    wait_until((text / RUN).exists)
    run.kill()

    def is_free():
        with contextlib.suppress(ValueError), only_writer(text / RUN):
            return True

    wait_until(is_free)


def test_the_processes_of_a_pool_end_with_the_one_that_started_it(tmp_path):
    run = CONTEXT.Process(target=parent_of_a_pool, args=(tmp_path,))
    run.start()
    wait_until(lambda: (tmp_path / "worker").exists() and (tmp_path / "worker").read_text())
    run.kill()
    worker = Path("/proc", (tmp_path / "worker").read_text(), "cmdline")
    wait_until(lambda: not (worker.exists() and worker.read_bytes()))  # it is gone, or a zombie


def recorded_commands():
    """Every record's command, but for archived ones, with today's names of programs and options."""
    names = {"sage_ref.training.quantization_aware": "sage_lab quantization-aware", "sage_ref": "sage_lab"}
    for path in sorted(RECORDED.glob("*.json")):
        provenance = read_record(path).provenance
        if "archived" in provenance:
            continue
        program, *arguments = shlex.split(provenance["command"].rpartition(" -m ")[2])
        renamed = {"--record": "--json", "cuda": "cpu"}  # the device of this machine
        yield path.stem, [*names.get(program, "sage_lab").split()[1:], *(renamed.get(x, x) for x in arguments)]


@pytest.mark.parametrize(("name", "arguments"), list(recorded_commands()), ids=lambda x: str(x)[:30])
def test_the_command_of_every_record_is_accepted(name, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for argument in arguments:
        if "." in argument:  # the files that it reads are there
            (tmp_path / argument).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / argument).touch()
    assert callable(read_options(arguments))


# Any options at all


class Started(Exception):
    """A command has checked its arguments and begins to work."""


WORK = {  # a command line that works: the function of sage_lab.experiments that then begins
    "info": None,
    "table1 --n 16": "table1.table1_rows",
    "table2": "table2.attention_errors",
    "repair": "repair.case_rows",
    "full-batch --plan cpu --corpus text.txt --device cpu": "full_batch.train",
    " ".join(TRAIN): "pretrain.train",
    "pretrain-speed": "pretrain_speed.speed_rows",
    NOISE: "gradient_noise.gradient_noise",
    "capture run.pt --corpus text.txt --layers 1": "capture.attention_tensors",
    "train-router": "router_fit.samples",
    "video speed": "video.command.length_rows",
}
ODD = [  # kinds, each as likely as the others
    ["", " ", "a\0b", "½", "abc", "true", "None", "block", "exact", "128x64", "0x0", "axb", "1x1x1"],
    ["x" * 5000, "9" * 30, str(2**62), "1e400", "1e-400"],
    ["nan", "inf", "-inf"],
    ["-1", "0", "1", "2", "3.5", "50", "0.5", "0x10", "1_0"],
    ["cpu", "cuda:7", "meta", "/dev/null", "no/x", ".", "pipe"],
    ["text.txt", "run.pt", "junk", "empty", "odd.bin", "cut.pt", "other.pt"],
]


def random_line(generator):
    """A command line with one or two odd options, some with too few or too many values."""
    line = generator.choice(list(WORK)).split()
    options, parser = [], Parser()
    getattr(importlib.import_module(f"sage_lab.{COMMANDS[line[0]][0]}"), "add_options", lambda parser: None)(parser)
    names = {action.option_strings[-1] for action in parser._actions if action.option_strings} | {"--json"}
    names = sorted(names - {"--compile", "--help"})
    for name in generator.sample(names, k=min(len(names), generator.choice((1, 1, 2)))):
        kinds = generator.choices(ODD, k=generator.choice((0, 1, 1, 1, 1, 2)))
        options += [name, *map(generator.choice, kinds)]
    return [*line, *options]


def test_no_command_line_ends_in_a_traceback(spoilt, capsys, monkeypatch):
    """SAGE_REF_FUZZ=5000 tries so many; each ends by itself, begins to work, or says in one line why not."""

    def begin(*arguments, **options):
        raise Started

    for work in filter(None, WORK.values()):
        monkeypatch.setattr(f"sage_lab.experiments.{work}", begin)
    generator, ends = random.Random(0), {}
    for _ in range(int(os.environ.get("SAGE_REF_FUZZ", "250"))):
        line = random_line(generator)
        try:
            status, last = status_of(line, capsys)
        except Started:
            status, last = "started", ""
        except Exception as error:
            pytest.fail(f"{line}: {error!r}")
        is_said = status in (BAD_INPUT, FAILED) and last.startswith(PROGRAM)  # FAILED: out of memory
        assert status in (0, "started") or is_said, (line, last)
        ends[status] = ends.get(status, 0) + 1
    assert min(ends[BAD_INPUT], ends["started"]) > 8, ends
