"""The walls around the server of submissions, for root on Linux: users of its own and bubblewrap's namespaces.

Inside bubblewrap there are the system's folders, this Python and a small scratch folder. Masters, seeds, other
submissions, the network and everybody else's processes are not there, and what is left behind ends with the server.
"""

import contextlib
import fcntl
import os
import pwd
import shutil
import stat
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

from exercises import leftovers

UIDS = range(61184, 65520, 2)  # users that exist only while something runs (systemd's DynamicUser), in pairs
SYSTEM = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# The server becomes a submission's user, ends its processes and removes its files.
CAPABILITIES = ("SETUID", "SETGID", "KILL", "CHOWN", "DAC_OVERRIDE", "FOWNER", "SYS_NICE")


class Users(NamedTuple):
    """Two users that nobody else has while `lock` is open: the submission's, and one for those that watch it."""

    uid: int
    spare: int
    lock: int


def lend_users() -> Users:
    """Users without a name, a process or another borrower. Close `lock` to give them back."""
    folder = _folder_of_locks()
    for uid in UIDS:
        lock = os.open(folder / str(uid), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        if any(_has_name(user) or leftovers.processes_of(user) for user in (uid, uid + 1)):
            os.close(lock)
            continue
        return Users(uid, uid + 1, lock)
    raise OSError(f"{folder}: expected a free user, all {len(UIDS)} pairs are in use")


def _folder_of_locks():
    """A folder of root's, the same for all gradings of this machine."""
    for parent in ("/run", tempfile.gettempdir()):
        folder = Path(parent, "exercises-users")
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            facts = folder.lstat()
            if stat.S_ISDIR(facts.st_mode) and facts.st_uid == 0 and not facts.st_mode & 0o077:
                return folder
    raise OSError("/run/exercises-users: expected a folder that root can make and nobody else can read")


def _has_name(uid):
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def visible_folders() -> list[str]:
    """What a submission sees inside bubblewrap: the system's folders and this Python."""
    python = [sys.prefix, sys.base_prefix, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))]
    python.append(os.path.dirname(os.path.realpath(sys.executable)))
    found = [path for path in SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    for path in sorted(set(python), key=len):
        if os.path.isdir(path) and path != "/" and not any(Path(path).is_relative_to(above) for above in found):
            found.append(path)
    return found


def bubblewrap(folder: Path, disk: int, files: list[Path]) -> list[str] | None:
    """The command that runs another one inside walls; None if bubblewrap isn't installed.

    folder: becomes an empty one there of at most `disk` bytes, in which users may only pass. files: shown there too.
    """
    program = shutil.which("bwrap")
    if program is None:
        return None
    command = [program, "--unshare-ipc", "--unshare-net", "--unshare-pid", "--as-pid-1", "--die-with-parent"]
    command += ["--cap-drop", "ALL"]
    for capability in CAPABILITIES:
        command += ["--cap-add", f"CAP_{capability}"]
    command += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(disk), "--tmpfs", "/dev/shm"]
    for path in SYSTEM:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
    shown = visible_folders()
    # bubblewrap would close the folders above to all but root.
    for path in sorted({above for x in (*shown, folder, *files) for above in Path(x).parents} - {Path("/")}):
        command += ["--perms", "0755", "--dir", str(path)]
    for path in shown:
        command += ["--ro-bind", path, path]
    command += ["--perms", "0711", "--size", str(disk), "--tmpfs", str(folder)]
    for path in map(str, files):
        command += ["--ro-bind", path, path]
    return [*command, "--remount-ro", "/", "--chdir", "/"]


def readable(paths: list[Path], inside: bool) -> Path | None:
    """The first of these files that the user of a submission could read. inside: bubblewrap's walls stand."""
    folders = visible_folders()
    for path in (path.resolve() for path in paths if path.exists()):
        seen = not inside or any(path.is_relative_to(folder) for folder in folders)
        if seen and path.stat().st_mode & stat.S_IROTH and closed_to_others(path) is None:
            return path
    return None


def closed_to_others(path: Path) -> Path | None:
    """The first folder above a file that other users may not enter, or None."""
    return next((x for x in reversed(path.parents) if not x.stat().st_mode & stat.S_IXOTH), None)
