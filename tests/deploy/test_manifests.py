"""Every overlay and every values file: it renders, it is valid, it keeps to the policy, its parts fit together."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cache_server.cli import health, serve
from cache_server.config import parse_config
from cache_server.redis_config import RedisOptions, parse_redis
from connector.config import ConnectorConfig
from tests.deploy.policy import restricted_violations, violations
from tests.deploy.rendering import (
    ALL,
    CHART,
    OVERLAYS,
    VALUES,
    Document,
    bytes_of,
    containers,
    documents,
    engines,
    helm,
    option,
    pods,
    run,
    servers,
    text_of,
)

MINORS = ("1.30", "1.33", "1.37")  # the oldest that the chart admits, one between, the newest there is a schema of
HAVE_ENGINES = [name for name in ALL if name != "chart external-redis"]
# What the README tells people to make, or to leave out.
SECRETS_OF_PEOPLE = {"prefixd-redis", "redis-of-the-company"}


def validate(file: Path, minor: str) -> tuple[int, str]:
    done = run("kubernetes-validate", "--strict", "--quiet", "-k", minor, file)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("minor", MINORS)
def test_everything_is_valid_in_the_strict_sense(tmp_path: Path, minor: str) -> None:
    """No field is unknown; the one kind without a schema is that of the Prometheus operator."""

    # Most documents are in several renderings: each is looked at once.
    different = {json.dumps(document, sort_keys=True) for name in ALL for document in documents(name)}
    file = tmp_path / "all.yaml"
    file.write_text("\n---\n".join(sorted(different)))
    status, said = validate(file, minor)

    assert status == 0, said
    assert {line.split("Couldn't find ")[1] for line in said.splitlines()} == {
        f"schema for kind ServiceMonitor with api version monitoring.coreos.com/v1 for kubernetes version {minor}"
    }


@pytest.mark.parametrize("minor", MINORS)
def test_the_validator_sees_a_field_that_does_not_exist(tmp_path: Path, minor: str) -> None:
    """Positive control."""

    file = tmp_path / "wrong.yaml"
    file.write_text(text_of("base").replace("readOnlyRootFilesystem", "readonlyRootFilesystem", 1))
    status, said = validate(file, minor)

    assert status != 0
    assert "readonlyRootFilesystem" in said


@pytest.mark.parametrize("name", [name for name in ALL if "cluster" in name])
def test_the_service_monitor_watches_a_port_of_a_service(name: str) -> None:
    """It has no schema here, so its fields are compared with the few that there should be."""

    (monitor,) = [document for document in documents(name) if document["kind"] == "ServiceMonitor"]
    (endpoint,) = monitor["spec"].pop("endpoints")
    services = [
        document
        for document in documents(name)
        if document["kind"] == "Service" and _selects(monitor["spec"]["selector"], document["metadata"]["labels"])
    ]

    assert set(monitor["spec"]) == {"selector"}
    assert endpoint == {"port": "http", "path": "/metrics", "interval": "15s"}
    assert [port["name"] for service in services for port in service["spec"]["ports"]] == ["http"]


# --- policy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_it_keeps_to_the_policy(name: str) -> None:
    """Not root, nothing writable, no privilege, limits, probes; memory as --memory needs it."""

    assert violations(documents(name)) == []


@pytest.mark.parametrize("name", ["overlay remote-daemon", "chart remote-daemon"])
def test_the_remote_server_keeps_to_restricted(name: str) -> None:
    """The way for clusters that permit no hostPath; the others do not pretend to."""

    assert restricted_violations(documents(name)) == []
    assert {line.split(": ")[1] for line in restricted_violations(documents("base"))} >= {"volume hostPath"}


def test_the_namespaces_say_what_they_permit() -> None:
    """A namespace that forbids a hostPath would leave the DaemonSet without pods, with no word at the pod."""

    for name in [name for name in ALL if not name.startswith("chart")]:
        (namespace,) = [document for document in documents(name) if document["kind"] == "Namespace"]
        level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]

        assert level == ("restricted" if restricted_violations(documents(name)) == [] else "privileged")


def _server(found: list[Document]) -> Document:
    ((_, container),) = servers(found)
    return container


def _pod(found: list[Document]) -> Document:
    ((pod, _),) = servers(found)
    spec: Document = pod["spec"]
    return spec


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda found: _pod(found)["securityContext"].pop("runAsNonRoot"), "may run as root"),
        (lambda found: _pod(found)["securityContext"].update(runAsUser=0), "may run as root"),
        (lambda found: _pod(found)["securityContext"].pop("seccompProfile"), "no seccomp profile"),
        (lambda found: _pod(found).pop("automountServiceAccountToken"), "a token of the API server"),
        (lambda found: _pod(found).pop("enableServiceLinks"), "services fill its environment"),
        (lambda found: _pod(found).update(hostIPC=True), "shares a namespace"),
        (lambda found: _pod(found)["volumes"][0]["hostPath"].update(path="/run"), "reaches into the node"),
        (lambda found: _server(found)["securityContext"].update(privileged=True), "gain privileges"),
        (lambda found: _server(found)["securityContext"].pop("readOnlyRootFilesystem"), "can be written"),
        (lambda found: _server(found)["securityContext"]["capabilities"].pop("drop"), "keeps capabilities"),
        (lambda found: _server(found)["securityContext"]["capabilities"].update(add=["CHOWN"]), "adds capabilities"),
        (lambda found: _server(found)["securityContext"].update(runAsUser=0), "prefixd: it runs as root"),
        (lambda found: _server(found)["resources"].update(requests={}), "no requests"),
        (lambda found: _server(found).update(image="prefixd:9.9.9"), "another version"),
        (lambda found: _server(found).update(image="prefixd:latest"), "no version"),
        (lambda found: _server(found).pop("livenessProbe"), "no livenessProbe"),
        (lambda found: _server(found)["args"].__setitem__(2, "--memory=17GiB"), "needs a limit of 17936Mi"),
        (lambda found: _server(found)["resources"]["requests"].update(memory="1Gi"), "request is not its limit"),
        (lambda found: _pod(found)["initContainers"][0].update(command=["sh"]), "socket-folder: it runs as root"),
    ],
)
def test_the_policy_sees_each_fault(break_it: Callable[[list[Document]], object], said: str) -> None:
    """Positive control, one field at a time."""

    found = documents("base")
    break_it(found)
    if said == "no requests":
        _server(found)["resources"]["requests"] = {"memory": _server(found)["resources"]["limits"]["memory"]}

    assert any(said in line for line in violations(found)), violations(found)


# --- what the image has ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_server_is_told_only_what_it_understands(name: str) -> None:
    """Each argument is read by the command itself."""

    ((_, container),) = servers(documents(name))
    given = serve.make_context("prefixd serve", list(container["args"][1:])).params
    config = parse_config(given["listen"], given["memory"], given["gate_share"])
    redis = parse_redis(RedisOptions(given["url"], ttl=given["redis_ttl"] if given["url"] else None), {})

    assert str(config.listen[0]) == "unix:///run/prefixd/prefixd.sock"
    assert (redis is not None) == (name not in {"base", "overlay single-node", "chart", "chart single-node"})


@pytest.mark.parametrize("name", ALL)
def test_probes_run_what_the_image_has_and_end_in_time(name: str) -> None:
    """C70: `prefixd health`, whose own deadline is shorter than the probe's; a stuck server is restarted in 30 s."""

    ((_, container),) = servers(documents(name))
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]

    for probe in probes:
        program, command, *options = probe["exec"]["command"]
        given = health.make_context("prefixd health", options).params
        assert (program, command) == ("prefixd", "health")
        assert given["address"] in option(container, "listen")
        assert float(given["timeout"].removesuffix("s")) + 1 < probe["timeoutSeconds"]
    startup, _, liveness = probes
    assert liveness["failureThreshold"] * liveness["periodSeconds"] + liveness["timeoutSeconds"] <= 30
    assert startup["periodSeconds"] <= 5


@pytest.mark.parametrize("name", HAVE_ENGINES)
def test_the_engine_finds_the_server(name: str) -> None:
    """By the same socket in the same folder of the node, as the same user; or by a Service that leads to its port."""

    found = documents(name)
    ((server_pod, server),) = servers(found)
    ((pod, engine),) = engines(found)
    (text,) = option(engine, "kv-transfer-config")
    transfer = json.loads(text)
    config = ConnectorConfig.parse(transfer.pop("kv_connector_extra_config"))

    assert transfer == {
        "kv_connector": "PrefixCacheConnector",
        "kv_connector_module_path": "connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    if config.address.is_local:
        assert config.server in option(server, "listen")
        assert _host_path(pod, engine, "/run/prefixd") == _host_path(server_pod, server, "/run/prefixd")
        assert pod["spec"]["securityContext"]["runAsUser"] == server_pod["spec"]["securityContext"]["runAsUser"]
    else:
        (service,) = [
            document
            for document in found
            if document["kind"] == "Service" and document["metadata"]["name"] == config.address.host
        ]
        (port,) = service["spec"]["ports"]
        (container_port,) = server["ports"]
        assert port["port"] == config.address.port
        assert port["targetPort"] == container_port["name"]
        assert f"0.0.0.0:{container_port['containerPort']}" in option(server, "listen")
        assert _selects({"matchLabels": service["spec"]["selector"]}, server_pod["metadata"]["labels"])


def _host_path(pod: Document, container: Document, path: str) -> str:
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == path]
    (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == mount["name"]]
    return str(volume["hostPath"]["path"])


@pytest.mark.parametrize("name", ALL)
def test_redis_has_room_above_its_data_and_forgets_what_was_used_least(name: str) -> None:
    """A container that is killed when Redis is full would lose everything."""

    for owner, pod in pods(documents(name)):
        for _, container in containers(pod):
            command = " ".join(container.get("args", []))
            if "valkey-server" not in command:
                continue
            number, unit = re.findall(r"--maxmemory (\d+)(mb|gb)", command)[0]
            data = int(number) << {"mb": 20, "gb": 30}[unit]

            assert bytes_of(container["resources"]["limits"]["memory"]) * 4 >= data * 5, owner
            assert "--maxmemory-policy allkeys-lru" in command


# --- parts that refer to each other ---------------------------------------------------------------------------


def _selects(selector: Document, labels: Document) -> bool:
    assert set(selector) == {"matchLabels"}, selector
    return bool(selector["matchLabels"].items() <= labels.items())


@pytest.mark.parametrize("name", ALL)
def test_every_selector_selects_something(name: str) -> None:
    """Services, budgets and network policies are about pods that are there."""

    found = documents(name)
    labels = [pod["metadata"]["labels"] for _, pod in pods(found)]
    selectors = []
    for document in found:
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            selectors.append({"matchLabels": spec["selector"]})
        elif document["kind"] == "NetworkPolicy":
            selectors.append(spec["podSelector"])
            selectors += [
                peer["podSelector"]
                for rule in spec.get("ingress", [])
                for peer in rule.get("from", [])
                if "podSelector" in peer
            ]
        elif document["kind"] in {"PodDisruptionBudget", "DaemonSet", "Deployment", "StatefulSet"}:
            selectors.append(spec["selector"])
    lonely = [selector for selector in selectors if not any(_selects(selector, one) for one in labels)]

    assert len(selectors) >= 2
    assert lonely == []


@pytest.mark.parametrize("name", ALL)
def test_every_secret_and_config_map_is_there_or_is_for_people_to_make(name: str) -> None:
    """Else pods wait for ever."""

    found = documents(name)
    made = {(document["kind"], document["metadata"]["name"]) for document in found}
    wanted = set()
    for _, pod in pods(found):
        for volume in pod["spec"].get("volumes", []):
            if "secret" in volume:
                wanted.add(("Secret", volume["secret"]["secretName"]))
            if "configMap" in volume:
                wanted.add(("ConfigMap", volume["configMap"]["name"]))
        for _, container in containers(pod):
            for variable in container.get("env", []):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference and not reference.get("optional"):
                    wanted.add(("Secret", reference["name"]))

    assert wanted - made <= {("Secret", secret) for secret in SECRETS_OF_PEOPLE}


@pytest.mark.parametrize("name", ALL)
def test_the_server_may_reach_its_redis(name: str) -> None:
    """As far as a policy of ours has a say."""

    found = documents(name)
    ((pod, container),) = servers(found)
    (policy,) = [
        document
        for document in found
        if document["kind"] == "NetworkPolicy" and _selects(document["spec"]["podSelector"], pod["metadata"]["labels"])
    ]
    ranges = [
        range(port["port"], port.get("endPort", port["port"]) + 1)
        for rule in policy["spec"]["egress"]
        for port in rule["ports"]
        if port["protocol"] == "TCP"
    ]

    for url in option(container, "redis"):
        for port in map(int, re.findall(r":(\d+)", url)):
            assert any(port in one for one in ranges), (url, ranges)


# --- the chart ------------------------------------------------------------------------------------------------


def _comparable(found: list[Document]) -> dict[tuple[str, str], Document]:
    """Without what only one of them says: namespaces, Helm's labels and hooks, hashes in generated names, and the
    policy of pulling, which is Kubernetes' own where it is not said."""
    text = json.dumps(found)
    for document in found:
        name = document["metadata"]["name"]
        if document["kind"] in {"Secret", "ConfigMap"}:
            text = text.replace(f'"{name}"', json.dumps(re.sub(r"-[a-z0-9]{10}$", "", name)))
    result = {}
    for document in json.loads(text):
        if document["kind"] == "Namespace":
            continue
        metadata = document["metadata"]
        metadata.pop("namespace", None)
        metadata.pop("annotations", None)
        labels = metadata.pop("labels", {})
        if document["kind"] in {*(kind for kind in ("Service",)), "DaemonSet", "Deployment", "StatefulSet"}:
            # Something selects by these.
            metadata["labels"] = {
                key: value for key, value in labels.items() if key.endswith(("kubernetes.io/name", "io/component"))
            }
        for _, pod in pods([document]):
            for _, container in containers(pod):
                container.pop("imagePullPolicy", None)
                for text in container.get("args", []):
                    if text.startswith("--kv-transfer-config="):
                        sorted_text = json.dumps(json.loads(text.partition("=")[2]), sort_keys=True)
                        container["args"][container["args"].index(text)] = sorted_text
        result[document["kind"], metadata["name"]] = document
    return result


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_chart_renders_what_the_overlay_does(name: str) -> None:
    """Two ways to the same thing: neither may drift."""

    mine, theirs = _comparable(documents(f"overlay {name}")), _comparable(documents(f"chart {name}"))

    assert set(mine) == set(theirs)
    for key, document in mine.items():
        assert theirs[key] == document, key


def test_the_comparison_sees_a_difference() -> None:
    """Positive control."""

    found = documents("overlay single-node")
    changed = copy.deepcopy(found)
    _server(changed)["livenessProbe"]["periodSeconds"] = 11

    assert _comparable(found) != _comparable(changed)


def test_the_chart_passes_lint() -> None:
    """With every values file, warnings included."""

    for values in ([], *(["-f", CHART / "values" / f"{name}.yaml"] for name in VALUES)):
        done = helm("lint", "--strict", CHART, *values)

        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("server.memroy=1GiB", "memroy"),
        ("server.memory=16", "memory"),
        ("server.memory=16Gi", "memory"),
        ("server.mode=sidecar", "mode"),
        ("redis.mode=external", "url"),
        ("redis.url=redis://host:6379", "url"),
        ("redis.mode=external,redis.url=redis://user:secret@host:6379", "url"),
        ("engine.connector.server=host:1", "connector"),
        ("engine.replicas=-1", "replicas"),
    ],
)
def test_the_schema_refuses(setting: str, named: str) -> None:
    """A mistake costs a line, not a pod that does not start. A password belongs into a secret."""

    done = helm("template", "prefixd", CHART, "--set", setting)

    assert done.returncode != 0
    assert named in done.stderr


@pytest.mark.parametrize(
    ("memory", "limit"), [("64MiB", "321Mi"), ("1000MiB", "1272Mi"), ("16GiB", "16896Mi"), ("2TiB", "2130176Mi")]
)
def test_the_chart_computes_the_limit_from_the_memory(memory: str, limit: str) -> None:
    """C67: --memory, a 64th rounded up, and 256 MiB."""

    done = helm("template", "prefixd", CHART, "--set", f"server.memory={memory}")
    found = [document for document in yaml.safe_load_all(done.stdout) if document]

    assert _server(found)["resources"]["limits"]["memory"] == limit
    assert _server(found)["resources"]["requests"]["memory"] == limit
    assert violations(found) == []


def test_another_release_has_names_of_its_own() -> None:
    """Two in one namespace, as long as they do not share a folder of the node."""

    one, two = (
        {(document["kind"], document["metadata"]["name"]) for document in yaml.safe_load_all(done.stdout) if document}
        for done in (helm("template", release, CHART) for release in ("a", "b"))
    )

    assert one
    assert not one & two
