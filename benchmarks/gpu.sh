#!/bin/sh
# What fedtrain does on one GPU, in at most 280 seconds, as JSON lines: see gpu.py.
#
#     benchmarks/gpu.sh [WHEELS] [--small] [--only SECTION]... [--out FILE]
#
# WHEELS is a folder of unpacked wheels (pip install --target, or unzip), for a machine without a network whose
# image has torch; $WHEELS says the same. $PYTHON is the interpreter (python3).
set -eu
case "${1:-}" in
"" | -*) ;;
*)
    WHEELS=$1
    shift
    ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/..:$here${WHEELS:+:$WHEELS}${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
exec "${PYTHON:-python3}" "$here/gpu.py" "$@"
