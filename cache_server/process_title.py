"""Takes a secret out of what `ps` shows: overwrites it in our own argument area, where the kernel reads it from.

A password on a command line can be read by every user of the machine as long as the process lives. Linux keeps
the arguments in the process's own memory, and their place is in /proc/self/stat; other systems: nothing happens.
"""

import ctypes
from pathlib import Path

_ARG_START, _ARG_END = 47, 48  # fields 48 and 49 of /proc/self/stat, counted from 0


def hide_argument(secret: str) -> None:
    """Every occurrence of `secret` in the arguments becomes stars."""
    needle = secret.encode()
    if not needle:
        return
    try:
        line = Path("/proc/self/stat").read_text()
    except OSError:
        return
    # The second field is the program's name in brackets and may contain anything.
    fields = [*line[: line.rindex(")")].split(maxsplit=1), *line[line.rindex(")") + 1 :].split()]
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if not 0 < start < end:
        return
    arguments = ctypes.string_at(start, end - start)
    position = arguments.find(needle)
    while position >= 0:
        ctypes.memset(start + position, ord("*"), len(needle))
        position = arguments.find(needle, position + len(needle))
