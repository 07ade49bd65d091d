#!/usr/bin/env bash
# Make or refresh .venv with torch $TORCH, hdtensor (editable) and all tools.
#
# A stamp in .venv holds what it was made from: this script, pyproject.toml, setup.py, the torch
# version, the Python version and the folder. While these hold, the script does nothing.
#
# TORCH   torch version to install, such as 2.13.0
# PYTHON  interpreter to make .venv from; by default the first of python3, python3.13, python3.12,
#         python3.11 that is new enough. Given one of another version than .venv's, .venv is made anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH=${TORCH:?TORCH must hold a version, such as 2.13.0}
PYTHON=${PYTHON:-}
VENV=.venv
STAMP=$VENV/setup-stamp
LOG=$VENV/setup.log

say() { printf '%s\n' "$*"; }
fail() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
is_supported() { [[ $1 =~ ^3\.([0-9]+)$ ]] && ((BASH_REMATCH[1] >= 11)); }
venv_version() { sed -n 's/^version *= *\([0-9]*\.[0-9]*\).*/\1/p' "$VENV/pyvenv.cfg" 2>/dev/null; }

current_state() {
  sha256sum scripts/setup.sh pyproject.toml setup.py
  printf 'torch %s\npython %s\nfolder %s\n' "$TORCH" "$(venv_version)" "$PWD"
}
has_venv() { [[ -x $VENV/bin/python && (-z $PYTHON || $(version_of "$PYTHON") == "$(venv_version)") ]]; }
is_current() { has_venv && [[ -f $STAMP && $(<"$STAMP") == "$(current_state)" ]]; }

find_python() {
  local found version candidate
  if [[ -n $PYTHON ]]; then
    version=$(version_of "$PYTHON") || fail "PYTHON=$PYTHON does not run; name a Python of version 3.11 or newer."
    is_supported "$version" || fail "PYTHON=$PYTHON is Python $version, but hdtensor needs 3.11 or newer."
    say "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11; do
    if version=$(version_of "$candidate"); then
      found+=" $candidate ($version)"
      is_supported "$version" && say "$candidate" && return
    fi
  done
  fail "hdtensor needs Python 3.11 or newer; found:${found:- no python3 at all}." \
    "Install one, or name one: make setup PYTHON=/path/to/python3.12"
}

make_venv() {
  local python
  python=$(find_python)
  say "[1/3] making $VENV with $python ($(version_of "$python"))"
  rm -rf "$VENV"
  "$python" -m venv "$VENV" || {
    rm -rf "$VENV"
    fail "$python could not make a virtual environment (see above)." \
      "On Debian and Ubuntu the package python3-venv is needed: apt install python3-venv"
  }
}

pip=("$VENV/bin/python" -m pip --disable-pip-version-check install)

# Show of pip's output one line for each file downloaded; the rest is in $LOG.
pip_install() {
  "${pip[@]}" "$@" 2>&1 | tee "$LOG" | sed -un -E \
    -e '/\.metadata/d' \
    -e 's/^ *Downloading ([^ ]*\/)?([^- ]+-[^- ]+)[^ ]*( \(.*\))?.*/      downloading \2\3/p' \
    -e 's/^Installing collected packages: .*/      installing the packages/p' || {
    tail -n 20 "$LOG" >&2
    fail "pip could not install: $*" "Its whole output is in $LOG."
  }
}

# On a terminal pip's own progress bars tell how far gigabytes have come.
install_torch() {
  if [[ -t 1 ]]; then
    "${pip[@]}" "torch==$TORCH" || fail "pip could not install: torch==$TORCH"
  else
    pip_install "torch==$TORCH"
  fi
}

has_torch() { compgen -G "$VENV/lib/python3*/site-packages/torch-$TORCH.dist-info" ||
  compgen -G "$VENV/lib/python3*/site-packages/torch-$TORCH+*.dist-info"; } >/dev/null

is_current && exit 0

# Two makes at once in one checkout: the second waits here and then finds the work done.
if command -v flock >/dev/null; then
  exec 9<pyproject.toml
  flock 9
  is_current && exit 0
fi

if has_venv; then say "[1/3] $VENV exists (Python $(venv_version))"; else make_venv; fi
rm -f "$STAMP"

# torch comes first and by its exact version: whatever else asked for a bare torch would bring
# another one, gigabytes of it.
if has_torch; then
  say "[2/3] torch $TORCH is installed"
else
  say "[2/3] installing torch $TORCH (0.2 to 3 GB: this can take minutes)"
  install_torch
fi

say "[3/3] installing hdtensor and its tools"
echo "torch==$TORCH" >"$VENV/torch-constraint.txt"
pip_install --constraint "$VENV/torch-constraint.txt" --editable '.[dev,hf]'

current_state >"$STAMP"
say "ready: $VENV"
