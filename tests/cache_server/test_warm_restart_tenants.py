"""Memory that outlives a stop, and whose it is."""

from pathlib import Path

from tests.cache_server.harness import ServerProcess, chain
from tests.security.harness import Tenants
from tests.security.harness import engine as engine_of


def test_tenants_stay_apart_over_a_restart(tmp_path: Path, shared_memory_folder: Path) -> None:
    """Each finds its own blocks again; a tenant that is gone loses them; a segment stays its tenant's for ever."""
    tenants = Tenants(tmp_path / "tokens")
    a, b = tenants.add("team-a"), tenants.add("team-b")
    options = ("--tokens-file", str(tenants.write()), "--persist", str(shared_memory_folder))
    keys = chain("the same prompt", 6, 32)
    with ServerProcess(tmp_path / "s", "256MiB", *options) as server:
        with engine_of(server, a) as (worker, _), engine_of(server, b) as (other, in_b):
            worker.save(keys)
            assert in_b.lookup(keys).hit_end == 0
            other.save(keys[:2])
        assert server.stop() == 0
    with ServerProcess(tmp_path / "s", "256MiB", *options) as server:
        assert "8 blocks" in server.log
        with engine_of(server, a) as (worker, in_a), engine_of(server, b) as (other, in_b):
            assert (in_a.lookup(keys).hit_end, in_b.lookup(keys).hit_end) == (6, 2)
            worker.receive_segments()
            other.receive_segments()
            assert not worker.segments.keys() & other.segments.keys()
        assert server.stop() == 0
    tenants.remove("team-b")
    tenants.forget("team-b")
    tenants.write()
    with ServerProcess(tmp_path / "s", "256MiB", *options) as server, engine_of(server, a) as (worker, in_a):
        assert in_a.lookup(keys).hit_end == 6
        for start in range(0, 240, 32):  # all of the memory is its own now
            worker.save(chain("more", min(start + 32, 240), 32), start)
        assert in_a.lookup(chain("more", 240, 32), lease=False).hit_end == 240
        assert server.stats(token=a).stored_bytes <= 256 << 20
