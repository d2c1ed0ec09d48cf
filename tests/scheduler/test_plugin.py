"""`connector.plugin` at vLLM's door: settings, names, versions. vLLM is real, no engine is started."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeServer
from tests.scheduler.harness import Engine

SERVER = {"server": "unix:///tmp/nobody-listens-here.sock"}


def _configure(model: Path, *, module_path: str | None = "connector", **settings: Any) -> Any:
    """What `vllm serve` does before it loads anything: arguments become a VllmConfig."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = KVTransferConfig(
        kv_connector="PrefixCacheConnector",
        kv_connector_module_path=module_path,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=settings,
    )
    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, block_size=32, kv_transfer_config=transfer
    ).create_engine_config()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, r"prefixd: kv_connector_extra_config\.server is missing: .*HOST:PORT"),
        ({"servr": "unix:///x"}, r"prefixd: .*servr = 'unix:///x': unknown; did you mean 'server'\?"),
        ({"server": "http://host:1"}, r"prefixd: .*server = 'http://host:1': unix:///ABSOLUTE/PATH"),
        ({"server": "host"}, r"prefixd: .*server = 'host': .*HOST:PORT"),
        ({"server": "host:abc"}, r"prefixd: .*server = 'host:abc'"),
        ({**SERVER, "staging_bytes": "10"}, r"prefixd: .*staging_bytes = '10': .*unit"),
        ({**SERVER, "lookup_timeout_ms": -1}, r"prefixd: .*lookup_timeout_ms = -1"),
        ({**SERVER, "hash": "md5"}, r"prefixd: .*hash = 'md5': xxh3_128 or sha256"),
    ],
)
def test_a_wrong_setting_ends_the_process_with_one_line_before_anything_is_loaded(model, settings, line):
    with pytest.raises(SystemExit, match=line) as ended:
        _configure(model, **settings)

    assert "\n" not in str(ended.value)


def test_right_settings_are_taken(model):
    config = _configure(model, **SERVER)

    assert config.kv_transfer_config.kv_connector == "PrefixCacheConnector"


def test_the_name_alone_is_enough_once_registered_and_settings_are_checked_then_too(model):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from connector.plugin import PrefixCacheConnector, register

    register()
    register()  # vLLM loads plug-ins in every process, and some processes twice
    config = _configure(model, module_path=None, **SERVER)

    assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is PrefixCacheConnector
    with pytest.raises(SystemExit, match="did you mean 'server'"):
        _configure(model, module_path=None, sever="x")


def test_the_hybrid_kv_cache_manager_stays_on(model):
    assert not _configure(model, **SERVER).scheduler_config.disable_hybrid_kv_cache_manager


def test_every_hook_of_the_installed_vllm_is_known():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from connector.plugin import unknown_hooks

    class OfTomorrow(KVConnectorBase_V1):
        def teleport_blocks(self) -> None: ...

    assert unknown_hooks(KVConnectorBase_V1) == []
    assert unknown_hooks(OfTomorrow) == ["teleport_blocks"]


def test_a_scheduler_output_of_before_0_26_is_too_old():
    from vllm.v1.core.sched.output import SchedulerOutput

    from connector.plugin import is_too_old

    @dataclasses.dataclass
    class Of025:
        num_scheduled_tokens: dict[str, int]

    assert is_too_old(Of025)
    assert not is_too_old(SchedulerOutput)


def test_a_best_effort_cache_never_requires_delivery():
    """C62: it is derived from the role otherwise, and kv_both would recompute requests for our sake."""
    from connector.plugin import PrefixCacheConnector

    assert PrefixCacheConnector.requires_kv_delivery.fget(object()) is False


def test_what_an_engine_says_of_its_namespace_proves_its_fingerprint(model):
    """Tokens have rights by the operator's name of it: what stands beside it for people must not undo the proof."""
    from cache_server.explain import described, lines_of
    from cache_server.tenants import proven_name

    engine = Engine(model, FakeServer(), extra_config={"namespace": "llama-8b"})
    hello = engine.connector._hello("scheduler")

    assert proven_name(hello.namespace_text, hello.fingerprint) == "llama-8b"
    assert proven_name(hello.namespace_text.replace("llama-8b", "llama-7b"), hello.fingerprint) is None
    lines = list(lines_of(described(hello.fingerprint, hello.namespace_text)))
    assert any(line.startswith("  label = ") for line in lines), "positive control: it says something for people"
    assert not [line for line in lines if "not what the fingerprint was made of" in line]
