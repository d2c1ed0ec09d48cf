"""A memory control group of a test's own, with a limit; of either version, below the one that the tests run in."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


class ControlGroup:
    """Processes that are put in it, and what they are charged."""

    def __init__(self, folder: Path, is_version_2: bool) -> None:
        self.folder = folder
        self._usage, self._limit = (
            ("memory.current", "memory.max") if is_version_2 else ("memory.usage_in_bytes", "memory.limit_in_bytes")
        )

    def limit(self, num_bytes: int) -> None:
        (self.folder / self._limit).write_text(str(num_bytes))

    @property
    def prefix(self) -> tuple[str, ...]:
        """Of a command that is to run in it."""
        return ("sh", "-c", 'echo $$ >"$0" && exec "$@"', str(self.folder / "cgroup.procs"))

    @property
    def usage_bytes(self) -> int:
        return int((self.folder / self._usage).read_text())

    @property
    def num_kills(self) -> int:
        """Of processes, for lack of memory."""
        for file in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(FileNotFoundError):
                lines = dict(line.split() for line in (self.folder / file).read_text().splitlines())
                return int(lines["oom_kill"])
        raise AssertionError("the group does not count")


def why_not() -> str:
    """Why there can be none here; empty: there can."""
    try:
        with control_group("prefixd-test-probe"):
            return ""
    except OSError as error:
        return f"a memory control group cannot be made ({error}): run as root, where /sys/fs/cgroup can be written"


@contextlib.contextmanager
def control_group(name: str) -> Iterator[ControlGroup]:
    """A new one; it has to be empty at the end."""
    parent, is_version_2 = _parent()
    folder = parent / f"{name}-{os.getpid()}"
    folder.mkdir()
    try:
        if not (folder / ("memory.max" if is_version_2 else "memory.limit_in_bytes")).exists():
            raise OSError(f"{parent} does not hand memory limits down")
        yield ControlGroup(folder, is_version_2)
    finally:
        folder.rmdir()


def _parent() -> tuple[Path, bool]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount = Path("/sys/fs/cgroup/memory")
            # Inside a container the name may be that of the host: then only the mount point itself is there.
            inside = mount / name.lstrip("/")
            return (inside if inside.exists() else mount), False
    # Version 2: a group with processes in it hands nothing down, the root does.
    return Path("/sys/fs/cgroup"), True
