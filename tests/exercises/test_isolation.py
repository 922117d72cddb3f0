"""What a submission may hold, hide and leave behind, as root: inside bubblewrap's walls and without them."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exercises import confinement, grading, isolation, leftovers
from exercises.grading import Grader, close
from exercises.isolation import Limits, Sandbox

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can run a submission as another user")
SEEDS = (grading.VISIBLE_SEED, "hidden")
MIB = 2**20
LIMITS = Limits(call_seconds=8, cpu_seconds=5, memory=200 * MIB, disk=20 * MIB, files=1500)
HONEST = "def double(x): return 2 * x\n"
IMPORTS = """
import ctypes, glob, itertools, mmap, os, signal, socket, stat, subprocess, sys, threading, time, torch
libc = ctypes.CDLL(None, use_errno=True)
"""

grader = Grader("00_walled", {"double": Tensor})
grader.hint("values", "HINT values")


@grader.test("twice its argument")
def twice(student, draw):
    x = draw.normal(3, 4)
    close(student.double(x), 2 * x, "values", relative_l2=1e-6)


class WithoutWalls(Sandbox):
    """bubblewrap is hidden whenever the server starts."""

    def _open_server(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(confinement.shutil, "which", lambda name: None)
            super()._open_server()


@pytest.fixture(scope="module")
def without_walls(sandbox):
    """A sandbox without bubblewrap; where it isn't installed, the one that all tests share."""
    if sandbox.open_because:
        yield sandbox
        return
    with WithoutWalls() as started:
        yield started


@pytest.fixture(params=["shared", "without walls"])
def place(request, sandbox, without_walls, monkeypatch):
    """The sandbox of all tests, which has walls if bubblewrap is installed, and one that never has."""
    found = sandbox if request.param == "shared" else without_walls
    if request.param == "shared" and sandbox is without_walls:
        pytest.skip("there is no bubblewrap here: only the way without walls is tested")
    monkeypatch.setattr(found, "limits", LIMITS)
    return found


def grade(place, source):
    start = time.monotonic()
    result = grading.grade(grader, source.encode(), SEEDS, place)
    assert not result.broken, result.error
    assert time.monotonic() - start < 20
    return result


def traces(uid, place):
    """What is left of a submission's user, seen from outside of all walls."""
    found = [f"process {process}" for process in leftovers.processes_of(uid)]
    found += [f"{kind} {row}" for kind in ("shm", "sem", "msg") for row in leftovers._segments_of(uid, kind)]
    found += ["a file" for _ in leftovers.files_of(uid, leftovers.PLACES)]
    return found + [str(path) for path in place.folder.glob("child*")] + [str(x) for x in place.folder.glob("printed*")]


FREEZER = """
if os.fork() == 0:
    os.setsid()
    for _ in range(3):
        os.fork()
    while True:
        for process in range(os.getpid() - 40, os.getpid() + 40):
            try: process > 0 and os.kill(process, {signal})
            except OSError: pass
"""
NEXT = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        following = os.getpid() + 1
        while True: libc.kill(following, signal.SIGSTOP)
    os._exit(0)
os.wait()
"""
NESTED = """
for _ in range(1200):
    os.mkdir("d")
    os.chdir("d")
"""
ENDLESS = """
for i in range(60):
    os.mkdir("n" * 250)
    os.chdir("n" * 250)
    open("f" * 250, "w").close()
"""
KEPT = "MiB of memory in all its processes"
ANYTHING = ""  # the loop may reach the submission itself, before or after its answer: then it loses its own point
# name: (what it does at import, what the student reads of double(x), or None if it earns its point all the same)
HELD = {
    "a loop that stops all that starts": (FREEZER.format(signal="signal.SIGSTOP"), ANYTHING),
    "a loop that stops the next process": (NEXT, ANYTHING),
    "a loop that kills all that starts": (FREEZER.format(signal="signal.SIGKILL"), ANYTHING),
    "1,200 nested folders": (NESTED, None),
    "paths longer than the system's longest": (f"{ENDLESS}time.sleep(9)", "hid its files"),
    "a folder closed to itself": (
        "os.mkdir('a')\nopen('a/b', 'w').close()\nos.chmod('a', 0)\ntime.sleep(9)",
        "hid its",
    ),
    "links to what isn't its own": (
        "os.symlink('/etc', 'etc')\nos.symlink('/etc/passwd', 'p')\nos.symlink('.', 'loop')\nos.mkfifo('fifo')",
        None,
    ),
    "its own file replaced by a folder of links": (
        "os.unlink('exercise.py')\nos.mkdir('exercise.py')\nos.symlink('/', 'exercise.py/root')",
        None,
    ),
    "memory of many processes": (
        "for _ in range(8):\n    if os.fork() == 0: break\nkeep = b'x' * (60 << 20)\ntime.sleep(9)",
        KEPT,
    ),
    "memory of many threads": ("keep = [b'x' * (60 << 20) for _ in range(8)]", "MemoryError"),
    "files in memory": (
        """keep = []
for i in range(40):
    keep.append(os.memfd_create('m'))
    os.write(keep[-1], b'x' * (8 << 20))
time.sleep(9)""",
        KEPT,
    ),
    "files in memory that are only mapped": (
        """keep = []
for i in range(8):
    if os.fork() == 0:
        for j in range(8):
            f = os.memfd_create('m')
            os.write(f, b'x' * (8 << 20))
            keep.append(mmap.mmap(f, 8 << 20))
            os.close(f)
        time.sleep(9)
time.sleep(9)""",
        KEPT,
    ),
    "files without a name": (
        """keep = []
for i in range(40):
    keep.append(open('f', 'wb', buffering=0))
    os.unlink('f')
    keep[-1].write(b'x' * (8 << 20))
time.sleep(9)""",
        ("No space left", KEPT),
    ),
    "shared segments that nobody holds": (
        """for i in range(30):
    s = libc.shmget(0, ctypes.c_size_t(16 << 20), 0o1600)
    libc.shmat.restype = ctypes.c_void_p
    a = libc.shmat(s, None, 0)
    ctypes.memset(ctypes.c_void_p(a), 1, 16 << 20)
    libc.shmdt(ctypes.c_void_p(a))
time.sleep(9)""",
        KEPT,
    ),
    "a shared segment, a semaphore and a queue left behind": (
        "print(libc.shmget(0, ctypes.c_size_t(4096), 0o1666), libc.semget(0, 1, 0o1666), libc.msgget(0, 0o1666))",
        None,
    ),
    "thousands of queues": ("for i in range(999): libc.msgget(0, 0o1666)\ntime.sleep(9)", "System V objects"),
    "a named queue": ("assert libc.mq_open(b'/q', os.O_CREAT | os.O_RDWR, 0o600, None) < 0", None),
    "a file in shared memory": ("open('/dev/shm/left', 'wb').write(b'x' * 1000)", None),
    "files where everybody may write": (
        """for place in ('/tmp', '/var/tmp'):
    try: os.makedirs(place + '/left/behind')
    except OSError: pass""",
        None,
    ),
    "a full disk": (
        """i = 0
while True:
    for place in ('/tmp', '.'):
        try: open(f'{place}/full{i}', 'wb').write(b'x' * (1 << 20))
        except OSError: time.sleep(0.01)
    i += 1""",
        ("MiB of files", "took longer"),
    ),
    "many small files": ("for i in range(1600): open(str(i), 'w').close()\ntime.sleep(9)", "made more than 1500 files"),
    "a process that hides": ("libc.prctl(4, 0, 0, 0, 0)\ntime.sleep(9)", "hid a process from the grader"),
    "a namespace of its own": (
        "assert libc.unshare(0x10000000) == 0\ntime.sleep(9)",
        ("made a namespace of its own", "AssertionError"),
    ),
    "a higher rank": (
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
        "PermissionError",
    ),
    "zombies": ("for _ in range(99):\n    try: os.fork() or os._exit(0)\n    except OSError: break", None),
    "a shell that goes on": (
        "subprocess.Popen(['setsid', 'sh', '-c', 'sleep 60 & exec sleep 60'], stdout=subprocess.DEVNULL)",
        None,
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_what_it_holds_is_bounded_and_gone_afterwards(place, name):
    body, feedback = HELD[name]
    result = grade(place, f"{IMPORTS}{body}\n{HONEST}")
    if feedback is None:
        assert result.score == 1, result.tests
    else:
        expected = feedback if isinstance(feedback, tuple) else (feedback,)
        assert any(text in result.tests[0].feedback for text in expected), result.tests[0].feedback
    assert traces(place.users.uid, place) == []


def test_an_honest_submission_gets_its_point_after_all_that(place):
    assert grade(place, HONEST).score == 1
    assert grade(place, "def double(x): return x").score == 0


def test_a_server_that_was_killed_takes_its_submission_along(place):
    """The watcher outlives the server and ends what the server can't end any more."""
    left = "libc.shmget(0, ctypes.c_size_t(4096), 0o1666)\nopen('/dev/shm/left', 'w').close()"
    child = place.start(f"{IMPORTS}{left}\ndef double(x): return os.fork() and x\n".encode())
    child.call("double", (torch.ones(1),))
    uid = place.users.uid
    assert len(leftovers.processes_of(uid)) >= 2
    place.server.kill()
    end = time.monotonic() + 5
    while leftovers.processes_of(uid) and time.monotonic() < end:
        time.sleep(0.05)
    assert leftovers.processes_of(uid) == []
    child.close()
    assert traces(uid, place) == []
    assert grade(place, HONEST).score == 1


def test_child_that_does_not_start_leaves_nothing(place, monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(place, "limits", LIMITS._replace(cpu_seconds="many"))
    with pytest.raises(isolation.SandboxError, match="TypeError"):
        place.start(HONEST.encode())
    assert traces(place.users.uid, place) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_two_gradings_have_users_of_their_own(sandbox, without_walls):
    """Each may neither look into the other's files nor end its processes."""
    if sandbox is without_walls:
        pytest.skip("there is only one sandbox here: test_users_are_lent_once is what remains")
    victim = sandbox.start(b"import os\ndef f(): return os.getcwd()")
    intruder = without_walls.start(
        f"""{IMPORTS}
def double(folder):
    found = glob.glob('/tmp/grading-*/*')
    try: found.append(open(folder + '/exercise.py').read())
    except OSError: pass
    if os.fork() == 0:
        os.kill(-1, signal.SIGKILL)
    return found
""".encode()
    )
    assert not set(sandbox.users[:2]) & set(without_walls.users[:2])
    assert intruder.call("double", (victim.call("f"),)) == ()
    intruder.close()
    victim.call("f")  # it lives
    victim.close()


def test_scratch_is_closed_to_other_users(without_walls):
    child = without_walls.start(b"import os\ndef f(): return os.getcwd()")
    scratch = Path(child.call("f"))
    for path, mode in ((scratch, 0o700), (scratch / "exercise.py", 0o600)):
        assert path.stat().st_mode & 0o777 == mode
        assert path.stat().st_uid == without_walls.users.uid
    child.close()
    assert not scratch.exists()


def test_users_are_lent_once(monkeypatch, tmp_path):
    lent = [confinement.lend_users() for _ in range(3)]
    assert len({user for users in lent for user in users[:2]}) == 6
    os.close(lent[1].lock)
    again = confinement.lend_users()
    assert again[:2] == lent[1][:2]
    # Nor is a user lent who has a process.
    os.close(again.lock)
    process = subprocess.Popen(["sleep", "20"], user=again.uid)
    other = confinement.lend_users()
    assert other.uid != again.uid
    process.kill()
    process.wait()
    for users in (lent[0], lent[2], other):
        os.close(users.lock)
    monkeypatch.setattr(confinement, "UIDS", range(61184, 61184))
    with pytest.raises(OSError, match="expected a free user"):
        confinement.lend_users()


def test_locks_of_a_foreign_folder_are_not_trusted(monkeypatch, tmp_path):
    """Another user could free a lock that it owns."""
    monkeypatch.setattr(confinement, "Path", lambda *parts: tmp_path / "exercises-users")
    (tmp_path / "exercises-users").mkdir(mode=0o777)
    os.chown(tmp_path / "exercises-users", 61183, 61183)
    with pytest.raises(OSError, match="that root can make"):
        confinement.lend_users()


def test_helper_that_hangs_is_ended():
    start = time.monotonic()
    assert not leftovers.as_user(61180, 61181, lambda: time.sleep(60), seconds=0.1)
    assert time.monotonic() - start < 5
    assert leftovers.as_user(61180, 61181, lambda: None)


def test_helper_can_not_be_stopped_by_the_submissions_user():
    """It has that user's rights to signal, but can't be signalled by it."""
    uid, spare = 61180, 61181
    reader, writer = os.pipe()

    def work():
        helper = os.getpid()
        if os.fork() == 0:
            os.setresuid(uid, uid, uid)
            try:
                os.kill(helper, signal.SIGSTOP)
            except PermissionError:
                os.write(writer, b"not permitted")
            os._exit(0)
        os.wait()

    assert leftovers.as_user(uid, spare, work)
    assert os.read(reader, 100) == b"not permitted"
    for descriptor in (reader, writer):
        os.close(descriptor)


@pytest.fixture
def open_folder():
    """A folder that every user may enter; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve()
        path.chmod(0o755)
        if closed := confinement.closed_to_others(path):
            pytest.skip(f"others may not enter {closed}, the folder for temporary files")
        yield path


def test_masters_that_can_be_read_are_named(without_walls, sandbox, open_folder, monkeypatch):
    master = open_folder / "exercises" / "01_block_quantizer" / "master.py"
    master.parent.mkdir(parents=True)
    master.write_text("")
    for path in (master, *master.parents):
        if path.is_relative_to(open_folder):
            path.chmod(path.stat().st_mode | 0o555)  # whatever the umask is
    monkeypatch.setattr(isolation, "WORKER", open_folder / "exercises" / "worker.py")
    assert f"submissions can read {master}" in without_walls.note
    assert "without namespaces of their own" in without_walls.note
    if sandbox is not without_walls:
        assert sandbox.note is None  # it isn't there for them
    master.chmod(0o600)
    assert "submissions can read" not in without_walls.note


def test_walls(sandbox, without_walls):
    """Behind them there are no other processes, no network, no files of others and nothing to write on."""
    if sandbox is without_walls:
        pytest.skip("there is no bubblewrap here")
    source = f"""{IMPORTS}
def double(repository):
    writable, folders = [], ['/']
    while folders:
        path = folders.pop()
        if not os.access(path, os.R_OK) or path in ('/proc', '/usr', '/etc', sys.prefix, sys.base_prefix): continue
        if os.access(path, os.W_OK): writable.append(path)
        folders += [entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    processes = [p for p in os.listdir('/proc') if p.isdigit()]
    return writable, len(processes), [n for _, n in socket.if_nameindex()], os.getcwd(), os.listdir(repository)
"""
    child = sandbox.start(source.encode())
    writable, processes, networks, scratch, repository = child.call("double", (str(isolation.WORKER.parents[1]),))
    child.close()
    assert writable == ("/dev/shm",)  # and its own folder, above which nothing can be listed
    assert scratch.startswith(str(sandbox.folder))
    assert processes <= 4  # the server, the watcher, itself
    assert networks == ("lo",)
    pythons = isolation.WORKER.parents[1] / ".venv"  # `make`'s, if that is the Python that runs here
    assert set(repository) == {"exercises"} | ({".venv"} if Path(sys.prefix) == pythons else set())


def test_bubblewrap_that_does_not_work_is_done_without(sandbox, monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(confinement.shutil, "which", lambda name: str(fake))

    def serve(self, walls):  # without the seconds that torch takes
        if walls:
            (self.folder / "server").write_text(subprocess.run(walls, capture_output=True, text=True).stderr)
        return not walls

    monkeypatch.setattr(Sandbox, "_serve", serve)
    with Sandbox() as other:
        assert "No permissions to create a new namespace" in other.note


def test_tree_of_any_depth_is_removed():
    top = Path(tempfile.mkdtemp(dir="/dev/shm"))  # a disk would take seconds
    remove_deep_tree(top)
    os.rmdir(top)


def remove_deep_tree(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.symlink(outside, "link", dir_fd=below)
        os.symlink(outside / "kept", "file", dir_fd=below)
        os.mkdir("0", dir_fd=below)  # a name that removing uses too
        os.close(here)
        here = below
    os.close(here)
    leftovers.remove_tree(top)
    assert not top.exists()
    assert (outside / "kept").read_text() == "kept"
    leftovers.remove_tree(tmp_path / "missing")
    leftovers.remove_tree(outside)
