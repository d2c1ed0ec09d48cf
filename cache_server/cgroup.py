"""How much memory the container may use: the smallest limit between us and the root of the control groups.

The segments count against it, so a budget above it would not be refused by the system but answered with a kill,
hours later, when the cache is full. Both versions of control groups; no limit, or no such file: None.
"""

from pathlib import Path

_NO_LIMIT = 1 << 60  # version 1 writes a number near 2^63 when there is none


def memory_limit(root: Path = Path("/")) -> int | None:
    """In bytes."""
    limits: list[int] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            mount, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = mount / name.lstrip("/")
        # Inside a container the name may be that of the host: then only the mount point itself is there.
        for place in (folder, *folder.parents):
            limits.extend(int(text) for text in _lines(place / file) if text.isdigit())
            if place == mount:
                break
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
