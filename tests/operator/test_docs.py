"""The user's pages are true: every command in them runs, every option is one, the reference is what the code says.

Blocks marked `sh` are run as they stand, line by line, in an empty folder; `prefixd serve` lines stay up until the page
ends or the next one starts. Changed before: places that belong to the reader's machine (see `PLACES`). Blocks marked
`vllm` are commands for an engine: their options are parsed by vLLM, and their settings by the connector; the README's,
which they vary, is run by tests/engine.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from connector.config import ConnectorConfig
from tests.cache_server.harness import ROOT, wait_until
from tests.engine.prefixd import free_port
from tests.operator.test_commands import Endpoint
from tests.operator.test_settings import BARE
from tests.redis.servers import RedisServer

PAGES = ["getting-started", "sizing", "tuning", "troubleshooting", "upgrading", "faq"]
REFERENCE = ["configuration", "metrics"]


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def blocks(name: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def engine() -> Iterator[str]:
    """For `prefixd warm`; tests/engine runs it against a real one."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class Reader:
    """Follows a page on this machine."""

    def __init__(self, folder: Path, redis: RedisServer, engine: str) -> None:
        self.folder = folder
        (folder / "deploy").symlink_to(ROOT / "deploy")
        self.places = {
            "unix:///run/prefixd/": f"unix://{folder}/",
            "127.0.0.1:9464": f"127.0.0.1:{free_port()}",
            "127.0.0.1:50051": f"127.0.0.1:{free_port()}",
            "127.0.0.1:8000": engine,
            "redis://127.0.0.1:6379": redis.url,
            "16GiB": "128MiB",
        }
        # What the reader's default address is.
        self.environment = {**BARE, "PREFIXD_SERVER": f"unix://{folder}/prefixd.sock"}
        self.server: subprocess.Popen[bytes] | None = None

    def run(self, line: str) -> str:
        for theirs, ours in self.places.items():
            line = line.replace(theirs, ours)
        if line.startswith("prefixd serve "):
            self._serve(line)
            return ""
        if line.startswith("prefixd check") and "--listen" not in line:
            line = line.replace("prefixd check", f"prefixd check --listen unix://{self.folder}/prefixd.sock", 1)
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=self.environment, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _serve(self, line: str) -> None:
        self.stop()
        log = self.folder / "log"
        with log.open("wb") as out:
            self.server = subprocess.Popen(
                shlex.split(line), cwd=self.folder, env=self.environment, stdout=out, stderr=out
            )
        wait_until(lambda: "ready on" in log.read_text(), f"{line}: {log.read_text()}", 30)

    def stop(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            assert self.server.wait(20) == 0
            self.server = None


@pytest.mark.parametrize("name", PAGES)
def test_every_command_runs(name: str, tmp_path: Path, redis: RedisServer, engine: str) -> None:
    """In the order of the page."""
    lines = [line for block in blocks(name, "sh") for line in block.splitlines() if line and not line.startswith("#")]
    reader = Reader(tmp_path, redis, engine)
    if name != "getting-started":
        reader.run("prefixd serve --listen unix:///run/prefixd/prefixd.sock --memory 16GiB")
    try:
        said = [reader.run(line) for line in lines]
    finally:
        reader.stop()

    assert lines or name == "faq"
    assert all(said[i] or ">" in lines[i] or "serve" in lines[i] for i in range(len(lines)))


def test_no_code_is_left_out() -> None:
    """Every block of the pages is of a kind that a test looks at."""
    fences = [fence for name in PAGES for fence in re.findall(r"^```(\w*)$", page(name), re.MULTILINE)]

    assert set(fences[::2]) == {"sh", "vllm"}
    assert set(fences[1::2]) == {""}


def vllm_commands() -> list[str]:
    return [line for name in PAGES for block in blocks(name, "vllm") for line in block.splitlines()]


def test_every_engine_command_is_understood() -> None:
    """By vLLM's own parser, and by the connector's."""
    code = """
import json, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.launchers.cli_args import make_arg_parser
parser = make_arg_parser(FlexibleArgumentParser())
for arguments in json.load(sys.stdin):
    parsed = parser.parse_args(arguments)
    print(json.dumps([parsed.kv_transfer_config.kv_connector, parsed.enable_prompt_tokens_details, parsed.block_size]))
"""
    commands = [shlex.split(command) for command in vllm_commands()]
    assert [command[:3] for command in commands] == [["vllm", "serve", "MODEL"]] * 3
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([command[3:] for command in commands]),
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    parsed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]

    assert parsed == [
        ["PrefixCacheConnector", True, None],
        ["PrefixCacheConnector", True, 32],
        ["PrefixCacheConnector", False, None],
    ]


def test_engine_commands_differ_from_the_readme_s_in_settings_only() -> None:
    """Which tests/engine runs."""

    def option(text: str) -> Any:
        (found,) = re.findall(r"--kv-transfer-config '(\{.*?\})'", text)
        return json.loads(found)

    readme = option((ROOT / "README.md").read_text())
    del readme["kv_connector_extra_config"]
    for command in vllm_commands():
        theirs = option(command)
        ConnectorConfig.parse(theirs.pop("kv_connector_extra_config"))
        assert theirs == readme


def test_the_reference_is_what_the_code_says() -> None:
    """docs/configuration.md and docs/metrics.md."""
    done = subprocess.run(
        [sys.executable, "scripts/generate_docs.py", "--check"], cwd=ROOT, check=False, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr


def test_metrics_and_settings_that_pages_name_exist() -> None:
    """By their reference."""
    reference = page("metrics") + page("configuration")
    for name in PAGES:
        for metric in re.findall(r"`((?:vllm:)?prefixd_[a-z_]+)", page(name)):
            assert f"`{metric}" in reference or metric == "vllm:prefixd_", f"{name}: {metric}"
        for flag in re.findall(r"`(--(?:redis|memory|listen|gate|http|log)[a-z-]*)", page(name)):
            assert f"`{flag}`" in reference, f"{name}: {flag}"


def test_links_lead_somewhere() -> None:
    """To files of docs/, and to chapters that exist."""
    for name in (*PAGES, *REFERENCE):
        for target, anchor in re.findall(r"\]\(([a-z-]+\.md)?(?:#([a-z0-9-]+))?\)", page(name)):
            text = (ROOT / "docs" / target).read_text() if target else page(name)
            titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            heads = [re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not anchor or anchor in heads, f"{name}: {target}#{anchor}"
