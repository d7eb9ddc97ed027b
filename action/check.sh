#!/usr/bin/env bash
# The step of action.yml: converts where there are no weights, checks them, and writes the statement if the check has passed.
# Inputs come as variables, never as text of this script: a name of a file must not be run.
set -euo pipefail
mkdir -p "$REPORTS"
if [ -z "$CHECKPOINT$RECORDED" ]; then
  echo "::error::give checkpoint or recorded"
  exit 2
fi
if [ ! -e "$OUT" ]; then
  if [ -z "$CHECKPOINT" ]; then
    echo "::error::there are no weights at $OUT, and no checkpoint to convert"
    exit 2
  fi
  convert run "$MODEL" "$CHECKPOINT" "$OUT"
fi
if [ -n "$RECORDED" ]; then source=(--recorded "$RECORDED"); else source=(--from "$CHECKPOINT"); fi
read -r -a options <<< "$OPTIONS"
echo "sarif=$REPORTS/convert.sarif" >> "$GITHUB_OUTPUT"
code=0
convert check "$OUT" "${source[@]}" --model "$MODEL" --require "$REQUIRE" --junit "$REPORTS/convert.xml" \
  --html "$REPORTS/convert.html" --sarif "$REPORTS/convert.sarif" ${options[@]+"${options[@]}"} | tee "$REPORTS/convert.txt" || code=$?
if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
  printf '### convert check %s\n\n```\n%s\n```\n' "$OUT" "$(cat "$REPORTS/convert.txt")" >> "$GITHUB_STEP_SUMMARY"
fi
if [ "$code" = 0 ]; then
  convert verify "$OUT" --attest "$REPORTS/convert.intoto.json"
  echo "statement=$REPORTS/convert.intoto.json" >> "$GITHUB_OUTPUT"
fi
exit "$code"
