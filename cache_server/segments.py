"""One segment: a piece of shared memory and the generations of what lies in it.

A segment is a memfd, sealed against resizing (a client that shrinks it would kill everybody else with SIGBUS), and
a second, small memfd with one u32 *generation* per 4 KiB granule. The server maps the second one writable first
and seals it against future writers then, so that a client can only map it read-only: nobody but the server
can claim that a slot did not change. With `--persist` both are files that outlive the server (`persist.py`).

Invariant: a segment is touched in full before anyone else hears of it. Whoever touches a page first is charged
for it, and the first write into untouched shared memory is 20 times slower than the second.

Touching runs in a thread and outside the interpreter lock: ctypes releases it, `mmap.madvise` does not (1.7 s for
512 MiB). Steps are small because the kernel holds the process's mmap lock for each, and whoever allocates a message
meanwhile waits for it: with steps of 64 MiB the event loop stood still for 50 to 250 ms, with 1 MiB for 13
(`benchmarks/loop.py`).

Not here: who uses the segment and how it is cut (`arena.py`); names; descriptors on sockets (`descriptors.py`).
"""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

GRANULE_BYTES = 4096  # slots start at multiples of it; one generation each
SMALLEST_SEGMENT_BYTES = 64 << 20
LARGEST_SEGMENT_BYTES = 1 << 30
_TOUCH_STEP_BYTES = 1 << 20

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_PUNCH_HOLE = 0x1 | 0x2  # FALLOC_FL_KEEP_SIZE, which the kernel wants beside it
_F_ADD_SEALS = 1033
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.fallocate.restype = ctypes.c_int


def segment_bytes_for(budget_bytes: int) -> int:
    """About a sixteenth of the budget, so that classes can share it; a power of two, so that cuts waste little."""
    sixteenth = 1 << (budget_bytes // 16).bit_length() - 1 if budget_bytes >= 16 else 0
    size = min(max(sixteenth, SMALLEST_SEGMENT_BYTES), LARGEST_SEGMENT_BYTES)
    assert size <= budget_bytes, f"segment of {size} bytes in a budget of {budget_bytes}"
    return size


def generations_bytes_for(num_bytes: int) -> int:
    """The size of the second file of a segment."""
    return num_bytes // GRANULE_BYTES * 4


class SegmentMemory(NamedTuple):
    """What a segment is made of. The descriptors are what clients get: theirs of the generations can only read."""

    fd: int
    data: mmap.mmap
    generations_fd: int
    generations: mmap.mmap


class Segment:
    """The memory of one segment. It lives as long as the server; only its cut changes."""

    __slots__ = ("data", "fd", "generations", "generations_fd", "id", "num_bytes", "num_granules")

    def __init__(self, segment_id: int, num_bytes: int, memory: SegmentMemory | None = None) -> None:
        """`memory`: of both parts; None: anonymous, made here."""
        assert num_bytes % GRANULE_BYTES == 0, f"segment of {num_bytes} bytes"
        self.id = segment_id
        self.num_bytes = num_bytes
        self.num_granules = num_bytes // GRANULE_BYTES
        self.fd, data, self.generations_fd, generations = memory or _anonymous(segment_id, num_bytes)
        self.data: npt.NDArray[np.uint8] = np.frombuffer(data, dtype=np.uint8)
        self.generations: npt.NDArray[np.uint32] = np.frombuffer(generations, dtype=np.uint32)

    def touch(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Make every page exist. Slow: call it in a thread. OSError when the machine has no memory for it.

        Stops between two steps when it `is_wanted` no more; the segment must not be used then.
        """
        address = self.data.ctypes.data
        # Fewer, larger pages where the host permits it; where not, this answers an error that does not matter.
        _libc.madvise(address, self.num_bytes, _MADV_HUGEPAGE)
        for offset in range(0, self.num_bytes, _TOUCH_STEP_BYTES):
            if not is_wanted():
                return
            length = min(_TOUCH_STEP_BYTES, self.num_bytes - offset)
            if _libc.madvise(address + offset, length, _MADV_POPULATE_WRITE) == 0:
                continue
            code = ctypes.get_errno()
            if code not in (errno.EINVAL, errno.ENOSYS):  # a kernel before 5.14 does not know the advice
                raise OSError(code, f"touching segment {self.id}: {os.strerror(code)}")
            os.posix_fallocate(self.fd, offset, length)
        self.generations[:] = 0

    def give_back_pages(self) -> None:
        """Although somebody may still have them mapped. Slow: call it in a thread. It is of no use afterwards.

        Who reads there afterwards reads zeros under another generation; who writes there is charged for it.
        """
        self.generations += np.uint32(1)
        for offset in range(0, self.num_bytes, _TOUCH_STEP_BYTES):
            _libc.fallocate(self.fd, _PUNCH_HOLE, offset, min(_TOUCH_STEP_BYTES, self.num_bytes - offset))

    def close(self) -> None:
        """Give up the descriptors; the memory goes with the last mapping of it."""
        os.close(self.fd)
        os.close(self.generations_fd)


def _anonymous(segment_id: int, num_bytes: int) -> SegmentMemory:
    fd, data = _shared_memory(f"prefixd-{segment_id}", num_bytes)
    name = f"prefixd-{segment_id}-generations"
    generations_fd, generations = _shared_memory(name, generations_bytes_for(num_bytes))
    fcntl.fcntl(generations_fd, _F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    for sealed in (fd, generations_fd):
        fcntl.fcntl(sealed, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
    return SegmentMemory(fd, data, generations_fd, generations)


def _shared_memory(name: str, num_bytes: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        return fd, mmap.mmap(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
