"""A client of the first wire: runs with `tests/versions/first` before everything else on the path.

    python tests/versions/first_client.py UNIX_TARGET DESCRIPTORS TCP_TARGET

The whole walk of the tests' client, over the first stubs: slots, streams, leases. Prints what it saw as JSON.
"""

import json
import sys
from pathlib import Path

import grpc
import numpy as np

import protos
from protos import kv_cache_pb2 as pb
from tests.cache_server.harness import TIMEOUT_S, Client, chain, payload_of, wait_until


def main(unix: str, descriptors: str, tcp: str) -> None:
    seen: dict[str, object] = {
        "stubs": str(Path(protos.__file__).parent),
        "fields of Lookup": len(pb.LookupRequest.DESCRIPTOR.fields),
    }
    saved, put = chain("first saved", 6), chain("first put", 6)
    with (
        Client(unix, 0, descriptors=Path(descriptors), engine_id="first") as near,
        Client(tcp, 0, engine_id="first") as far,
        Client(unix, engine_id="first") as scheduler,
    ):
        wait_until(near.is_mapped, "mapped")
        seen["version"] = near.attached.protocol_version
        seen["saved"] = near.save(saved)
        seen["put"] = far.put(put)
        seen["got"] = far.get(saved) == [payload_of(key, far.payload_bytes) for key in saved]
        request = pb.LookupRequest(session_id=scheduler.id, keys=b"".join(put), lease=True, wait_ms=5)
        reply = scheduler.stub.Lookup(request, timeout=TIMEOUT_S)
        near.receive_segments()
        slots = np.frombuffer(reply.slots, "<u8").tolist()
        seen["mapped"] = [bytes(near.slot(slot)) for slot in slots] == [payload_of(k, near.payload_bytes) for k in put]
        renew = pb.RenewRequest(session_id=scheduler.id, lease_ids=[reply.lease_id])
        seen["renewed"] = list(scheduler.stub.Renew(renew, timeout=TIMEOUT_S).renewed) == [reply.lease_id]
        release = pb.ReleaseRequest(session_id=scheduler.id, lease_ids=[reply.lease_id])
        scheduler.stub.Release(release, timeout=TIMEOUT_S)
        stats = scheduler.stub.Stats(pb.StatsRequest(), timeout=TIMEOUT_S)
        seen["leased"] = stats.leased_bytes
        try:
            scheduler.stub.Lookup(pb.LookupRequest(session_id=1), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            seen["refused"] = error.code().name
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
