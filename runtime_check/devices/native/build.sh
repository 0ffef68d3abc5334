#!/bin/sh
# Makes t2e_worker.arm64 and cpuid_level.x86_64.so from the sources beside them.
#
#     sh build.sh [COMPILER...]     a compiler that takes clang's -target
#
# Those in this folder were made with zig 0.17.1 (`pip install ziglang==0.17.1`); the same compiler
# gives the same bytes. glibc 2.34 is what LiteRT's own arm64 library needs. Each carries the digest
# of its source.
set -eu
cd "$(dirname "$0")"
[ $# -gt 0 ] || set -- python3 -m ziglang cc
digest() { sha256sum "$1" | cut -d' ' -f1; }
flags="-std=gnu11 -O2 -Wall -Wextra -s"
"$@" -target aarch64-linux-gnu.2.34 $flags -DSOURCE_SHA256="\"$(digest worker.c)\"" \
  -fPIE -pie -o t2e_worker.arm64 worker.c -ldl
"$@" -target x86_64-linux-gnu.2.17 $flags -DSOURCE_SHA256="\"$(digest cpuid_level.c)\"" \
  -fPIC -shared -o cpuid_level.x86_64.so cpuid_level.c
