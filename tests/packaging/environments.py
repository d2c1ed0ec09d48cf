"""Small environments made with uv, for what must hold outside the one that runs the tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def uv(*args: str | Path, cwd: Path = ROOT) -> str:
    """Runs uv and returns what it said, on both streams."""
    program = shutil.which("uv", path=f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}")
    assert program, "scripts/_env.sh puts a uv into .venv where none is on PATH"
    done = subprocess.run(
        [program, "--no-progress", "--color=never", *map(str, args)],
        cwd=cwd,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"uv {args}:\n{done.stdout}"
    return done.stdout


def make_environment(path: Path, *requirements: str) -> Path:
    """Makes a virtual environment with `requirements` and returns its interpreter."""
    uv("venv", "--python", sys.executable, path)
    python = path / "bin" / "python"
    if requirements:
        uv("pip", "install", "--python", python, *requirements)
    return python
