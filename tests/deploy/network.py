"""Several nodes on one machine: network namespaces on one switch, each with an address, each of which can be cut off.

Everything is inside namespaces that are made here, the switch too: nothing of the machine's own network is touched.
Unix sockets have paths, so a test reaches a node's server as an engine of that node does.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def why_not() -> str:
    """Why there can be no network here; empty: there can."""
    if shutil.which("ip") is None:
        return "needs ip (Debian: apt-get install iproute2)"
    try:
        with network(1):
            return ""
    except OSError as error:
        return f"network namespaces cannot be made ({error}): run as root"


@dataclass(frozen=True)
class Node:
    """One namespace."""

    namespace: str
    address: str
    switch: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Of a command that is to run on it."""
        return ("ip", "netns", "exec", self.namespace)

    def cut(self) -> None:
        """As if the cable were out: what is sent is lost, nobody is told."""
        _ip("netns", "exec", self.switch, "ip", "link", "set", f"port-{self.address.rpartition('.')[2]}", "nomaster")

    def heal(self) -> None:
        port = f"port-{self.address.rpartition('.')[2]}"
        _ip("netns", "exec", self.switch, "ip", "link", "set", port, "master", "switch")


@contextlib.contextmanager
def network(num_nodes: int) -> Iterator[list[Node]]:
    """Nodes 192.168.77.1, .2, … that reach each other and nothing else."""
    name = f"prefixd-{os.getpid()}"
    switch = f"{name}-switch"
    nodes = [Node(f"{name}-{number}", f"192.168.77.{number}", switch) for number in range(1, num_nodes + 1)]
    with contextlib.ExitStack() as made:
        for namespace in (switch, *(node.namespace for node in nodes)):
            _ip("netns", "add", namespace)
            made.callback(_ip, "netns", "del", namespace)
        inside = ("netns", "exec", switch, "ip", "link")
        _ip(*inside, "add", "switch", "type", "bridge")
        _ip(*inside, "set", "switch", "up")
        for node in nodes:
            port = f"port-{node.address.rpartition('.')[2]}"
            _ip(*inside, "add", port, "type", "veth", "peer", "name", "eth0", "netns", node.namespace)
            _ip(*inside, "set", port, "master", "switch", "up")
            of_node = ("netns", "exec", node.namespace, "ip")
            _ip(*of_node, "addr", "add", f"{node.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip(*of_node, "link", "set", link, "up")
        yield nodes
