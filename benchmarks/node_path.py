"""The node's path: 64 payloads of 1 MiB from the engine's pages into the cache and back.

    python -m benchmarks.node_path [--rounds 15] [--layers 16]
    python -m benchmarks.node_path --layouts     gather and scatter alone, for every way in which pages may lie

Beside every figure, in the same run: the same 64 blocks copied one by one with numpy (the ceiling of the ratio
`/ numpy`), one torch copy of all of them (`/ torch`), and, for streams, the same bytes sent through bare gRPC.
Save is what the engine waits for: free slots, the copy, the queueing of the commit; the commit itself runs beside it.
Load is from the plan of a step to the report: generations, the copy, generations again, by the transfer threads;
`lookup + load` adds the question to the server before it. `verified load` is the same with the setting `verify_loads`:
every payload's checksum is made from its slot before it is copied; a stream is verified in any case. `checksums` is
what a save pays for them, on the saver's thread beside the engine: 64 sums over slots, nothing else.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import threading
import time

import grpc
import numpy as np
import torch
import xxhash

from benchmarks.bench import client, median, rounds, server, table
from connector.client import CHUNK_BYTES, CacheClient, LookupAnswer
from connector.kv_layout import KVLayout, layout_of, layout_of_tables
from connector.plan import BlockName, LoadSpec, SaveSpec, StepPlan
from connector.transfer import Gather, SlotMemory, new_staging, scatter, use_one_thread
from connector.worker import WorkerSide

NUM_BLOCKS = 64
PAYLOAD_BYTES = 1 << 20
TOTAL_BYTES = NUM_BLOCKS * PAYLOAD_BYTES


def names(round_number: int) -> list[BlockName]:
    """The keys of one chain of 64 blocks that no other round has."""
    keys = [hashlib.blake2b(f"{round_number}/{i}".encode(), digest_size=16).digest() for i in range(NUM_BLOCKS)]
    parents = [b"\0" * 16, *keys[:-1]]
    return [BlockName(key, parent, i) for i, (key, parent) in enumerate(zip(keys, parents, strict=True))]


def engine_pages(num_layers: int) -> tuple[KVLayout, list[torch.Tensor]]:
    """An engine's KV: twice the blocks, so that a load goes to other blocks than those that were saved."""
    page_words = PAYLOAD_BYTES // num_layers // 8
    tensors = {
        f"layer.{i}": torch.randint(1 << 40, (2 * NUM_BLOCKS, page_words), dtype=torch.int64) for i in range(num_layers)
    }
    layout = layout_of(tensors, list(tensors), dict.fromkeys(tensors, page_words * 8), 2 * NUM_BLOCKS)
    return layout, list(tensors.values())


LAYOUTS = {
    "layer by layer (LBHNC, LBNHC)": 1,
    "block by block (BLHNC, BLNHC)": 1,
    "heads before blocks (LHBNC)": 8,
    "keys and values apart": 2,
    "two block tables in a payload": 1,
}


def pages_in(name: str, num_layers: int) -> KVLayout:
    """The pages of 128 blocks in a layout; its figure in LAYOUTS says of how many runs a page is."""
    words, num_blocks = PAYLOAD_BYTES // num_layers // 8, 2 * NUM_BLOCKS
    names = [f"layer.{i}" for i in range(num_layers)]
    runs = LAYOUTS[name]
    if name.startswith("block by block"):
        backing = torch.randint(1 << 40, (num_blocks, num_layers, words), dtype=torch.int64)
        tensors = {layer: backing[:, i] for i, layer in enumerate(names)}
    else:
        tensors = {
            layer: torch.randint(1 << 40, (runs, num_blocks, words // runs), dtype=torch.int64) for layer in names
        }
        if not name.startswith("keys"):
            tensors = {layer: tensor.transpose(0, 1) for layer, tensor in tensors.items()}
    tables = [names[::2], names[1::2]] if name.startswith("two") else [names]
    layout = layout_of_tables(tensors, tables, dict.fromkeys(names, words * 8), num_blocks)
    assert len(layout.layers) == num_layers * runs and layout.payload_bytes == PAYLOAD_BYTES
    return layout


def _gather(layout: KVLayout, memory: SlotMemory, block_ids: list[int], slots: list[int]) -> None:
    Gather(layout, memory, block_ids, slots).copy_rest()


def by_layout(num_rounds: int, num_layers: int) -> None:
    """64 payloads between pages and contiguous slots, on one thread; beside one torch copy of the same bytes."""
    use_one_thread()
    source = torch.randint(1 << 40, (NUM_BLOCKS, PAYLOAD_BYTES // 8), dtype=torch.int64)
    target = torch.zeros_like(source)
    rows = []
    for name in LAYOUTS:
        layout = pages_in(name, num_layers)
        memory = SlotMemory(layout, None, new_staging(TOTAL_BYTES))
        slots = [i * memory.granules_per_slot for i in range(NUM_BLOCKS)]
        for order_name, order in (
            ("contiguous", list(range(NUM_BLOCKS))),
            ("scattered", np.random.default_rng(2).permutation(NUM_BLOCKS).tolist()),
        ):
            block_ids = [block for block in order for _ in range(layout.num_tables)]
            elsewhere = [NUM_BLOCKS + block for block in block_ids]
            cases = {
                "plain": functools.partial(target.copy_, source),
                "gather": functools.partial(_gather, layout, memory, block_ids, slots),
                "scatter": functools.partial(scatter, layout, memory, elsewhere, slots, lambda: False),
            }
            seconds = {verb: median(values) for verb, values in rounds(cases, num_rounds).items()}
            for layer in layout.layers:
                blocks = torch.tensor(order)
                assert torch.equal(layer.pages[blocks], layer.pages[blocks + NUM_BLOCKS]), name
            ratios = [f"{seconds['plain'] / seconds[verb]:.2f}" for verb in ("gather", "scatter")]
            rows.append([f"{name}, {order_name} block_ids", f"{TOTAL_BYTES / seconds['plain'] / 1e9:.1f}", *ratios])
    table(
        f"64 payloads of 1 MiB, {num_layers} layers, median of {num_rounds} rounds",
        ["", "plain GB/s", "gather / plain", "scatter / plain"],
        rows,
    )


class Bench:
    """One worker and one scheduler-side line on one address."""

    def __init__(self, worker: WorkerSide, asker: CacheClient, verifier: CacheClient, order: list[int]) -> None:
        self.worker = worker
        self.asker = asker
        self.verifier = verifier  # asks for checksums too
        self.order = order
        self.round = 0
        self.stored = 0
        self.num_loads = 0

    def save(self) -> float:
        """Seconds that the engine's thread spends. Afterwards (not counted) waits until the server has the blocks."""
        self.round += 1
        saves = tuple(SaveSpec(self.order[i], name) for i, name in enumerate(names(self.round)))
        started = time.perf_counter()
        self.worker.begin_step(StepPlan(saves=saves))
        self.worker.finish_saves()
        elapsed = time.perf_counter() - started
        self._wait_stored()
        return elapsed

    def _wait_stored(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            counts = self.worker.take_counts()
            assert not counts.get("dropped_blocks"), counts
            self.stored += counts.get("saved_blocks", 0)
            if self.stored >= self.round * NUM_BLOCKS:
                time.sleep(0.05)  # the slots ahead are filled up again
                return
            time.sleep(0.002)
        raise RuntimeError(f"{self.stored} blocks stored of {self.round * NUM_BLOCKS}")

    def ask(self, asker: CacheClient | None = None) -> LookupAnswer:
        call = (asker or self.asker).lookup(self._keys(), 0, lease=True, recompute_us_per_block=1e6)
        assert call is not None
        call.wait(5)
        answer = call.answer()
        assert answer is not None and answer.hit_end == NUM_BLOCKS, answer
        return answer

    def _keys(self) -> bytes:
        return b"".join(name.key for name in names(self.round))

    def load(self) -> float:
        """Seconds from the plan to the report of the last byte in the engine's pages."""
        return self._load(self.ask())

    def verified_load(self) -> float:
        """The same with `verify_loads`."""
        answer = self.ask(self.verifier)
        assert answer.checksums is not None and answer.checksums.all()
        return self._load(answer, self.verifier)

    def ask_and_load(self) -> float:
        started = time.perf_counter()
        answer = self.ask()
        return time.perf_counter() - started + self._load(answer)

    def _load(self, answer: LookupAnswer, asker: CacheClient | None = None) -> float:
        self.num_loads += 1
        request_id = f"load-{self.num_loads}"
        spec = LoadSpec(
            request_id,
            tuple(NUM_BLOCKS + block for block in self.order),
            self._keys(),
            answer.slots.tobytes(),
            answer.generations.tobytes(),
            answer.lease_id,
            answer.server_epoch,
            checksums=b"" if answer.checksums is None else answer.checksums.tobytes(),
        )
        started = time.perf_counter()
        self.worker.start_loads([spec])
        while request_id not in self.worker.take_finished():
            time.sleep(0.0002)
        elapsed = time.perf_counter() - started
        assert not self.worker.take_failed_blocks()
        (asker or self.asker).release([answer.lease_id])
        return elapsed


class RawStream:
    """The same bytes through bare gRPC: messages of 1 MiB, nothing parsed, nothing kept."""

    def __init__(self) -> None:
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        handlers = {
            "Put": grpc.stream_unary_rpc_method_handler(lambda messages, _: b"%d" % sum(len(m) for m in messages)),
            "Get": grpc.unary_stream_rpc_method_handler(lambda _request, _: iter([self._message] * NUM_BLOCKS)),
        }
        self._message = bytes(CHUNK_BYTES)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", handlers),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        options = [("grpc.max_receive_message_length", -1)]
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=options)

    def put(self) -> None:
        self._channel.stream_unary("/raw/Put")(iter([self._message] * NUM_BLOCKS))

    def get(self) -> None:
        assert sum(len(m) for m in self._channel.unary_stream("/raw/Get")(b"")) == TOTAL_BYTES

    def close(self) -> None:
        self._channel.close()
        self._server.stop(None).wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--layouts", action="store_true")
    args = parser.parse_args()
    if args.layouts:
        by_layout(args.rounds, args.layers)
        return
    layout, tensors = engine_pages(args.layers)
    source = np.random.default_rng(1).integers(0, 1 << 40, (NUM_BLOCKS, PAYLOAD_BYTES // 8))
    target = np.zeros_like(source)
    torch_source, torch_target = torch.from_numpy(source), torch.from_numpy(target.copy())

    def one_by_one() -> None:
        for block in range(NUM_BLOCKS):
            np.copyto(target[block], source[block])

    contiguous = list(range(NUM_BLOCKS))
    scattered = np.random.default_rng(2).permutation(NUM_BLOCKS).tolist()
    rows: list[list[str]] = []
    with server("3GiB") as (unix_address, tcp_address):
        for path, address in (("mapped slots", unix_address), ("streams", tcp_address)):
            with (
                client(address, payload_bytes=layout.payload_bytes, shard=0) as line,
                client(unix_address) as asker,
                client(unix_address, wants_checksums=True) as verifier,
            ):
                worker = WorkerSide(
                    line, layout, block_size=16, shard=0, slots_ahead=4 * NUM_BLOCKS, staging_bytes=512 << 20,
                    load_timeout_s=30.0,
                )  # fmt: skip
                worker.start()
                time.sleep(1.0)  # slots are reserved and touched
                for order_name, order in (("contiguous", contiguous), ("scattered", scattered)):
                    bench = Bench(worker, asker, verifier, order)
                    bench.round = hash((path, order_name)) % 10**9 * 1000
                    bench.stored = bench.round * NUM_BLOCKS
                    raw = RawStream()
                    cases = {
                        "numpy": one_by_one,
                        "torch": lambda: torch_target.copy_(torch_source),
                        "save": bench.save,
                        "load": bench.load,
                        "lookup + load": bench.ask_and_load,
                        "verified load": bench.verified_load,
                        "checksums": lambda: [xxhash.xxh3_64_intdigest(row) for row in target],
                        "raw put": raw.put,
                        "raw get": raw.get,
                    }
                    seconds = {name: median(values) for name, values in rounds(cases, args.rounds).items()}
                    raw.close()
                    check_bytes(tensors, order)
                    verbs = {"save": "raw put", "load": "raw get", "lookup + load": "raw get"}
                    if path == "mapped slots":
                        verbs |= {"verified load": "", "checksums": ""}
                    for verb, bare in verbs.items():
                        rows.append(
                            [
                                f"{path}, {verb}, {order_name} block_ids",
                                f"{TOTAL_BYTES / seconds[verb] / 1e9:.1f}",
                                f"{seconds['numpy'] / seconds[verb]:.2f}",
                                f"{seconds['torch'] / seconds[verb]:.2f}",
                                f"{seconds[bare] / seconds[verb]:.2f}" if path == "streams" else "",
                            ]
                        )
                worker.shutdown()
    table(
        f"64 payloads of 1 MiB, {args.layers} layers, median of {args.rounds} rounds",
        ["", "GB/s", "/ numpy", "/ torch", "/ bare gRPC"],
        rows,
    )


def check_bytes(tensors: list[torch.Tensor], order: list[int]) -> None:
    for tensor in tensors:
        blocks = torch.tensor(order)
        assert torch.equal(tensor[blocks], tensor[blocks + NUM_BLOCKS]), "a load brought other bytes than were saved"


if __name__ == "__main__":
    threading.current_thread().name = "engine"
    main()
