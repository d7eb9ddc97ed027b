#!/usr/bin/env bash
# Converts every checkpoint below a directory: many_checkpoints.sh MODEL DIR OUT_DIR
# What is already there is kept, so that the script can be started again after a crash.
set -uo pipefail
model=$1 directory=$2 out=$3
mkdir -p "$out"
failed=()
for checkpoint in "$directory"/*/; do
  name=$(basename "$checkpoint")
  [ -e "$out/$name.safetensors" ] && continue
  convert "$model" "$checkpoint" "$out/$name.safetensors" || failed+=("$name")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "not converted: ${failed[*]}" >&2
  exit 1
fi
