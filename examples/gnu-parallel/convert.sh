#!/usr/bin/env bash
# A batch on several machines with GNU parallel and ssh:   convert.sh HOSTS jobs.yaml [options of `convert batch`]
#
# HOSTS is a file with a host a line, as `parallel --sshloginfile` takes it; ":" is this machine. Every host has the converter, and sees this
# directory under the same path. A host that fails gives its shard to another one, which continues it.
set -euo pipefail
hosts=$1 jobs=$2
shards=$(grep -c . "$hosts")
exec parallel --sshloginfile "$hosts" --workdir "$PWD" --jobs 1 --retries 3 --line-buffer --quote --tagstring 'shard {}' \
  convert batch "$jobs" --shard "{}/$shards" --resume --keep-going --junit "convert-{}.xml" "${@:3}" ::: $(seq "$shards")
