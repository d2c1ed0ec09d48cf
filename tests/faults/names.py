"""A name server on the loopback interface: one name whose address changes when the test says so.

gRPC takes the target `dns://127.0.0.1:PORT/NAME:PORT` and asks this server for NAME, as it would ask a cluster's.
Not here: records other than A (an AAAA question gets an answer without records), compression, TCP.
"""

import socket
import struct
import threading
from types import TracebackType
from typing import Self


class NameServer:
    """Answers every question of type A with `address`, to be forgotten at once (TTL 0)."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.num_questions = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        threading.Thread(target=self._serve, name="names", daemon=True).start()

    def target(self, name: str, port: int) -> str:
        """`name` at this name server, as gRPC takes it."""
        return f"dns://127.0.0.1:{self._socket.getsockname()[1]}/{name}:{port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                question, sender = self._socket.recvfrom(512)
            except OSError:
                return
            end = question.index(b"\0", 12) + 5  # header, name, type, class; what follows (EDNS) is passed over
            (kind,) = struct.unpack("!H", question[end - 4 : end - 2])
            answers = b""
            if kind == 1:
                self.num_questions += 1
                answers = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 0, 4) + socket.inet_aton(self.address)
            header = question[:2] + struct.pack("!HHHHH", 0x8180, 1, bool(answers), 0, 0)
            self._socket.sendto(header + question[12:end] + answers, sender)
