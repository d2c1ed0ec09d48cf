"""A client that runs in an engine's container: saves or loads blocks through slots that it maps, and says what it saw.

    container_client.py save|load SOCKET ENGINE NUM_BLOCKS PAYLOAD_BYTES

Prints one JSON object. With a sixth argument it stays attached until its standard input ends.
"""

import json
import sys
from pathlib import Path

import numpy as np

from tests.cache_server.harness import Client, chain, payload_of, wait_until

PER_CHAIN = 16


def main() -> None:
    action, socket, engine, *numbers = sys.argv[1:]
    num_blocks, payload_bytes, *stays = map(int, numbers)
    # Short chains: what one session may have reserved at once is bounded by the server's memory.
    chains = [chain(f"containers {number}", PER_CHAIN) for number in range(num_blocks // PER_CHAIN)]
    with (
        Client(
            f"unix://{socket}", 0, payload_bytes=payload_bytes, descriptors=Path(socket), engine_id=engine
        ) as worker,
        Client(f"unix://{socket}", engine_id=engine) as scheduler,
    ):
        wait_until(worker.is_mapped, "the segments came", 30)
        if action == "save":
            said = {"saved": sum(len(worker.save(keys)) for keys in chains)}
        else:
            said = {"hit": 0, "right": 0}
            for keys in chains:
                reply = scheduler.lookup(keys)
                worker.receive_segments()
                slots = np.frombuffer(reply.slots, "<u8").tolist()
                said["hit"] += len(slots)
                said["right"] += sum(
                    worker.slot(slot) == payload_of(key, payload_bytes)
                    for slot, key in zip(slots, keys[reply.hit_start : reply.hit_end], strict=True)
                )
            said["mapped"] = sum(len(segment.data) for segment in worker.segments.values())
        print(json.dumps(said), flush=True)
        if stays:
            sys.stdin.read()


main()
