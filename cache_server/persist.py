"""`--persist DIR`: the files that outlive a server on a clean stop, and the proof that they are the same afterwards.

DIR lies on a tmpfs: the files *are* the host memory, nothing is copied at the stop or at the start. Per segment
`segment-ID` and `generations-ID`, then `snapshot` with the names of what lies in them, and `lock`, held by the server
that runs. The snapshot exists between a clean stop and the next start only: it is written last, under another name,
and removed when it is read. So a server that was killed, or one that died after its start, leaves files without a
snapshot, and the next one removes them.

A file that was cut, punched or exchanged in between has another *stamp*; the generations have a checksum beside it.
Payloads have none: summing them up would take longer than the restart, and whoever may write into a segment could do
so at any other time too (docs/decisions/0010). A file's times say nothing: a client's first write through its mapping
changes them.

Such files cannot be sealed as memfds are (the kernel seals those only): a client that shrinks one ends the server by
SIGBUS. The generations are handed out through a descriptor that can only read.

Not here: what the snapshot says (`snapshot.py`), what becomes of it (`warm_restart.py`).
"""

import fcntl
import mmap
import os
import signal
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

from cache_server.segments import Segment, SegmentMemory, generations_bytes_for

_SNAPSHOT: Final = "snapshot"
_LOCK: Final = "lock"
_OURS: Final = ("segment-", "generations-", _SNAPSHOT)
_BLOCK_BYTES: Final = 512  # unit of st_blocks
_OVERHEAD: Final = 256  # generations take 1/1024 of the memory, the snapshot as much at 64 KiB per payload


class PersistError(Exception):
    """The folder or a file in it cannot be used; the message says why, on one line."""


class FolderInUseError(PersistError):
    """Another server has it."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which file it is, and how long."""

    device: int
    inode: int
    num_bytes: int


def boot_id() -> bytes:
    """16 bytes that change when the machine starts."""
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


class PersistFolder:
    """One folder, ours alone from `open` to the end of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1

    def open(self, memory_bytes: int) -> None:
        """Take it. PersistError when it is not on a tmpfs, too small for the budget, or another server's."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            kind = _filesystem_of(self.path)
            if kind != "tmpfs":
                raise PersistError(f"it is on {kind}; it must be on a tmpfs, for instance below /dev/shm")
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderInUseError(f"another server uses {self.path}") from None
            room = os.statvfs(self.path)
            needed = memory_bytes + memory_bytes // _OVERHEAD
            available = room.f_bavail * room.f_frsize + sum(
                file.stat().st_blocks * _BLOCK_BYTES for file in self._files()
            )
            # A tmpfs without a limit says that it has no blocks at all.
            if room.f_blocks and available < needed:
                raise PersistError(f"its tmpfs has room for {available} bytes, the memory needs {needed}")
        except OSError as error:
            raise PersistError(f"{error.strerror}: {error.filename}") from None
        # Asking who else has a file open takes a lease on it for a moment; who opens it then would have us killed.
        signal.signal(signal.SIGIO, signal.SIG_IGN)

    def close(self) -> None:
        """Let go of it. The files stay."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- segments -------------------------------------------------------------------------------------------

    def new_segment(self, segment_id: int, num_bytes: int) -> Segment:
        """Both files, empty."""
        sizes = (num_bytes, generations_bytes_for(num_bytes))
        for path, size in zip(self._paths(segment_id), sizes, strict=True):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, size)
            finally:
                os.close(fd)
        return self._map(segment_id, num_bytes)

    def open_segment(self, segment_id: int, num_bytes: int, stamps: tuple[Stamp, Stamp]) -> Segment:
        """The segment of an earlier server. PersistError: it is not what it was."""
        for path, stamp in zip(self._paths(segment_id), stamps, strict=True):
            try:
                status = path.stat(follow_symlinks=False)
            except OSError as error:
                raise PersistError(f"{path.name}: {error.strerror}") from None
            found = _stamp_of(status)
            if found != stamp:
                raise PersistError(f"{path.name} is another file: {astuple(found)} is not {astuple(stamp)}")
            if status.st_blocks * _BLOCK_BYTES < stamp.num_bytes:
                raise PersistError(f"{path.name} has {status.st_blocks * _BLOCK_BYTES} of {stamp.num_bytes} bytes")
        return self._map(segment_id, num_bytes)

    def drop_segment(self, segment: Segment) -> None:
        """It cannot be used; what it has of the memory is free again."""
        segment.close()
        for path in self._paths(segment.id):
            path.unlink(missing_ok=True)

    def stamps(self, segment_id: int) -> tuple[Stamp, Stamp]:
        """Of memory and generations, as they are now."""
        memory, generations = (_stamp_of(path.stat(follow_symlinks=False)) for path in self._paths(segment_id))
        return memory, generations

    def remove_all_but(self, segment_ids: set[int]) -> int:
        """Remove what belongs to no segment of these. Returns how many files that were."""
        kept = {path for segment_id in segment_ids for path in self._paths(segment_id)}
        removed = [file for file in self._files() if file not in kept]
        for file in removed:
            file.unlink()
        return len(removed)

    def _map(self, segment_id: int, num_bytes: int) -> Segment:
        memory_path, generations_path = self._paths(segment_id)
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(memory_path, os.O_RDWR | flags)
        try:
            data = mmap.mmap(fd, num_bytes)
            writing = os.open(generations_path, os.O_RDWR | flags)
            try:
                generations = mmap.mmap(writing, generations_bytes_for(num_bytes))
            finally:
                os.close(writing)
            reading = os.open(generations_path, os.O_RDONLY | flags)
        except BaseException:
            os.close(fd)
            raise
        return Segment(segment_id, num_bytes, SegmentMemory(fd, data, reading, generations))

    def _paths(self, segment_id: int) -> tuple[Path, Path]:
        return self.path / f"segment-{segment_id}", self.path / f"generations-{segment_id}"

    def _files(self) -> list[Path]:
        return [file for file in self.path.iterdir() if file.name.startswith(_OURS)]

    # --- snapshot -------------------------------------------------------------------------------------------

    def write_snapshot(self, snapshot: bytes) -> None:
        """The last act of a clean stop."""
        unfinished = self.path / f"{_SNAPSHOT}.unfinished"
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(snapshot)
        unfinished.rename(self.path / _SNAPSHOT)

    def take_snapshot(self) -> bytes | None:
        """The snapshot, which nobody can take again; None: there is none."""
        path = self.path / _SNAPSHOT
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            path.unlink()
            return file.read()


def is_open_elsewhere(segment: Segment) -> bool:
    """Somebody has it open or mapped who did not get it from this process: a client of an earlier server.

    The kernel grants a write lease only on a file that nobody else has open. What we hand out to our own clients are
    copies of our own descriptor and do not count. A kernel that knows no leases here leaves it in doubt: True.
    """
    try:
        fcntl.fcntl(segment.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    fcntl.fcntl(segment.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _stamp_of(status: os.stat_result) -> Stamp:
    return Stamp(status.st_dev, status.st_ino, status.st_size)


def _filesystem_of(path: Path) -> str:
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1]
    return "an unknown file system"
