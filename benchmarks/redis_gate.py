"""The gate on the demo model: 4,096 tokens that lie in Redis, over a link of 2 MB/s, of 20 MB/s, and a free one.

    .venv/bin/python -m benchmarks.redis_gate [--tokens 4096] [--us-per-token 4000]

12,288 bytes per token (50 MB), which this model computes again in 12 to 20 s on a CPU. A server per link, started
with an empty memory behind a proxy that throttles. Asked as the connector asks: a lookup with 20 ms of budget, again
when the reply says so. What counts: the decision, the bytes that came, and the time until the engine knew.
"""

import argparse
import contextlib
import tempfile
import time
from pathlib import Path

import redis

from benchmarks import bench
from tests.cache_server.harness import ServerProcess, chain, payload_of
from tests.proxy import Proxy
from tests.redis.harness import counters, engine, redis_key
from tests.redis.servers import RedisServer
from tests.redis.test_tier import value_of

TOKENS_PER_BLOCK = 32
BLOCK_BYTES = TOKENS_PER_BLOCK * 12_288
LINKS = {"2 MB/s": 2e6, "20 MB/s": 20e6, "free": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--us-per-token", type=float, default=4000.0)
    options = parser.parse_args()
    keys = chain("prompt", options.tokens // TOKENS_PER_BLOCK)
    recompute_us = options.us_per_token * TOKENS_PER_BLOCK
    recompute_s = len(keys) * recompute_us / 1e6
    rows = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prefixd-bench-")))
        settings = ("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru")
        redis_server = stack.enter_context(RedisServer(folder / "redis", *settings))
        with redis.Redis(port=redis_server.port) as client:
            for key in keys:
                client.set(redis_key(key), value_of(key, BLOCK_BYTES))
        for name, bytes_per_s in LINKS.items():
            with Proxy(redis_server.address) as proxy:
                proxy.bytes_per_s = bytes_per_s
                url = f"redis://127.0.0.1:{proxy.port}"
                with (
                    ServerProcess(folder / name.replace("/", "-"), "256MiB", "--redis", url) as server,
                    engine(server, payload_bytes=BLOCK_BYTES) as one,
                ):
                    started = time.perf_counter()
                    hit = one.ask(keys, recompute_us=recompute_us, timeout_s=60).hit_end
                    known_s = time.perf_counter() - started
                    figures = counters(server)
                    if hit:
                        assert one.worker.get(keys[:1]) == [payload_of(keys[0], BLOCK_BYTES)]
            decision = "load" if figures["gate_open"] else "recompute"
            assert figures["gate_open"] + figures["gate_shut"] == 1, figures
            rows.append(
                [
                    name,
                    decision,
                    f"{figures['redis_bytes_per_s'] / 1e6:.0f}",
                    f"{figures['gate_load_us'] / 1e6:.2f}",
                    f"{recompute_s:.1f}",
                    f"{hit * TOKENS_PER_BLOCK}",
                    f"{figures['promoted_bytes'] / 1e6:.0f}",
                    f"{known_s:.3f}",
                ]
            )
    header = [
        "link",
        "decision",
        "MB/s",
        "expected s",
        "recompute s",
        "hit tokens",
        "loaded MB",
        "known after s",
    ]
    bench.table(f"{options.tokens} tokens, {len(keys) * BLOCK_BYTES / 1e6:.0f} MB", header, rows)


if __name__ == "__main__":
    main()
