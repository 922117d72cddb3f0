"""What a submission holds and leaves behind: its processes, memory, files and System V segments.

The server loads this file by its path, so it imports nothing of the package. Nothing here raises: cleaning up after one
submission must not cost anybody a score.
"""

import contextlib
import ctypes
import itertools
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run/lock")  # where every user may write
HELPER_SECONDS = 5.0
WATCH_SECONDS = 0.05  # from one look at a submission to the next
HIDDEN_SECONDS = 0.5  # a process that ends or starts can't be looked into for a moment
OBJECTS = 64  # System V segments, queues and semaphores
IPC_RMID = 0


def remove_tree(folder: Path) -> None:
    """Remove a folder of any depth and any length of names, and follow no link in it.

    Each folder inside is first moved to the top, so that neither recursion nor the length of a path can stop it.
    """
    numbers = itertools.count()
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)
    while True:
        moved = False
        for entry in _entries(folder):
            if not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
                continue
            with contextlib.suppress(OSError):
                os.chmod(entry.path, 0o700)
            for inner in _entries(entry.path):
                with contextlib.suppress(OSError):
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)  # to move a folder is to write in it
                        os.rename(inner.path, _unused(folder, numbers))
                        moved = True
                    else:
                        os.unlink(inner.path)
            with contextlib.suppress(OSError):
                os.rmdir(entry.path)
        if not moved:
            break
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _entries(folder):
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _unused(folder, numbers):
    while os.path.lexists(path := f"{folder}/{next(numbers)}"):
        pass
    return path


def remove_files_of(uid: int) -> None:
    """What a user left where everybody may write."""
    for place in PLACES:
        for entry in _entries(place):
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid != uid:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    remove_tree(Path(entry.path))
                else:
                    os.unlink(entry.path)


def as_user(uid: int, spare: int, work: Callable[[], None], seconds: float = HELPER_SECONDS) -> bool:
    """Do `work` in a process with the rights of a submission's user; False if it took too long and was ended.

    Only its effective user is the submission's. Who may signal a process is a matter of its real and saved user, and
    those are `spare`, which is nobody else's: a submission can't stop the process that ends it.
    """
    helper = os.fork()
    if helper == 0:
        try:
            _become(uid, spare)
            work()
        finally:
            os._exit(0)
    deadline = time.monotonic() + seconds
    while os.waitpid(helper, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(helper, signal.SIGKILL)
            os.waitpid(helper, 0)
            return False
        time.sleep(0.001)
    return True


def _become(uid, spare):
    os.setgroups([])
    os.setresgid(spare, uid, spare)
    os.setresuid(spare, uid, spare)


def kill_all() -> None:
    """One kill(-1) as the submission's own user: unlike a loop over processes, no fork can run away from it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def clean_up(uid: int, spare: int) -> None:
    """Remove what a user without processes left: segments as that user, which needs no right, and files as root."""
    as_user(uid, spare, lambda: remove_segments_of(uid))
    remove_files_of(uid)


def _segments_of(uid, kind):
    """Rows of /proc/sysvipc/KIND that belong to a user, as dicts of numbers."""
    try:
        names, *rows = Path("/proc/sysvipc", kind).read_text().splitlines()
    except (OSError, ValueError):
        return []
    found = [dict(zip(names.split(), map(int, row.split()), strict=False)) for row in rows]
    return [row for row in found if uid in (row["uid"], row["cuid"])]


def remove_segments_of(uid: int) -> None:
    """System V segments, semaphores and queues; their user may remove them, and root if it has all of its rights."""
    library = ctypes.CDLL(None)
    for row in _segments_of(uid, "shm"):
        library.shmctl(row["shmid"], IPC_RMID, None)
    for row in _segments_of(uid, "sem"):
        library.semctl(row["semid"], 0, IPC_RMID)
    for row in _segments_of(uid, "msg"):
        library.msgctl(row["msqid"], IPC_RMID, None)


def watch(uid: int, spare: int, limits: dict, scratch: str, report: int) -> None:
    """Look at all that a user has until it is too much: say what on `report`, kill all its processes and end.

    Runs as a child of the server and ends with it. No limit of the kernel holds for all processes of a user together.
    """
    server, size = os.getppid(), _sizes("self")["VmSize"]
    with contextlib.suppress(OSError):
        os.nice(-10)  # or its busy processes would delay each look
    _become(uid, spare)
    hidden = {}
    while True:
        start = time.monotonic()
        try:
            problem = _excess(uid, limits, (scratch, *PLACES), size, hidden)
        except OSError:
            problem = "hid its files from the grader"  # a folder that it closed to itself, or a path without end
        if problem:
            os.write(report, problem.encode())
        if problem or os.getppid() != server:
            kill_all()
            return
        time.sleep(max(WATCH_SECONDS, 5 * (time.monotonic() - start)))


def _excess(uid, limits, places, size, hidden):
    """What a user has too much of, in words that a student can be shown; None if nothing.

    size: bytes of address space that each process starts with. hidden: since when a process can't be looked into.
    """
    processes = [process for process in processes_of(uid) if process != os.getpid()]
    kept = {}  # bytes of files without a name, by device and inode
    for process in processes:
        try:
            if os.readlink(f"/proc/{process}/ns/user") != os.readlink("/proc/self/ns/user"):
                return "made a namespace of its own"  # in which it could mount memory that nobody counts
            kept |= _unnamed_files(process)
            hidden.pop(process, None)
        except FileNotFoundError:
            continue
        except PermissionError:
            if time.monotonic() - hidden.setdefault(process, time.monotonic()) > HIDDEN_SECONDS and _lives(process):
                return "hid a process from the grader"
    segments = {kind: _segments_of(uid, kind) for kind in ("shm", "sem", "msg")}
    if sum(map(len, segments.values())) > OBJECTS:
        return f"used more than {OBJECTS} System V objects"
    shared = sum(row["rss"] + row["swap"] for row in segments["shm"]) + sum(row["cbytes"] for row in segments["msg"])
    # What is mapped bounds what is used, at no cost; what is used is counted only if that is too much.
    mapped = sum(max(0, _sizes(process).get("VmSize", 0) - size) for process in processes)
    if mapped + shared + sum(kept.values()) > limits["memory"]:
        used = sum(_used(process, kept) for process in processes)
        if used + shared + sum(kept.values()) > limits["memory"]:
            return f"used more than {limits['memory'] / 2**20:.0f} MiB of memory in all its processes"
    count, stored = 0, 0
    for found in files_of(uid, places):
        count, stored = count + 1, stored + 512 * found.st_blocks
        if count > limits["files"]:
            return f"made more than {limits['files']} files"
        if stored > limits["disk"]:
            return f"wrote more than {limits['disk'] / 2**20:.0f} MiB of files"
    return None


def processes_of(uid: int) -> list[int]:
    """Processes whose effective user this is."""
    found = []
    for entry in _entries("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                found.append(int(entry.name))
    return found


def files_of(uid: int, places: tuple[str, ...]) -> Iterator[os.stat_result]:
    """Files of a user in places, down through its own folders."""
    folders = list(places)
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        if found.st_uid == uid:
                            yield found
                            if stat.S_ISDIR(found.st_mode):
                                folders.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            if os.stat(folder).st_uid == uid:  # closed by its owner
                raise


def _lives(process):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _sizes(process):
    """Bytes by name of /proc/PROCESS/status."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        fields = [line.split() for line in lines if line.endswith(" kB")]
        return {name.rstrip(":"): 1024 * int(number) for name, number, _ in fields}
    return {}


def _unnamed_files(process):
    """Bytes of the files without a name that a process holds open, memory files among them."""
    found = {}
    for descriptor in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(FileNotFoundError):
            facts = os.stat(f"/proc/{process}/fd/{descriptor}")
            if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 0:
                found[facts.st_dev, facts.st_ino] = 512 * facts.st_blocks
    return found


def _used(process, kept):
    """Bytes of a process's own memory, pages of several in parts; adds the shared memory that it maps to `kept`."""
    own = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                own = 1024 * int(line.split()[1])
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            addresses, rights, _, device, inode, *name = line.split(maxsplit=5)
            if rights.endswith("s") and name and name[0].endswith("(deleted)") and not name[0].startswith("/SYSV"):
                start, end = (int(x, 16) for x in addresses.split("-"))
                major, minor = (int(x, 16) for x in device.split(":"))
                key = os.makedev(major, minor), int(inode)
                kept[key] = max(kept.get(key, 0), end - start)
    return own
