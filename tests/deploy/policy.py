"""What every pod has to keep to, as one function from documents to the sentences that say what is wrong.

The one exception is written down here: where the server's sockets lie on the node (a hostPath), a container that
runs as root gives that folder to the server's user, and does nothing else.
"""

from collections.abc import Iterator

from cache_server.config import BASE_BYTES, parse_size
from protos import __version__
from tests.deploy.rendering import Document, bytes_of, containers, option, pods, servers

SERVER_USER = 10001
FOLDER_COMMAND = ["install", "-d", "-o", "10001", "-g", "10001", "-m", "0750", "/run/prefixd"]
FOLDER_CAPABILITIES = {"CHOWN", "DAC_OVERRIDE", "FOWNER"}
RESTRICTED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected",
                      "secret"}  # fmt: skip


def limit_for(memory: str) -> int:
    """The rule of deploy/README.md: --memory, a 64th of it rounded up to MiB, and 256 MiB."""
    mebibytes = parse_size("memory", memory) >> 20
    return (mebibytes + (mebibytes + 63) // 64 + 256) << 20


def violations(found: list[Document]) -> list[str]:
    """Empty: as it should be."""
    wrong = [f"{name}: {line}" for name, pod in pods(found) for line in _of_pod(pod)]
    for _, container in servers(found):
        wrong += [f"{container['name']}: {line}" for line in _of_server_memory(container)]
    return wrong


def _of_pod(pod: Document) -> Iterator[str]:
    spec = pod["spec"]
    security = spec.get("securityContext", {})
    if not (security.get("runAsNonRoot") is True and security.get("runAsUser", 0) > 0):
        yield "the pod may run as root"
    if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "no seccomp profile"
    if spec.get("automountServiceAccountToken") is not False:
        yield "it gets a token of the API server"
    if spec.get("enableServiceLinks") is not False:
        yield "services fill its environment with variables that begin with PREFIXD_"
    if any(spec.get(name) for name in ("hostNetwork", "hostIPC", "hostPID")):
        yield "it shares a namespace with the node"
    paths = [volume["hostPath"]["path"] for volume in spec.get("volumes", []) if "hostPath" in volume]
    if len(paths) > 1 or any(not path.endswith(("/prefixd", "/prefixd/run")) for path in paths):
        yield f"it reaches into the node: {paths}"
    for field, container in containers(pod):
        yield from (f"{container['name']}: {line}" for line in _of_container(container, field, bool(paths)))


def _of_container(container: Document, field: str, has_host_path: bool) -> Iterator[str]:
    security = container.get("securityContext", {})
    prepares = field == "initContainers" and container.get("command") == FOLDER_COMMAND and has_host_path
    if security.get("privileged") or security.get("allowPrivilegeEscalation") is not False:
        yield "it may gain privileges"
    if security.get("readOnlyRootFilesystem") is not True:
        yield "its root file system can be written"
    capabilities = security.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"]:
        yield "it keeps capabilities"
    if set(capabilities.get("add", [])) - (FOLDER_CAPABILITIES if prepares else set()):
        yield f"it adds capabilities: {capabilities['add']}"
    if not prepares and (security.get("runAsNonRoot", True) is not True or security.get("runAsUser", 1) == 0):
        yield "it runs as root"
    resources = container.get("resources", {})
    if "memory" not in resources.get("limits", {}):
        yield "no memory limit"
    if not {"cpu", "memory"} <= set(resources.get("requests", {})):
        yield "no requests"
    image, _, tag = container["image"].rpartition(":")
    if not image or tag == "latest":
        yield f"its image has no version: {container['image']}"
    if image in {"prefixd", "prefixd-vllm"} and tag.removesuffix("-cpu") != __version__:
        yield f"its image is of another version than {__version__}: {container['image']}"
    if field == "containers" and container.get("command", [""])[-1] != "/scripts/form-cluster.sh":
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe not in container:
                yield f"no {probe}"


def _of_server_memory(container: Document) -> Iterator[str]:
    (memory,) = option(container, "memory")
    resources = container["resources"]
    limit = bytes_of(resources["limits"]["memory"])
    if limit != limit_for(memory):
        yield f"--memory={memory} needs a limit of {limit_for(memory) >> 20}Mi, it has {limit >> 20}Mi"
    if resources["requests"]["memory"] != resources["limits"]["memory"]:
        yield "its request is not its limit: the cache fills, and then the node has not that much"
    assert limit_for(memory) >= parse_size("memory", memory) + BASE_BYTES, "the server would refuse this limit"


def restricted_violations(found: list[Document]) -> list[str]:
    """What PodSecurity "restricted" forbids, beyond `violations`."""
    wrong = []
    for name, pod in pods(found):
        for volume in pod["spec"].get("volumes", []):
            wrong += [f"{name}: volume {kind}" for kind in set(volume) - {"name"} - RESTRICTED_VOLUMES]
        for _, container in containers(pod):
            security = container["securityContext"]
            if security["capabilities"].get("add") or security.get("runAsUser") == 0:
                wrong.append(f"{name}: {container['name']} is not restricted")
            wrong += [f"{name}: hostPort" for port in container.get("ports", []) if "hostPort" in port]
    return wrong
