"""One port for people, probes and Prometheus, read-only:

    /              the status page (`status_page.html`): one file, nothing from elsewhere
    /status.json   what it shows
    /metrics       Prometheus
    /healthz       200 as long as the serving loop answers: a loop that is stuck does not
    /readyz        200 while calls are served; 503 before that and while draining. Redis does not matter: memory serves

It runs on the loop that serves the engines, so that it tells the truth about it; an answer costs about a millisecond.
There is nothing to change here: whoever may read may read all figures, and no answer holds token ids or prompts.

Not here: the figures (`service.py`), their names (`exposition.py`, `status.py`).
"""

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable
from importlib import resources
from typing import Final

from aiohttp import web

from cache_server.config import TcpAddress
from cache_server.exposition import Exposition
from cache_server.history import EVERY_S, History
from cache_server.status import rates_of, status_of
from protos import kv_cache_pb2 as pb

_PAGE: Final = "status_page.html"


class StatusServer:
    """The HTTP side of one server."""

    def __init__(self, stats: Callable[[], pb.StatsReply]) -> None:
        self.is_ready = False
        self._stats = stats
        self._exposition = Exposition(stats)
        self._history = History()
        self._page = resources.files("cache_server").joinpath(_PAGE).read_text()
        self._policy = _content_policy(self._page)
        self._runner: web.AppRunner | None = None
        self._sampling: asyncio.Task[None] | None = None

    async def start(self, address: TcpAddress) -> str:
        """Listen. Returns the address, with the port that the system chose for port 0. OSError: it cannot be had."""
        app = web.Application()
        app.router.add_get("/", self._get_page)
        app.router.add_get("/status.json", self._get_status)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/healthz", self._get_health)
        app.router.add_get("/readyz", self._get_readiness)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, address.host, address.port).start()
        self._sampling = asyncio.create_task(self._sample())
        port: int = self._runner.addresses[0][1]
        return str(TcpAddress(address.host, port))

    async def close(self) -> None:
        """Answers on their way may end within a second."""
        if self._sampling is not None:
            self._sampling.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _sample(self) -> None:
        while True:
            stats = self._stats()
            self._history.add(stats.uptime_s, stats.stored_bytes, rates_of(stats.counters))
            await asyncio.sleep(EVERY_S)

    async def _get_page(self, _request: web.Request) -> web.Response:
        headers = {
            "Content-Security-Policy": self._policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    async def _get_status(self, _request: web.Request) -> web.Response:
        status = status_of(self._stats()) | {"ready": self.is_ready, "history": self._history.as_columns()}
        return web.json_response(status, headers={"Cache-Control": "no-store"})

    async def _get_metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._exposition.text(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _get_health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _get_readiness(self, _request: web.Request) -> web.Response:
        return web.Response(text="ready\n") if self.is_ready else web.Response(status=503, text="not ready\n")


def _content_policy(page: str) -> str:
    """Only the page's own script and style, and answers of this server."""

    def hash_of(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert len(found) == 1, f"the page has {len(found)} {tag} elements"
        return "'sha256-" + base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {hash_of('script')}; "
        f"style-src {hash_of('style')}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
