#!/bin/bash
# Does a spilled run keep to its plan, and does spilling give back what it should?
#
#     benches/spill_memory.sh [DIRECTORY]
#
# Trains the shapes of SmolLM2-135M from random weights for four steps with one commit, on the CPU
# device, in a memory cgroup (version 1, root) limited to the plan's host and device total and 5 %:
# once with all in host, once with as much less host memory as both moments take. Prints for each
# the plan, the peak (VmHWM; Rss of smaps_rollup, sampled; of the cgroup, page cache included) and
# the percentage, then the bytes by which plan and peak fell beside the spilled bytes less what the
# ring grew by.
# The directory needs 7 GB; TERRACE names the program (target/release/terrace).
set -euo pipefail

terrace=${TERRACE:-target/release/terrace}
directory=${1:-$(mktemp -d)}
group=/sys/fs/cgroup/memory/terrace-spill-memory-$$
mkdir -p "$directory/model"
made=(model rows.jsonl run.toml said host spilled store)
trap 'rmdir "$group" 2>/dev/null || true; cd "$directory" && rm -rf "${made[@]}"' EXIT

cat > "$directory/model/config.json" <<JSON
{ "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152,
  "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
  "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_act": "silu",
  "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192,
  "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16" }
JSON
awk 'BEGIN { for (row = 0; row < 64; row++) {
    printf "{\"input_ids\": [1"
    for (i = 1; i < 256; i++) printf ", %d", (row * 7919 + i * i * 31) % 49152
    print "]}" } }' > "$directory/rows.jsonl"
cat > "$directory/run.toml" <<TOML
[model]
path = "$directory/model"
init = "random"
[data]
train = "$directory/rows.jsonl"
seq_len = 256
[train]
steps = 4
[memory]
device = "2 GiB"
host = "16 GiB"
store = [{ path = "$directory/store", size = "4 GiB" }]
# What is kept stays the same: no place of an activation becomes the home of a weight.
recompute = "none"
[checkpoint]
every = 3
keep = 1
TOML

# plan SET...: host, device, moments of all homes, spilled, ring; bytes.
plan() {
    "$terrace" plan "$directory/run.toml" --json "${@/#/--set=}" | python3 -c '
import json, sys
plan = json.load(sys.stdin)
host, sections = plan["host"], plan["sections"]
moments = sum(sections["moment1"].values()) + sum(sections["moment2"].values())
spilled = sum(homes["store"] for homes in sections.values())
print(host["total"], plan["device_arena"]["total"], moments, spilled,
      host["slabs"] * host["slab_bytes"])'
}

# measure NAME SET...: trains under the limit; leaves $total and $peak.
measure() {
    local name=$1 host device moments spilled ring limit rss=0 child now
    shift
    read -r host device moments spilled ring < <(plan "$@")
    total=$((host + device))
    limit=$((total * 105 / 100))
    mkdir "$group"
    echo "$limit" > "$group/memory.limit_in_bytes"
    # Swap is no way out.
    echo 0 > "$group/memory.swappiness"
    bash -c 'echo $$ > "$0/cgroup.procs"; exec "$@"' "$group" "$terrace" train \
        "$directory/run.toml" --device cpu "${@/#/--set=}" "--set=log.dir=$directory/$name" \
        > "$directory/said" 2>&1 &
    child=$!
    while kill -0 $child 2>/dev/null; do
        now=$(awk '/^Rss:/ { print $2 }' /proc/$child/smaps_rollup 2>/dev/null || true)
        [[ ${now:-0} -gt $rss ]] && rss=$now
        sleep 0.2
    done
    wait $child || { cat "$directory/said"; exit 1; }
    peak=$(sed -n 's/^peak memory \([0-9.]*\) \([KMGT]i\)B.*/\1\2/p' "$directory/said")
    peak=$(numfmt --from=iec-i "$peak")
    awk -v name="$name" -v total=$total -v limit=$limit -v peak="$peak" -v rss="$rss" \
        -v group="$(cat "$group/memory.max_usage_in_bytes")" -v spilled="$spilled" 'BEGIN {
        M = 1048576
        printf "%-8s plan %.0f MiB, limit %.0f, spilled %.0f; ", name, total/M, limit/M, spilled/M
        printf "peak %.0f MiB = %.1f %% of the plan; ", peak/M, 100*peak/total
        printf "smaps %.0f, cgroup with page cache %.0f\n", rss/1024, group/M }'
    grep -E '^step 4/' "$directory/said"
    rmdir "$group"
    rm -rf "${directory:?}/$name" "$directory/store" "$directory/said"
}

read -r host device moments _ < <(plan)
measure host "memory.device=${device}B"
host_total=$total host_peak=$peak
read -r _ _ _ _ host_ring < <(plan "memory.device=${device}B")
sets=("memory.device=${device}B" "memory.host=$((host - moments))B")
read -r _ _ _ spilled ring < <(plan "${sets[@]}")
measure spilled "${sets[@]}"
awk -v plan=$((host_total - total)) -v peak=$((host_peak - peak)) -v spilled="$spilled" \
    -v ring=$((ring - host_ring)) 'BEGIN {
    M = 1048576
    printf "spilled %.0f MiB less %.0f by which the ring grew; ", spilled/M, ring/M
    printf "the plan fell by %.0f, the peak by %.0f = %.1f %% of the spilled bytes\n",
        plan/M, peak/M, 100*peak/(spilled-ring) }'
