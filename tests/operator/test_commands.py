"""Every command against a running server: what it prints for people, what for programs, and how it gives up."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.cache_server.harness import NAMESPACE, ROOT, Client, ServerProcess, chain, wait_until
from tests.operator.conftest import Watched
from tests.operator.test_settings import prefixd

COMMANDS = [*"serve stats top check ls flush warm keys config token completion health".split()]
WITHOUT_JSON = {"serve", "completion", "health", "keys", "token"}  # they run, print text, or answer with their status


def asked(watched: Watched, *arguments: str) -> "subprocess.CompletedProcess[str]":
    done = prefixd(*arguments, "--server", watched.server.unix)
    assert done.returncode == 0, done.stderr
    return done


def test_help_names_every_command_and_every_command_has_help() -> None:
    """With a sentence, and what it takes."""
    listed = re.findall(r"^  (\w+)  ", prefixd("--help").stdout, re.MULTILINE)

    assert sorted(listed) == sorted(COMMANDS)
    for command in COMMANDS:
        done = prefixd(command, "--help")
        assert done.returncode == 0
        assert done.stdout.startswith(f"Usage: prefixd {command} ") or "Usage: python -m cache_server" in done.stdout
        assert command in WITHOUT_JSON or "--json" in done.stdout, command


def test_stats(watched: Watched) -> None:
    """Counters, memory, namespaces, sessions, operations."""
    text = asked(watched, "stats").stdout
    status = json.loads(asked(watched, "stats", "--json").stdout)

    assert "hit rate of blocks 42.9 %" in text
    assert f"namespace {NAMESPACE.hex()[:12]} a namespace: 62 of 62 blocks complete, 1 shards, 248 MiB" in text
    assert "lookup_hit_blocks 6\n" in text
    assert status["counters"] == watched.traffic.expected
    assert status["memory"]["budget_bytes"] == 256 << 20


def test_ls(watched: Watched) -> None:
    """Namespaces, sizes, ages."""
    heads, row = asked(watched, "ls").stdout.splitlines()
    (said,) = json.loads(asked(watched, "ls", "--json").stdout)

    assert heads.split() == ["NAMESPACE", "TENANT", *"MODEL BLOCKS COMPLETE MEMORY SHARDS AGE IDLE".split()]
    assert row.split()[:4] == [NAMESPACE.hex()[:12], "-", "a", "namespace"]
    assert said["fingerprint"] == NAMESPACE.hex()
    assert (said["blocks"], said["stored_bytes"]) == (62, 248 << 20)
    assert said["age_s"] > 0


def test_top_once_and_as_json(watched: Watched) -> None:
    """One picture over one interval, where there is no terminal."""
    text = asked(watched, "top", "--once", "--interval", "0.2").stdout
    status = json.loads(asked(watched, "top", "--json", "--interval", "0.2").stdout)

    for expected in ("248 MiB of 256 MiB stored", "42.9 % in all", NAMESPACE.hex()[:12], "worker 0", "mapped"):
        assert expected in text
    assert status["per_second"]["commits_stored_bytes"] == 0
    assert status["hit_rate"] == pytest.approx(6 / 14)
    done = prefixd("top", "--server", watched.server.unix)
    assert done.returncode == 2
    assert "top needs a terminal" in done.stderr


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Any]:
    """`tmux(arguments)` on a server of its own."""
    if shutil.which("tmux") is None:
        pytest.skip("no tmux on the PATH (Debian: apt-get install tmux)")
    name = f"prefixd-{os.getpid()}"

    def run(*arguments: str) -> str:
        return subprocess.run(["tmux", "-L", name, *arguments], check=False, capture_output=True, text=True).stdout

    yield run
    run("kill-server")


def test_top_in_a_terminal(tmux: Any, tmp_path: Path) -> None:
    """It shows what happens while it happens, a server that is gone as gone, and ends with Ctrl-C."""
    with ServerProcess(tmp_path) as server, Client(server.unix, 0, descriptors=server.socket_path) as worker:
        command = f"{sys.executable} -m cache_server top --interval 0.2 --server {server.unix}; echo ended $?; sleep 60"
        tmux("new-session", "-d", "-s", "top", "-x", "120", "-y", "50", "-c", str(ROOT), command)

        def screen() -> str:
            return str(tmux("capture-pane", "-p", "-t", "top"))

        wait_until(lambda: "0 B of 256 MiB stored" in screen(), "the first picture", 20)
        wait_until(worker.is_mapped, "segments are handed out")
        worker.save(chain("a", 16))
        wait_until(lambda: "1.0 MiB of 256 MiB stored" in screen(), "what was saved")
        assert "a namespace" in screen()
        server.process.kill()
        wait_until(lambda: "does not answer: UNAVAILABLE" in screen(), "the end of the server", 20)
        assert "1.0 MiB of 256 MiB stored" in screen(), "with the last figures"
        tmux("send-keys", "-t", "top", "C-c")
        wait_until(lambda: "ended 0" in screen(), "the end of top")


def test_flush(tmp_path: Path) -> None:
    """By the first digits of a namespace, or all; not without being told so."""
    with ServerProcess(tmp_path) as server, Client(server.unix, 0, descriptors=server.socket_path) as worker:
        wait_until(worker.is_mapped, "segments are handed out")
        worker.save(chain("a", 4))
        where = ("--server", server.unix)

        refused = prefixd("flush", "--server", server.unix)
        both = prefixd("flush", "abc", "--all", *where)
        unknown = prefixd("flush", "ffff", "--yes", *where)
        not_confirmed = prefixd("flush", "--all", *where)
        left = json.loads(prefixd("ls", "--json", *where).stdout)[0]["blocks"]
        done = prefixd("flush", NAMESPACE.hex()[:6].upper(), "--yes", *where)
        worker.save(chain("b", 3))
        everything = prefixd("flush", "--all", "--yes", "--json", *where)

    assert [one.returncode for one in (refused, both, unknown)] == [2, 2, 2]
    assert "name one namespace" in refused.stderr
    assert "no namespace begins with 'ffff'" in unknown.stderr
    assert not_confirmed.returncode == 1
    assert left == 4
    assert done.stdout == f"4 blocks of {NAMESPACE.hex()[:12]} (a namespace) dropped\n"
    assert json.loads(everything.stdout) == {"flushed_blocks": 3, "redis_pending": False}


@pytest.mark.parametrize("command", [["stats"], ["ls"], ["top", "--once"], ["flush", "--all", "--yes"]])
def test_nobody_there_is_one_line(command: list[str], tmp_path: Path) -> None:
    """Exit status 1, no traceback; an address that is none: status 2."""
    done = prefixd(*command, "--server", f"unix://{tmp_path}/none.sock")
    wrong = prefixd(*command, PREFIXD_SERVER="nowhere")

    assert (done.returncode, wrong.returncode) == (1, 2)
    assert done.stderr == f"prefixd: server: 'unix://{tmp_path}/none.sock' does not answer: UNAVAILABLE\n"
    assert wrong.stderr.startswith("prefixd: server: 'nowhere' is not allowed; ")


# --- warm


class Endpoint(BaseHTTPRequestHandler):
    """What `warm` sees of vLLM's OpenAI server; the real one is asked in tests/engine."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "llama"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["prompt"][0] == 999:
            self._answer(400, {"error": {"message": "too long"}})
            return
        usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 2}}
        self._answer(200, {"usage": usage})

    def _answer(self, status: int, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_arguments: Any) -> None:
        """Not in a test's output."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    Endpoint.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_warm_asks_for_each_prompt_once(endpoint: str, tmp_path: Path) -> None:
    """One token each, of the model that is served."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('[1, 2, 3]\n\n{"prompt_token_ids": [4, 5, 6, 7]}\n')
    done = prefixd("warm", str(file), "--engine", endpoint)
    as_json = prefixd("warm", str(file), "--engine", f"{endpoint}/", "--model", "other", "--json")

    assert done.stdout == "2 prompts, 7 tokens, 4 of them were cached\n"
    assert json.loads(as_json.stdout) == {"prompts": 2, "tokens": 7, "cached_tokens": 4, "failed": []}
    assert sorted(body["prompt"] for body in Endpoint.asked) == [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    assert {(body["model"], body["max_tokens"]) for body in Endpoint.asked} == {("llama", 1), ("other", 1)}


def test_warm_says_which_prompts_failed(endpoint: str, tmp_path: Path) -> None:
    """By number, not by content; the others are computed."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("[1, 2]\n[999, 1]\n")
    done = prefixd("warm", str(file), "--engine", endpoint)

    assert done.returncode == 1
    assert done.stdout == "1 prompts, 2 tokens, 2 of them were cached\n"
    assert done.stderr == "failed: prompt 2: 400 too long\n"


@pytest.mark.parametrize("line", ["{", "[]", "[1.5]", "[true]", "[-1]", '"text"', '{"prompt": [1]}'])
def test_warm_refuses_a_line_that_is_no_prompt(line: str, tmp_path: Path) -> None:
    """Before anything is asked."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"[1]\n{line}\n")
    done = prefixd("warm", str(file), "--engine", "http://127.0.0.1:1")

    assert done.returncode == 2
    assert done.stderr.startswith(f"prefixd: {file}: line 2 is not allowed; a JSON list of token ids")


def test_warm_without_an_engine_is_one_line(tmp_path: Path) -> None:
    """Nobody there, or no address."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("[1]\n")
    nobody = prefixd("warm", str(file), "--engine", "http://127.0.0.1:1")
    no_address = prefixd("warm", str(file), "--engine", "127.0.0.1:1")

    assert (nobody.returncode, no_address.returncode) == (1, 2)
    assert len(nobody.stderr.splitlines()) == len(no_address.stderr.splitlines()) == 1


# --- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    """For each shell one that names the command."""
    done = prefixd("completion", shell)

    assert done.returncode == 0
    assert f"_PREFIXD_COMPLETE={shell}_complete" in done.stdout


def test_bash_completes_commands_and_options() -> None:
    """In a real bash, with the script that is printed."""
    script = prefixd("completion", "bash").stdout
    folder = Path(sys.executable).parent
    complete = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _prefixd_completion prefixd; echo "${COMPREPLY[@]}"'
    said = subprocess.run(
        ["bash", "-c", f"{script}\n{complete}", "bash", "prefixd", "fl"],
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        check=True,
        capture_output=True,
        text=True,
    )

    assert said.stdout.split() == ["flush"]
