"""Runs containers of a rendered pod with podman as a kubelet would: its commands, its user, its root file system, its
capabilities, its volumes and its memory limit, each pod with namespaces of its own.

Not here: scheduling, restarts, the network between pods (there is none: `--network none`, or another container's).
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.deploy.containers import ENGINE_IMAGE, SERVER_IMAGE, VALKEY_IMAGE, Container, run_once
from tests.deploy.rendering import Document, bytes_of

_IMAGES = {"prefixd": SERVER_IMAGE, "prefixd-vllm": ENGINE_IMAGE, "docker.io/valkey/valkey": VALKEY_IMAGE}


def options_of(pod: Document, container: Document, folders: Mapping[str, Path], network: str = "none") -> list[str]:
    """Of `podman run`. `folders`: the name of a volume → what is there on this machine; others are emptyDirs."""
    security = {**pod["spec"]["securityContext"], **container["securityContext"]}
    options = [
        f"--user={security['runAsUser']}:{security['runAsGroup']}",
        f"--memory={bytes_of(container['resources']['limits']['memory'])}",
        f"--network={network}",
        "--security-opt=no-new-privileges",
        "--shm-size=64m",  # what a pod gets
    ]
    if "fsGroup" in security:
        options.append(f"--group-add={security['fsGroup']}")
    if security["readOnlyRootFilesystem"]:
        options += ["--read-only", "--read-only-tmpfs=false"]
    options += [f"--cap-drop={name}" for name in security["capabilities"]["drop"]]
    options += [f"--cap-add={name}" for name in security["capabilities"].get("add", [])]
    for variable in container.get("env", []):
        if "value" in variable:
            options.append(f"--env={variable['name']}={variable['value']}")
    for mount in container["volumeMounts"]:
        if mount["name"] in folders:
            suffix = ":ro" if mount.get("readOnly") else ""
            options.append(f"--volume={folders[mount['name']]}:{mount['mountPath']}{suffix}")
        else:
            options.append(f"--mount=type=tmpfs,destination={mount['mountPath']},tmpfs-mode=1777")
    if "command" in container:
        options.append(f"--entrypoint={container['command'][0]}")
    return options


def command_of(container: Document) -> list[str]:
    return [*container.get("command", [])[1:], *container.get("args", [])]


def image_of(container: Document) -> str:
    return _IMAGES[container["image"].rpartition(":")[0]]


def run_init_containers(pod: Document, folders: Mapping[str, Path]) -> None:
    """One after the other, to their end."""
    for container in pod["spec"].get("initContainers", []):
        done = run_once(image_of(container), *command_of(container), options=options_of(pod, container, folders))
        assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def running(
    pod: Document, container: Document, folders: Mapping[str, Path], network: str = "none"
) -> Iterator[Container]:
    """The container, until the `with` block ends."""
    options = options_of(pod, container, folders, network)
    with Container(image_of(container), *command_of(container), options=options) as started:
        yield started
