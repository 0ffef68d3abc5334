#!/bin/sh
# Makes t2e_worker.arm64 from worker.c: sh build_arm64.sh [COMPILER...]
#
# The one in this folder was made with zig 0.17.1 (`pip install ziglang==0.17.1`); the same compiler
# gives the same bytes. glibc 2.34 is what LiteRT's own arm64 library needs.
set -eu
cd "$(dirname "$0")"
[ $# -gt 0 ] || set -- python3 -m ziglang cc -target aarch64-linux-gnu.2.34
digest=$(sha256sum worker.c | cut -d' ' -f1)
"$@" -std=gnu11 -O2 -Wall -Wextra -s -DSOURCE_SHA256="\"$digest\"" -o t2e_worker.arm64 worker.c -ldl
