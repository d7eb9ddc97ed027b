#!/usr/bin/env bash
# Checks converted weights in CI: check.sh OUT RECORDING [options of `convert check`, such as --reference MODULE:FACTORY]
#
# RECORDING is made once, where JAX and the checkpoint are:  convert record MODEL CKPT RECORDING
# Here torch and the PyTorch model's package are enough. Ends with 0 (equal), 1 (different) or 2 (inconclusive); a level
# that is skipped although it is required counts as the last. Reports lie in $REPORTS (default: reports).
set -uo pipefail
out=$1 recording=$2
reports=${REPORTS:-reports}
mkdir -p "$reports"
convert check "$out" --recorded "$recording" \
  --require coverage --require weights --require model \
  --junit "$reports/weights.xml" --html "$reports/weights.html" "${@:3}"
