"""A cache server that misbehaves on purpose: every call is handed on to a real one, and a test says what happens at
which point of it.

    with Front(server.port_address) as front:
        front.at("Lookup", lambda: time.sleep(0.2))          before a Lookup is handed on
        front.at("Lookup answered", server.stop_process)     before its answer is handed back
        front.at("Get chunk 3", fail(StatusCode.UNAVAILABLE))   before the fourth message of a Get is handed back
        front.at("Put", fail(StatusCode.RESOURCE_EXHAUSTED, "full"))

An action runs in the call's own thread; it may wait, stop or kill a process, or raise `Refuse`. `times` says how often.
Bytes are not looked at, but for `lose_payloads`. Unlike `tests/proxy.py` this knows calls from one another.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc

from connector.client import GetChunkView
from protos import kv_cache_pb2 as pb

SERVICE = "prefixd.v1.KvCache"
UNARY = ("Lookup", "Release", "Renew", "Reserve", "Commit", "Flush", "Stats")
OPTIONS = [
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.so_reuseport", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # a server that was restarted is behind it again at once
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]
Action = Callable[[], object]


class Refuse(Exception):
    """Ends the call with a status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def fail(code: grpc.StatusCode, text: str = "as the test wished") -> Action:
    """An action that ends the call."""

    def action() -> None:
        raise Refuse(code, text)

    return action


def _time_left(context: grpc.ServicerContext) -> float | None:
    """A call without a deadline has one of centuries here, and grpc takes no such timeout."""
    left = context.time_remaining()
    return left if left is not None and left < 1e6 else None


class Front:
    """Listens on a free loopback port."""

    def __init__(self, target: str) -> None:
        self.calls: Counter[str] = Counter()
        self.lose_payloads: frozenset[int] = frozenset()  # of each Get: these are said to be missing
        self._actions: dict[str, tuple[Action, float]] = {}
        self._lock = threading.Lock()
        self._channel = grpc.insecure_channel(target, options=OPTIONS)
        self._server = grpc.server(ThreadPoolExecutor(64, "front"), options=OPTIONS)
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._unary(name)) for name in UNARY}
        handlers |= {
            "Attach": grpc.unary_stream_rpc_method_handler(self._stream("Attach")),
            "Get": grpc.unary_stream_rpc_method_handler(self._stream("Get")),
            "Put": grpc.stream_unary_rpc_method_handler(self._put),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._server.stop(0).wait(5)
        self._channel.close()

    def at(self, point: str, action: Action, times: float = float("inf")) -> None:
        """From now on `action` runs at `point`, this often."""
        with self._lock:
            self._actions[point] = (action, times)

    def mend(self) -> None:
        """Everything is handed on as it is."""
        with self._lock:
            self._actions.clear()
        self.lose_payloads = frozenset()

    def _pass(self, point: str) -> None:
        with self._lock:
            action, times = self._actions.get(point, (None, 0))
            if action is None or times <= 0:
                return
            self._actions[point] = (action, times - 1)
        action()

    @contextlib.contextmanager
    def _call(self, name: str, context: grpc.ServicerContext) -> Iterator[None]:
        self.calls[name] += 1
        try:
            self._pass(name)
            yield
        except Refuse as refusal:
            context.abort(refusal.code, str(refusal))
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())

    def _unary(self, name: str) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        method = self._channel.unary_unary(f"/{SERVICE}/{name}")

        def call(request: bytes, context: grpc.ServicerContext) -> bytes:
            with self._call(name, context):
                reply: bytes = method(request, timeout=_time_left(context))
                self._pass(f"{name} answered")
                return reply
            raise AssertionError("aborted")

        return call

    def _stream(self, name: str) -> Callable[[bytes, grpc.ServicerContext], Iterator[bytes]]:
        method = self._channel.unary_stream(f"/{SERVICE}/{name}")

        def call(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._call(name, context):
                stream = method(request, timeout=_time_left(context))
                context.add_callback(stream.cancel)
                for number, message in enumerate(stream):
                    self._pass(f"{name} chunk {number}")
                    yield self._with_losses(message) if name == "Get" else message

        return call

    def _with_losses(self, message: bytes) -> bytes:
        index = GetChunkView.parse(message).index if self.lose_payloads else -1
        return pb.GetChunk(index=index, missing=True).SerializeToString() if index in self.lose_payloads else message

    def _put(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        method: Any = self._channel.stream_unary(f"/{SERVICE}/Put")
        with self._call("Put", context):
            reply: bytes = method(messages, timeout=_time_left(context))
            self._pass("Put answered")
            return reply
        raise AssertionError("aborted")
