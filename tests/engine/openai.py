"""`OpenAI`: vLLM's OpenAI server on the CPU, in a process group of its own, and what tests ask it."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.engine.engine import ENVIRONMENT, ROOT, START_S, end_group, wait_until
from tests.engine.prefixd import free_port


class OpenAI:
    """Started by entering it, and ended with the block. `option`: the value of --kv-transfer-config."""

    def __init__(
        self, folder: Path, model: str, option: str, *options: str, environment: dict[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "api.log"
        self._folder = folder
        self._environment = environment or {}
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enable-prompt-tokens-details"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--model", model, "--dtype", "float32"),
            *("--block-size", "32", "--enforce-eager", "--served-model-name", "llama"),
            *("--kv-transfer-config", option, *options),
        ]

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env={
                    **os.environ,
                    **ENVIRONMENT,
                    "TMPDIR": str(self._folder),
                    "VLLM_SERVER_DEV_MODE": "1",
                    "PYTHONPATH": str(ROOT),
                    **self._environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            wait_until(
                lambda: self.is_ready() or self._process.poll() is not None, START_S, "the OpenAI server is ready"
            )
            assert self._process.poll() is None, self.log.read_text()[-4000:]
        except BaseException:
            end_group(self._process)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_group(self._process)

    def get(self, path: str, accept: str = "*/*") -> str:
        request = urllib.request.Request(self.url + path, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return str(reply.read().decode())

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer = reply.read()
        return json.loads(answer) if answer else None

    def is_ready(self) -> bool:
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def counter(self, name: str, **labels: str) -> float:
        """The sum over all label sets that contain `labels`."""
        found = re.findall(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        wanted = {f'{name}="{value}"' for name, value in labels.items()}
        return sum(float(value) for its_labels, value in found if all(one in its_labels for one in wanted))
