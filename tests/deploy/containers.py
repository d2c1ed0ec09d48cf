"""Real containers without a registry: images built from deploy/docker on a base that debootstrap makes, and run.

The base is Debian with Python, tagged with the names that the Dockerfiles build from, in a store of our own, so that
nothing of the machine's own images is touched. It is kept over sessions. buildah builds without a nested container
(`--isolation chroot`), since that is what works as root of a machine that is itself confined.

Not here: what is tested.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
STORE = Path("/var/tmp/prefixd-containers")  # overlay needs a file system that is no overlay itself
PROGRAMS = {"podman": "podman", "buildah": "buildah", "runc": "runc", "debootstrap": "debootstrap"}
# Debian's release and Python are those of the base that the Dockerfiles name.
SUITE = "trixie"
INCLUDE = ("python3", "python3-venv", "python3-pip", "ca-certificates", "valkey-server")
SERVER_IMAGE = "localhost/prefixd:test"
ENGINE_IMAGE = "localhost/prefixd-vllm:test"
VALKEY_IMAGE = "localhost/valkey:test"
CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")
# What podman asks for by default is more than a confined machine grants; its health checks are units of systemd's.
_RUN = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024", "--no-healthcheck")


def missing_programs() -> list[str]:
    """Of Debian's packages; empty: containers can be built and run."""
    return [package for program, package in PROGRAMS.items() if shutil.which(program, path=_path()) is None]


def podman(*arguments: str | Path, check: bool = True, timeout_s: float = 120) -> str:
    """Standard output, without the last line's end."""
    done = run_podman(*arguments, timeout_s=timeout_s)
    assert not check or done.returncode == 0, f"podman {arguments}:\n{done.stderr}"
    return done.stdout.rstrip("\n")


def run_podman(*arguments: str | Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return _run("podman", *_store(), "--runtime", "runc", *map(str, arguments), timeout_s=timeout_s)


def run_once(
    image: str, *command: str, options: Sequence[str] = (), timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """A container from its start to its end."""
    return run_podman("run", "--rm", *_RUN, *options, image, *command, timeout_s=timeout_s)


def build(dockerfile: str, image: str) -> None:
    """One of deploy/docker; as it stands there, without arguments."""
    done = _run(
        *("buildah", *_store(), "bud", "--isolation", "chroot", "--format", "docker", "--layers"),
        *("--file", str(DOCKER / dockerfile), "--tag", image, str(ROOT)),
        timeout_s=900,
    )
    assert done.returncode == 0, f"{dockerfile}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def base_of(dockerfile: str, argument: str) -> str:
    """The image that an `ARG NAME=IMAGE` of a Dockerfile names."""
    (image,) = re.findall(rf"^ARG {argument}=(\S+)$", (DOCKER / dockerfile).read_text(), re.MULTILINE)
    return str(image)


def make_base() -> None:
    """Import Debian under every name that is built from. Slow the first time: a minute and a half."""
    names = {
        base_of("cache_server.Dockerfile", "PYTHON_IMAGE"),
        base_of("vllm.Dockerfile", "PYTHON_IMAGE"),
        base_of("vllm.Dockerfile", "VLLM_IMAGE"),
        VALKEY_IMAGE,
    }
    base = f"localhost/base:{SUITE}"
    if run_podman("image", "exists", base).returncode != 0:
        STORE.mkdir(parents=True, exist_ok=True)
        root, archive = STORE / "root", STORE / "root.tar"
        shutil.rmtree(root, ignore_errors=True)
        include = ",".join(INCLUDE)
        done = _run("debootstrap", "--variant=minbase", f"--include={include}", SUITE, str(root), timeout_s=900)
        assert done.returncode == 0, done.stdout[-4000:]
        # A company's own certificate authority is usually known to the host only; pip inside needs it too.
        if Path("/", CERTIFICATES).exists():
            shutil.copyfile(Path("/", CERTIFICATES), root / CERTIFICATES)
        (root / "etc/pip.conf").write_text(f"[global]\ncert = /{CERTIFICATES}\nbreak-system-packages = true\n")
        assert _run("tar", "-C", str(root), "-cf", str(archive), ".", timeout_s=300).returncode == 0
        podman("import", archive, base, timeout_s=300)
        shutil.rmtree(root)
        archive.unlink()
    for name in names:
        podman("tag", base, name)


class Container:
    """One running container; ends with the `with` block."""

    def __init__(self, image: str, *command: str, options: Sequence[str] = ()) -> None:
        self.id = podman("run", "--detach", *_RUN, *options, image, *command)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        podman("rm", "--force", "--time", "0", self.id, check=False)

    @property
    def log(self) -> str:
        done = run_podman("logs", self.id)
        return done.stdout + done.stderr

    def inspect(self) -> dict[str, Any]:
        (found,) = json.loads(podman("inspect", self.id))
        return dict(found)

    @property
    def pid(self) -> int:
        """Of its first process, as the machine sees it."""
        return int(self.inspect()["State"]["Pid"])

    @property
    def is_running(self) -> bool:
        return bool(self.inspect()["State"]["Running"])

    def execute(self, *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """As a probe does."""
        return run_podman("exec", self.id, *command, timeout_s=timeout_s)

    def namespace(self, kind: str) -> str:
        """mnt, ipc, net, …: equal for those that share one."""
        return str(Path(f"/proc/{self.pid}/ns/{kind}").readlink())

    def memory(self) -> tuple[int, int]:
        """What its control group is charged, and its limit; bytes."""
        for line in Path(f"/proc/{self.pid}/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if "memory" in controllers.split(","):
                folder = Path("/sys/fs/cgroup/memory", name.lstrip("/"))
                files = ("memory.usage_in_bytes", "memory.limit_in_bytes")
                break
        else:
            folder, files = Path("/sys/fs/cgroup", name.lstrip("/")), ("memory.current", "memory.max")
        usage, limit = (int((folder / file).read_text()) for file in files)
        return usage, limit

    def wait_until_healthy(self, timeout_s: float = 60) -> float:
        """Seconds until `prefixd health` in it said yes."""
        began = time.monotonic()
        while (done := self.execute("prefixd", "health")).returncode != 0:
            assert time.monotonic() - began < timeout_s and self.is_running, f"{done.stderr}\n{self.log}"
        return time.monotonic() - began


@contextlib.contextmanager
def shared_folder(path: Path, uid: int) -> Iterator[Path]:
    """A folder of the host that belongs to the server's user, as the manifests prepare it."""
    path.mkdir(mode=0o750, parents=True, exist_ok=True)
    os.chown(path, uid, uid)
    yield path


def _store() -> tuple[str, ...]:
    return ("--root", str(STORE / "storage"), "--runroot", str(STORE / "run"))


def _path() -> str:
    return f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/sbin"


def _run(*command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, "PATH": _path()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
