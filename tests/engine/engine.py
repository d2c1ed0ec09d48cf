"""`Engine`: a real vLLM engine on the CPU, in a process group of its own, as the tests and the demo use it."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]

START_S = 400.0  # an engine start takes 35-60 s on two idle cores
ANSWER_S = 120.0
PLAY_S = 600.0  # hundreds of requests take some 30 s on two idle cores; this guards against hangs

# The engine's own settings that make runs comparable and quiet; `os.environ` of the caller comes below them.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine said about one request, or about what there was of it when its client left."""

    token_ids: list[int]
    num_cached_tokens: int  # by the scheduler side: local and external together
    finish_reason: str
    first_token_s: float | None
    num_preemptions: int | None
    prompt_logprobs: list[float | None] | None = None  # of the prompt's own tokens, where asked for
    times_s: tuple[float, ...] = ()  # of `play`: when its tokens came, from the start of the play


class EngineDiedError(Exception):
    """The engine's process ended, answered an error, or did not answer in time; the end of its log is in the text."""


def connector_config(
    server: str, connector: str = "PrefixCacheConnector", module: str = "connector", **extra: Any
) -> dict[str, Any]:
    """The value of --kv-transfer-config, as in the README, with a longer deadline: here the engines' own threads keep
    both cores so busy that a healthy server can take longer than the default to answer."""
    return {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"server": server, "lookup_timeout_ms": 3000, **extra},
    }


class Engine:
    """Starts on construction; `wait_ready` (or entering it) waits. The log is `log`; temporary files are beside it."""

    def __init__(
        self, log: Path, *, driver: str = "driver", environment: dict[str, str] | None = None, **llm: Any
    ) -> None:
        self.log = log
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._ready = False
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"tests.engine.{driver}", json.dumps(llm)],
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, "TMPDIR": str(log.parent), **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout_s: float = START_S) -> Self:
        if not self._ready:
            self._answer(timeout_s)
            self._ready = True
        return self

    def generate(
        self,
        *prompts: list[int],
        sampling: list[dict[str, Any]] | None = None,
        salts: list[str | None] | None = None,
        loras: list[list[Any] | None] | None = None,
        **params: Any,
    ) -> list[Answer]:
        """All of `prompts` at once. `params` are sampling parameters of every request, `sampling` of each; so are
        cache salts, and adapters as [name, number, path]."""
        said = self._ask("generate", prompts=list(prompts), sampling=sampling or params, salts=salts, loras=loras)
        return [Answer(**one) for one in said["requests"]]

    def generate_one(self, prompt: list[int], **params: Any) -> Answer:
        (answer,) = self.generate(prompt, **params)
        return answer

    def play(self, *requests: dict[str, Any]) -> list[Answer]:
        """Requests that come and leave when they say; of an engine with the driver `async_driver`, which see."""
        return [Answer(**one) for one in self._ask("play", within_s=PLAY_S, requests=list(requests))["requests"]]

    def clear_local(self, *, connector: bool = False) -> None:
        """The engine forgets its own prefix cache; with `connector`, the connector's `reset_cache` is called too."""
        assert self.is_cleared(connector=connector)

    def is_cleared(self, *, connector: bool = False) -> bool:
        """As above; False where vLLM refuses, since a block of its memory is in use by a request."""
        return bool(self._ask("reset", connector=connector)["reset"])

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a counter over all label sets that contain `labels`; 0 where nothing was counted."""
        return sum(
            value
            for one, its_labels, value in self._ask("metrics")["metrics"]
            if one == name and labels.items() <= its_labels.items()
        )

    def close(self) -> None:
        """Ends the engine and all of its processes, kindly at first."""
        with contextlib.suppress(OSError, ValueError):
            print(json.dumps({"do": "quit"}), file=self._process.stdin)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self.kill()

    def kill(self) -> None:
        """Ends all processes of the engine."""
        end_group(self._process)

    def __enter__(self) -> Self:
        try:
            return self.wait_ready()
        except BaseException:
            self.kill()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, command: str, *, within_s: float = ANSWER_S, **arguments: Any) -> dict[str, Any]:
        self.wait_ready()
        try:
            print(json.dumps({"do": command, **arguments}), file=self._process.stdin)
        except OSError as error:
            raise EngineDiedError(self._obituary(f"{command}: {error}")) from error
        return self._answer(within_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise EngineDiedError(self._obituary(f"no answer within {timeout_s:.0f} s")) from None
        if line is None:
            self._answers.put(None)  # for who asks next
            raise EngineDiedError(self._obituary(f"exit status {self._process.wait()}"))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineDiedError(self._obituary(answer["error"]))
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _obituary(self, what: str) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([what, f"the end of {self.log}:", *lines[-60:]])


def end_group(process: subprocess.Popen[Any]) -> None:
    """Ends a process and all others of its group: told first, so that they remove their shared memory, then killed."""

    def exists() -> bool:
        process.poll()  # a zombie of ours counts as a member
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    for number, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + patience_s
        while exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    process.wait()


def wait_until(holds: Any, timeout_s: float, what: str) -> Any:
    """Asks `holds()` until it is true and returns its answer: the one place here that waits for time to pass."""
    deadline = time.monotonic() + timeout_s
    while not (answer := holds()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)
    return answer
