"""Whether the NVIDIA driver pins a mapped segment, as the connector has it pinned once per segment.

Asks the driver's own library (libcuda), without torch and without an engine. The calls' names and numbers are those of
the CUDA driver API; a context of the first GPU is retained for the time of the question.
"""

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cache_server.segments import SMALLEST_SEGMENT_BYTES, Segment

if TYPE_CHECKING:
    from cache_server.doctor import Finding

_PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE
_TODO: Final = "update the driver, or let the container see it; without pinning loads are slower"


class DriverError(Exception):
    """A call that did not return CUDA_SUCCESS."""


def pinning() -> "Finding":
    """One finding."""
    from cache_server.doctor import Finding

    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return Finding("pin", "ok", "no NVIDIA GPU here: nothing is to be pinned")
    try:
        name = _pin_a_segment()
    except (DriverError, OSError) as error:
        return Finding("pin", "warn", f"there is a GPU, but memory cannot be pinned for it: {error}", _TODO)
    return Finding("pin", "ok", f"{name} pins a segment of {SMALLEST_SEGMENT_BYTES >> 20} MiB")


def _pin_a_segment() -> str:
    """Pins one for a moment; returns the GPU's name."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        code = getattr(driver, name)(*arguments)
        if code:
            raise DriverError(f"{name} answered {code}")

    device, context = ctypes.c_int(), ctypes.c_void_p()
    name = ctypes.create_string_buffer(128)
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDeviceGetName", name, 128, device)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call("cuCtxSetCurrent", context)
        segment = Segment(0, SMALLEST_SEGMENT_BYTES)
        try:
            segment.touch()
            address = ctypes.c_void_p(segment.data.ctypes.data)
            call("cuMemHostRegister_v2", address, ctypes.c_size_t(segment.num_bytes), _PORTABLE)
            call("cuMemHostUnregister", address)
        finally:
            segment.close()
    finally:
        call("cuDevicePrimaryCtxRelease_v2", device)
    return name.value.decode(errors="replace")
