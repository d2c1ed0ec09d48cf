"""`prefixd health`: whether a server answers and is ready, as an exit status. What probes run.

Health is answered by the server's one event loop, so this fails when that loop is stuck and not only when the process
is gone. It asks nothing of Redis and of the memory: a full cache without a Redis is a healthy one.

0: it serves. 1: it does not, or not within --timeout; one line says which. 2: a setting is not allowed.

Not here: what makes a server healthy (`server.py`).
"""

import click

from cache_server.commands.ask import Server, server_option
from cache_server.commands.text import fail
from cache_server.config import ConfigError
from cache_server.redis_config import parse_seconds


@click.command()
@server_option
@click.option("--timeout", default="3s", show_default=True, metavar="TIME", help="For connecting and the answer.")
def health(address: str, timeout: str) -> None:
    """Exit with 0 if the server is ready, with 1 if not: for probes."""
    server = Server(address)
    try:
        timeout_s = parse_seconds("timeout", timeout)
        if not 0.1 <= timeout_s <= 60:
            raise ConfigError("timeout", timeout, "100ms to 60s")
    except ConfigError as error:
        fail(2, str(error))
    status = server.health(timeout_s)
    if status != "SERVING":
        fail(1, f"server: {address!r} says {status}")
