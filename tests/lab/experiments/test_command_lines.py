"""Bad command lines, interrupted commands and spoilt files: one line that names it, a status, and nothing lost."""

import contextlib
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from process_cases import CONTEXT

pytest.importorskip("triton")
from sage_lab import command_line
from sage_lab.__main__ import COMMANDS, main
from sage_lab.command_line import BAD_INPUT, FAILED, INTERRUPTED, Failed, finish
from sage_lab.files import only_writer, write_file

PROGRAM = "python -m sage_lab"
TRAIN = (  # noqa: SIM905 (as it is typed)
    "pretrain --corpus text.txt --context 16 --layers 1 --width 16 --heads 2 --tokens 256"
    " --tokens-per-step 32 --tokens-per-pass 32 --validation-sequences 2 --device cpu --folder runs"
).split()
RUN = Path("runs", "small_exact_qk_normFalse_learning_rate0.002_tokens_per_step32_context16_tokens256_seed0.pt")
DEEP = " ".join([*TRAIN, "--layers 3 --heads 4"])


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


LINES = tomllib.loads(Path(__file__).with_name("bad_lines.toml").read_text(encoding="utf-8"))
BAD = {line.format(DEEP=DEEP): said.format(RUN=RUN) for line, said in LINES.items()}


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


@pytest.mark.no_gpu
@pytest.mark.parametrize(("line", "status"), [("bench", FAILED), ("accuracy", FAILED)])
def test_what_needs_a_gpu_says_so(capsys, line, status):
    found, last = status_of(line, capsys)
    assert found == status
    assert "CUDA device" in last


def test_every_command_has_a_help(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([*command.split(), "--help"])
        assert "--json FILE" in capsys.readouterr().out


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
    python = f"PYTHONPATH=$PWD${{PYTHONPATH:+:$PYTHONPATH}} {shlex.quote(sys.executable)}"
    command = ["bash", "-c", line.format(python=python)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_control_c_waits_for_an_import_and_none_comes_before_a_command_begins(tmp_path, monkeypatch):
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


def wait_until(happens, seconds=300):
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


LONG = [*TRAIN, "--tokens", str(32 * 10**6), "--reports", "100000"]
LONG_RUN = RUN.with_name(RUN.name.replace("tokens256", f"tokens{32 * 10**6}"))


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
    wait_until((text / LONG_RUN).exists)
    line = f"{PROGRAM} pretrain: path: expected a file that no other process is writing, got {LONG_RUN}"
    assert status_of(LONG, capsys) == (BAD_INPUT, line)
    os.kill(run.pid, signal.SIGINT)
    run.join(60)
    assert run.exitcode == INTERRUPTED
    errors = (text / "errors").read_text()
    assert errors.splitlines()[-1] == f"{PROGRAM} pretrain: interrupted"
    assert "Traceback" not in errors
    assert torch.load(text / LONG_RUN, weights_only=True)["step"] > 0
    assert sorted(path.name for path in text.iterdir()) == ["errors", "runs", "text.txt"]
    assert list((text / "runs").iterdir()) == [text / LONG_RUN]


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
    wait_until((text / LONG_RUN).exists)
    run.kill()

    def is_free():
        with contextlib.suppress(ValueError), only_writer(text / LONG_RUN):
            return True

    wait_until(is_free)


def test_the_processes_of_a_pool_end_with_the_one_that_started_it(tmp_path):
    run = CONTEXT.Process(target=parent_of_a_pool, args=(tmp_path,))
    run.start()
    wait_until(lambda: (tmp_path / "worker").exists() and (tmp_path / "worker").read_text())
    run.kill()
    worker = Path("/proc", (tmp_path / "worker").read_text(), "cmdline")
    wait_until(lambda: not (worker.exists() and worker.read_bytes()))  # it is gone, or a zombie
