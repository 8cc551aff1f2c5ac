#!/usr/bin/env bash
# A server that computes prompts and one that produces tokens, over one directory, and the proxy.
#   examples/pd.sh MODEL [DIRECTORY [more arguments of vllm serve]]
set -euo pipefail
model=${1:?give a model}
root=${2:-/tmp/ucm-pd}
port=${PORT:-8000}
more=("${@:3}")
config='{"kv_connector": "UCMConnector", "kv_role": "kv_both",
         "kv_connector_extra_config": {"storage_backends": "'$root'"}}'

prefill=${PREFILL_PORT:-$((port + 1))}
decode=${DECODE_PORT:-$((port + 2))}

serves() { # port, process: waits for it, and ends with it
    until curl --silent --fail --output /dev/null "http://127.0.0.1:$1/health"; do
        kill -0 "$2" || exit 1
        sleep 1
    done
}

trap 'kill $(jobs -p) 2> /dev/null' EXIT
started=()
for one in "$prefill" "$decode"; do
    python -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name model \
        --host 127.0.0.1 --port "$one" --kv-transfer-config "$config" "${more[@]}" &
    started+=($!)
done
serves "$prefill" "${started[0]}"
serves "$decode" "${started[1]}"
python -m ucm pd-proxy --port "$port" \
    --prefill "http://127.0.0.1:$prefill" --decode "http://127.0.0.1:$decode" &
serves "$port" $!
curl --silent --fail "http://127.0.0.1:$port/v1/completions" --json '{"model": "model",
    "prompt": "'"${PROMPT:-$(printf 'w%d ' {10..400})}"'", "max_tokens": 8, "temperature": 0}'
echo
curl --silent "http://127.0.0.1:$decode/metrics" | grep '^ucm_loaded_blocks_total'
