"""The generated modules are what the proto says, and load in every environment that vLLM ships for."""

import subprocess
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, make_environment

ROUND_TRIP = """
import google.protobuf
from protos import kv_cache_pb2, kv_cache_pb2_grpc
asked = kv_cache_pb2.LookupRequest(session_id=1, keys=b"k" * 16, first=3, lease=True, wait_ms=7)
assert kv_cache_pb2.LookupRequest.FromString(asked.SerializeToString()) == asked
assert kv_cache_pb2_grpc.KvCacheStub and kv_cache_pb2_grpc.KvCacheServicer
assert kv_cache_pb2.DESCRIPTOR.name == "protos/kv_cache.proto", kv_cache_pb2.DESCRIPTOR.name
print(google.protobuf.__version__)
"""


def test_the_stubs_are_what_the_proto_generates() -> None:
    done = subprocess.run([ROOT / "scripts" / "generate-stubs", "--check"], check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("requirements", "major"),
    [
        pytest.param(("protobuf==6.33.5", "grpcio==1.78.0"), "6.33.5", id="the-oldest-of-all"),
        pytest.param(("protobuf>=7,<8", "grpcio>=1.78"), "7.", id="protobuf-7"),
    ],
)
def test_the_stubs_load_with_protobuf_6_and_7(tmp_path: Path, requirements: tuple[str, ...], major: str) -> None:
    python = make_environment(tmp_path / "venv", *requirements)

    done = subprocess.run([python, "-c", ROUND_TRIP], cwd=ROOT, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(major)
    assert done.stderr == "", "a warning at every start of an engine"
