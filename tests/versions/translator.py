"""A server of another wire: today's server behind a `Translator` that lets through only what that wire can say.

`Wire` is a set of message classes in a descriptor pool of its own, made from the file descriptor of some proto. The
translator reads each message with the classes of that wire and throws away what they do not know, in both directions;
`edit` may change what it then says. It knows no other rule.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tests.cache_server.harness import TIMEOUT_S

SERVICE = "prefixd.v1.KvCache"
FUTURE_FIELD = 1000
FUTURE = "of a wire that does not exist yet"
MIB = 1 << 20


class Wire:
    """The messages of one version of the proto."""

    def __init__(self, file: descriptor_pb2.FileDescriptorProto) -> None:
        pool = descriptor_pool.DescriptorPool()
        self.methods = pool.AddSerializedFile(file.SerializeToString()).services_by_name["KvCache"].methods_by_name

    def message(self, descriptor: Any) -> Any:
        """The class of a message."""
        return message_factory.GetMessageClass(descriptor)


def next_wire(today: bytes) -> Wire:
    """Today's wire, and in each message a field that today's release does not know."""
    file = descriptor_pb2.FileDescriptorProto.FromString(today)
    for message in file.message_type:
        message.field.add(
            name="from_the_future",
            number=FUTURE_FIELD,
            type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
            label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
        )
    return Wire(file)


def say_more(message: Any) -> None:
    """Fill the field of the future, also in the messages within."""
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else (value,):
                say_more(part)
    if "from_the_future" in message.DESCRIPTOR.fields_by_name:
        message.from_the_future = FUTURE


class Translator:
    """Listens on a Unix socket in `folder` and on a port, and speaks to `upstream` behind."""

    def __init__(
        self,
        folder: Path,
        upstream: str,
        descriptors: Path,
        wire: Wire,
        edit_request: Callable[[Any], None] = lambda message: None,
        edit_reply: Callable[[Any], None] = lambda message: None,
    ) -> None:
        self._wire = wire
        self._edit_request = edit_request
        self._edit_reply = edit_reply
        self.num_messages = 0
        self._lock = threading.Lock()
        limit = [("grpc.max_receive_message_length", 16 * MIB), ("grpc.so_reuseport", 0)]
        self._channel = grpc.insecure_channel(upstream, options=limit)
        self._server = grpc.server(futures.ThreadPoolExecutor(32), options=limit)
        handlers = {name: self._handler(name, method) for name, method in wire.methods.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        path = folder / "translated.sock"
        self.unix = f"unix://{path}"
        self._server.add_insecure_port(self.unix)
        self.tcp = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        # Descriptors are the same in every version of the wire.
        Path(f"{path}.fd").symlink_to(f"{descriptors}.fd")

    def __enter__(self) -> "Translator":  # noqa: PYI034 - one class, no heirs
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()
        self._channel.close()

    def _handler(self, name: str, method: Any) -> Any:
        request, reply = self._wire.message(method.input_type), self._wire.message(method.output_type)
        call = self._channel.stream_stream(f"/{SERVICE}/{name}")

        def serve(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            stream = call(
                (self._translate(request, each, self._edit_request) for each in messages), timeout=TIMEOUT_S * 9
            )
            context.add_callback(stream.cancel)
            try:
                for each in stream:
                    yield self._translate(reply, each, self._edit_reply)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())

        return grpc.stream_stream_rpc_method_handler(serve)

    def _translate(self, kind: Any, data: bytes, edit: Callable[[Any], None]) -> bytes:
        message = kind.FromString(data)
        message.DiscardUnknownFields()
        edit(message)
        with self._lock:
            self.num_messages += 1
        translated: bytes = message.SerializeToString()
        return translated
