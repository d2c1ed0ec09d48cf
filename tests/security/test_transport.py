"""The server's doors: certificates, tokens, sockets, and what is refused before anything is bound."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cache_server.cli import main
from cache_server.tenants import new_token
from protos import kv_cache_pb2 as pb
from protos import kv_cache_pb2_grpc as pb_grpc
from protos.channel import open_channel
from tests.cache_server.harness import ROOT, TIMEOUT_S, Client, ServerProcess, chain, wait_until
from tests.security.certificates import Authority, Pair
from tests.security.harness import Tenants, engine, refused

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.sign("server")


def tls(pair: Pair, authority: Authority | None = None) -> list[str]:
    """Options of the server; with an authority, clients need a certificate of it."""
    client_ca = ["--tls-client-ca-file", str(authority.ca)] if authority else []
    return ["--tls-cert-file", str(pair.cert), "--tls-key-file", str(pair.key), *client_ca]


def ask(server: ServerProcess, **credentials: Any) -> Any:
    with open_channel(server.tcp, **credentials) as channel:
        return pb_grpc.KvCacheStub(channel).Stats(pb.StatsRequest(), timeout=TIMEOUT_S)


# --- TLS


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, authority: Authority, pair: Pair) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("mutual"), "64MiB", *tls(pair, authority)) as server:
        yield server


def test_both_sides_show_certificates(mutual: ServerProcess, authority: Authority) -> None:
    """Positive control of what is refused below: blocks go both ways."""
    credentials = {"ca": authority.ca.read_bytes(), **authority.sign("client").credentials}
    keys = chain("tls", 3)
    with Client(mutual.tcp, 0, credentials=credentials) as worker, Client(mutual.unix) as scheduler:
        assert set(worker.put(keys)) == {pb.COMMIT_STATUS_STORED}
        assert None not in worker.get(keys)
        assert scheduler.lookup(keys, lease=False).hit_end == 3


@pytest.mark.parametrize("kind", ["none", "expired", "of another authority"])
def test_a_client_without_a_good_certificate_is_nobody(
    mutual: ServerProcess, authority: Authority, tmp_path: Path, kind: str
) -> None:
    """The handshake fails: no call is seen, nothing is served."""
    pairs: dict[str, Any] = {
        "none": {},
        "expired": authority.sign("late", expired=True).credentials,
        "of another authority": Authority(tmp_path, "other").sign("stranger").credentials,
    }
    before = mutual.stats().counters["sessions_refused"]
    with refused(grpc.StatusCode.UNAVAILABLE):
        Client(mutual.tcp, credentials={"ca": authority.ca.read_bytes(), **pairs[kind]})

    assert mutual.stats().counters["sessions_refused"] == before


def test_a_client_trusts_only_its_authority(mutual: ServerProcess, authority: Authority, tmp_path: Path) -> None:
    """A server that shows another's certificate is not the server; neither is one that speaks no TLS."""
    good = authority.sign("client").credentials
    with refused(grpc.StatusCode.UNAVAILABLE):
        ask(mutual, ca=Authority(tmp_path, "other").ca.read_bytes(), **good)
    with refused(grpc.StatusCode.UNAVAILABLE):
        ask(mutual)
    assert ask(mutual, ca=authority.ca.read_bytes(), **good).memory_bytes == 64 << 20


def test_a_renewed_certificate_is_used_by_the_next_client(tmp_path: Path, authority: Authority) -> None:
    """Expired, renewed, half written: new handshakes follow the files, a connection that stands goes on."""
    ca = authority.ca.read_bytes()
    pair = authority.sign("renewed")
    with ServerProcess(tmp_path, "64MiB", *tls(pair)) as server, Client(server.tcp, credentials={"ca": ca}) as standing:
        authority.sign("renewed", expired=True)
        with refused(grpc.StatusCode.UNAVAILABLE):
            ask(server, ca=ca)
        standing.lookup(chain("a", 1))

        authority.sign("renewed")
        assert ask(server, ca=ca).memory_bytes == 64 << 20

        pair.cert.write_text(pair.cert.read_text()[:100])
        assert ask(server, ca=ca).memory_bytes == 64 << 20
        assert ask(server, ca=ca).memory_bytes == 64 << 20
        assert server.log.count("the new TLS files are not used") == 1


# --- tokens


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Tenants:
    tenants = Tenants(tmp_path_factory.mktemp("tokens"))
    tenants.add("team-a")
    tenants.add_operator()
    tenants.write()
    return tenants


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority, pair: Pair, tenants: Tenants
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    with ServerProcess(folder, "128MiB", *tls(pair), "--tokens-file", str(tenants.path)) as server:
        yield server


METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["KvCache"].methods]


@pytest.mark.parametrize("token", [None, "team-a." + "x" * 43])
@pytest.mark.parametrize("name", METHODS)
def test_no_method_answers_without_a_token(
    guarded: ServerProcess, authority: Authority, name: str, token: str | None
) -> None:
    """C72: each of them, on every address, even before its request is read."""
    method = pb.DESCRIPTOR.services_by_name["KvCache"].methods_by_name[name]
    for address, ca in ((guarded.unix, None), (guarded.tcp, authority.ca.read_bytes())):
        with open_channel(address, token=token, ca=ca) as channel, refused(UNAUTHENTICATED, "token"):
            path = f"/prefixd.v1.KvCache/{name}"
            if method.server_streaming:
                next(channel.unary_stream(path)(b"\xff", timeout=TIMEOUT_S))
            elif method.client_streaming:
                channel.stream_unary(path)(iter([b"\xff"]), timeout=TIMEOUT_S)
            else:
                channel.unary_unary(path)(b"\xff", timeout=TIMEOUT_S)


def test_there_are_eleven_methods() -> None:
    """The list above is not empty."""
    assert len(METHODS) == 11


def test_with_the_token_blocks_go_both_ways(guarded: ServerProcess, tenants: Tenants, authority: Authority) -> None:
    """Positive control, through slots and through a stream over TLS."""
    keys = chain("a", 3, 32)
    token = tenants.tokens["team-a"]
    with engine(guarded, token) as (worker, scheduler):
        worker.save(keys)
        assert scheduler.lookup(keys).hit_end == 3
        credentials = {"token": token, "ca": authority.ca.read_bytes()}
        with Client(guarded.tcp, 0, payload_bytes=1 << 20, key_bytes=32, credentials=credentials) as far:
            assert None not in far.get(keys)


def test_health_needs_no_token_and_reflection_does(guarded: ServerProcess, tenants: Tenants) -> None:
    """Probes have none; what could be called is for those who may call."""

    def services(token: str | None) -> Any:
        with open_channel(guarded.unix, token=token) as channel:
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            return next(stub.ServerReflectionInfo(iter([request]), timeout=TIMEOUT_S)).list_services_response.service

    with open_channel(guarded.unix) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with refused(UNAUTHENTICATED):
        services(None)
    assert "prefixd.v1.KvCache" in {service.name for service in services(tenants.tokens["team-a"])}


def test_no_descriptors_for_a_ticket_that_was_not_given(guarded: ServerProcess, tenants: Tenants) -> None:
    """The descriptor socket knows nobody but those whom an authorised Attach gave a ticket, once."""
    import socket

    token = tenants.tokens["team-a"]
    with engine(guarded, token) as (worker, _):
        for ticket in (b"\0" * 16, b"", worker.attached.descriptor_ticket):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.settimeout(TIMEOUT_S)
                stranger.connect(f"{guarded.socket_path}.fd")
                stranger.send(ticket or b"?")
                assert socket.recv_fds(stranger, 64, 2)[:2] == (b"", [])


def test_tickets_are_for_this_machine_only(guarded: ServerProcess, tenants: Tenants, authority: Authority) -> None:
    """Whoever attaches over TCP gets none, whatever it wants; over the Unix socket it does."""

    def ticket(address: str, ca: bytes | None) -> bytes:
        request = pb.AttachRequest(
            protocol_version=1,
            role=pb.ROLE_WORKER,
            namespace=pb.Namespace(fingerprint=bytes(32), key_bytes=32, num_shards=1),
            shard=pb.Shard(payload_bytes=4096),
            wants_descriptors=True,
        )
        with open_channel(address, token=tenants.tokens["team-a"], ca=ca) as channel:
            events = pb_grpc.KvCacheStub(channel).Attach(request)
            found: bytes = next(events).attached.descriptor_ticket
            events.cancel()
            return found

    assert len(ticket(guarded.unix, None)) == 16
    assert ticket(guarded.tcp, authority.ca.read_bytes()) == b""


def test_secrets_are_nowhere(guarded: ServerProcess, tenants: Tenants, pair: Pair) -> None:
    """Not in the log, not in the arguments, not in the environment, not in what Stats tells."""
    secret = tenants.tokens["team-a"].split(".")[1]
    with engine(guarded, tenants.tokens["team-a"]):
        told = str(guarded.stats(token=tenants.tokens["operator"]))
    process = Path(f"/proc/{guarded.process.pid}")
    places = [told, guarded.log, (process / "cmdline").read_text(), (process / "environ").read_text()]
    key_line = pair.key.read_text().splitlines()[1]

    assert "team-a" in told
    assert not [place for place in places if secret in place or key_line in place]


def test_tokens_follow_their_file(tmp_path: Path) -> None:
    """Added, removed, broken, and on SIGHUP: sessions of a removed token end, others stay."""
    tenants = Tenants(tmp_path / "tokens")
    stays = tenants.add("team-a")
    goes = tenants.add("team-b")
    tenants.write()
    with (
        ServerProcess(tmp_path, "128MiB", "--tokens-file", str(tenants.path)) as server,
        engine(server, stays) as (first, _),
        engine(server, goes) as (second, other),
    ):
        second.save(chain("b", 2, 32))
        tenants.remove("team-b")
        comes = tenants.add("team-b", name="new")
        tenants.write()
        wait_until(lambda: "tokens were read again" in server.log, "the file is noticed")

        assert "token" in next(second.events).closing.reason
        with refused(UNAUTHENTICATED):
            other.lookup(chain("b", 2, 32))
        first.save(chain("a", 1, 32))
        with engine(server, comes) as (_, scheduler):  # the tenant's blocks are still the tenant's
            assert scheduler.lookup(chain("b", 2, 32)).hit_end == 2

        tenants.path.write_text("[tenants")
        wait_until(lambda: "the tokens stay as they were" in server.log, "the broken file is noticed")
        first.save(chain("a", 2, 32))
        tenants.write()
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: server.log.count("tokens were read again") == 2, "it is whole again")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: server.log.count("tokens were read again") == 3, "SIGHUP reads it in any case")
        first.save(chain("a", 3, 32))


# --- sockets


@pytest.mark.parametrize(("options", "mode"), [((), 0o600), (("--socket-mode", "0660"), 0o660)])
def test_who_may_open_the_sockets(tmp_path: Path, options: tuple[str, ...], mode: int) -> None:
    """Both sockets, and from the first moment on: they are made under a closed umask."""
    before = os.umask(0)
    try:
        with ServerProcess(tmp_path, "64MiB", *options) as server:
            for path in (server.socket_path, Path(f"{server.socket_path}.fd")):
                assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_sockets_can_be_another_users(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "64MiB", "--socket-owner", "65534:65533") as server:
        for path in (server.socket_path, Path(f"{server.socket_path}.fd")):
            assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65533)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect(tmp_path: Path) -> None:
    """0600 means it: `nobody` is refused, and may connect when the socket is its group's."""
    program = (
        "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); "
        "socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if sys.argv[1].endswith('.fd') else socket.SOCK_STREAM)"
        ".connect(sys.argv[1])"
    )

    def connects(path: str) -> bool:
        done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=False)
        assert done.returncode == 0 or "PermissionError" in done.stderr, done.stderr
        return done.returncode == 0

    for parent in (tmp_path, *tmp_path.parents):
        if parent != Path("/") and parent != Path("/tmp"):
            parent.chmod(0o755)
    for options, allowed in (((), False), (("--socket-mode", "0660", "--socket-owner", ":65534"), True)):
        with ServerProcess(tmp_path, "64MiB", *options) as server:
            assert connects(str(server.socket_path)) is allowed
            assert connects(f"{server.socket_path}.fd") is allowed


# --- what is refused before anything is bound


def run_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cache_server", "serve", "--memory", "64MiB", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def test_an_open_port_has_to_be_wanted(tmp_path: Path, authority: Authority, pair: Pair, tenants: Tenants) -> None:
    """C72: neither TLS alone nor a token alone opens a port to other machines."""
    tokens = ["--tokens-file", str(tenants.path)]
    for options, missing in (
        ([], "TLS"),
        (tokens, "TLS"),
        (tls(pair), "--tokens-file or --tls-client-ca-file"),
    ):
        for address in ("0.0.0.0:0", "[::]:0", "example.invalid:7100"):
            done = run_serve("--listen", address, *options)
            assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
            assert missing in done.stderr and "--insecure" in done.stderr
    for options in (["--insecure"], [*tls(pair), *tokens], tls(pair, authority)):
        more = ["--listen", "0.0.0.0:0", *options]
        with ServerProcess(tmp_path, "64MiB", *more) as server:
            assert ("whoever reaches the port" in server.log) == (options == ["--insecure"])


def wrong_options(folder: Path, pair: Pair, other: Pair) -> dict[str, tuple[list[str], str]]:
    garbage = folder / "garbage"
    garbage.write_text("garbage")
    cert, key = ["--tls-cert-file", str(pair.cert)], ["--tls-key-file", str(pair.key)]
    tcp = ["--listen", "127.0.0.1:0"]
    return {
        "no key": ([*tcp, *cert], "come together"),
        "no certificate": ([*tcp, *key], "come together"),
        "another's key": ([*tcp, *cert, "--tls-key-file", str(other.key)], "KEY_VALUES_MISMATCH"),
        "a key that is none": ([*tcp, *cert, "--tls-key-file", str(garbage)], "PEM"),
        "a file that is not there": ([*tcp, "--tls-cert-file", "/nowhere", *key], "can be read"),
        "an authority that is none": ([*tcp, *cert, *key, "--tls-client-ca-file", str(garbage)], "PEM"),
        "an authority without TLS": (["--tls-client-ca-file", str(garbage)], "--tls-cert-file"),
        "TLS on Unix sockets only": ([*cert, *key, "--listen", f"unix://{folder}/s"], "HOST:PORT"),
        "no tokens file": (["--tokens-file", "/nowhere"], "can be read"),
        "a tokens file that is none": (["--tokens-file", str(garbage)], "TOML"),
        "allow-xxh3 without tokens": (["--allow-xxh3"], "--tokens-file"),
        "insecure for nothing": (["--insecure"], "no address needs it"),
        "a mode that is none": (["--socket-mode", "rw"], "octal"),
        "an executable socket": (["--socket-mode", "0755"], "octal"),
        "an owner that is nobody": (["--socket-owner", "nobody-at-all"], "knows"),
        "an owner without a name": (["--socket-owner", ":"], "USER"),
    }


def test_wrong_options_are_one_line_and_status_2(tmp_path: Path, authority: Authority, pair: Pair) -> None:
    """The option, the value, what is allowed; no traceback, nothing bound."""
    for name, (options, allowed) in wrong_options(tmp_path, pair, authority.sign("other")).items():
        unix = [] if "--listen" in options else ["--listen", f"unix://{tmp_path}/p.sock"]
        result = CliRunner().invoke(main, ["serve", *options, *unix])
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), f"{name}: {result.output}"
        assert allowed in result.stderr, f"{name}: {result.stderr}"


def test_a_quota_below_a_segment_is_one_line_and_status_2(tmp_path: Path) -> None:
    """Memory is given to tenants in whole segments: known only when there is an arena."""
    small = Tenants(tmp_path)
    small.add("team-a", quota="1MiB")
    done = run_serve("--tokens-file", str(small.write()), "--listen", f"unix://{tmp_path}/p.sock")

    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "at least one segment" in done.stderr


# --- prefixd token


def test_a_token_is_made_for_a_file(tmp_path: Path) -> None:
    """The secret goes into a file that nobody else reads; what is printed is for the tokens file."""

    def token(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cache_server", "token", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    file = tmp_path / "token"
    done = token("team-a", str(file))
    tokens = tmp_path / "tokens.toml"
    tokens.write_text("[tenants.team-a]\n" + done.stdout)
    secret = file.read_text().strip()

    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secret.split(".")[1] not in done.stdout
    with ServerProcess(tmp_path / "s", "64MiB", "--tokens-file", str(tokens)) as server:
        assert server.stats(token=secret).memory_bytes == 64 << 20
        with refused(UNAUTHENTICATED):
            server.stats(token=new_token("team-a")[0])
    assert (token("team-a", str(file)).returncode, token("Team", str(tmp_path / "x")).returncode) == (1, 2)
    assert file.read_text().strip() == secret


def test_commands_reach_a_closed_server(
    guarded: ServerProcess, tenants: Tenants, authority: Authority, tmp_path: Path
) -> None:
    """With their options or variables; without, one line says what the server refuses."""
    file = tmp_path / "token"
    file.write_text(tenants.tokens["operator"])
    given = ["--server", guarded.tcp, "--ca-file", str(authority.ca), "--token-file", str(file)]

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cache_server", *arguments]
        environment = {**os.environ, **environment}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    for command in (["stats"], ["health"], ["ls"], ["keys", "explain"], ["flush", "--all", "--yes"]):
        done = run(*command, *given)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    by_variable = run("stats", "--server", guarded.unix, PREFIXD_TOKEN_FILE=str(file))
    assert by_variable.returncode == 0, by_variable.stderr
    without = run("stats", "--server", guarded.unix)
    assert (without.returncode, len(without.stderr.splitlines())) == (1, 1)
    assert "refuses: a token is needed" in without.stderr
