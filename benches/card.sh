#!/usr/bin/env bash
# What a card is to show, in one script: right, fast, within its budgets. Prints each section as it goes and a table
# last; figures of an H200 are in benches/results/h200.md.
#
#     benches/card.sh                      # builds, then all sections
#     benches/card.sh --built DIR SECTION… # with binaries that lie in DIR
#
# Sections: right agree steps clip64 free64 clip16 free16 full7 kept7 suggested small in24 in12 depth depth180 adamw; by
# name alone those that need what the environment names: spill14clip spill14 spill14long moments residuals (STORE: a
# directory of a disk with 60 GB free), half (STORE: memory will do), real and curves (TOKENS: a file of u16 tokens;
# MODEL: the directory of SmolLM2-135M), fine-tune (MODEL; GSM8K: the directory of its train.jsonl and test.jsonl).
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
configs=tests/fixtures/configs
table=$(mktemp)

built=
if [ "${1:-}" = --built ]; then
    built=$2
    shift 2
else
    cargo build --release --bin terrace
    cargo bench --no-run --bench card
    cargo test --no-run
fi
# The newest binary of a name.
binary() {
    if [ -n "$built" ]; then
        echo "$built/$1"
    elif [ "$1" = terrace ]; then
        echo target/release/terrace
    else
        find target/release/deps target/debug/deps -name "$1-*" -type f -perm -u+x -printf '%T@ %p\n' |
            sort -rn | head -n 1 | cut -d' ' -f2
    fi
}

say() { printf '%-12s %s\n' "$1" "$2" | tee -a "$table"; }

# tests NAME [FILTER…]: a test binary on the card.
tests() {
    local name=$1
    shift
    local said
    said=$(TERRACE_TEST_DEVICE=cuda:0 timeout 280 "$(binary "$name")" "$@" 2>&1)
    grep -E 'FAILED|panicked' <<<"$said" | head -20
    say "$name" "$(grep 'test result' <<<"$said")"
}

# card SECTION OPTION…: steps of a shape; the most that the card had in use beside it.
card() {
    local section=$1 most=0 used
    shift
    echo "--- $*"
    timeout "${LIMIT:-170}" "$(binary card)" "$@" >"$table.card" 2>&1 &
    local running=$!
    while kill -0 $running 2>/dev/null; do
        used=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1)
        [ "$used" -gt "$most" ] && most=$used
        sleep 0.5
    done
    wait $running || echo "exit code $?"
    grep -v '^{' "$table.card" | tail -n 12 | cut -c1-300
    grep -oE '"(rates|waits)":\{[^}]*\}' "$table.card"
    say "$section" "$(grep 'a step,' "$table.card" | tail -n 1 | cut -c1-260)"
    say "" "$(grep 'compute busy' "$table.card") used on the card: $most MiB"
}
seven() { card "$1" --config $configs/qwen2.5-7b/config.json "${@:2}"; }
budgeted() {
    seven "$1" --device-memory "$2" --micro-batch "$3" --micro-batches "$4" --clip 1 --steps 3 --host-memory 112GiB
}
half() { seven "$1" --layers 14 --micro-batch 16 --host-memory 100GiB "${@:2}"; }
deep() { # a tied shape like 1.5B
    printf '%s' '{"architectures":["Qwen2ForCausalLM"],"model_type":"qwen2","hidden_size":1536,
        "intermediate_size":8960,"num_hidden_layers":28,"num_attention_heads":12,"num_key_value_heads":2,
        "vocab_size":151936,"tie_word_embeddings":true,"rms_norm_eps":1e-6,"rope_theta":1000000.0,
        "max_position_embeddings":32768,"hidden_act":"silu"}' >"$table.json"
    card "depth $1" --config "$table.json" --layers "$1" --micro-batch 16 --micro-batches 4 --clip 0 --steps 3 \
        --host-memory "${2:-110GiB}" --recompute all
}
# What the disk does with reads and writes at once, by fio where there is one (FIO names it).
mixed() {
    local by said file="--name=disk --filename=$STORE/mixed --bs=4m --size=6g --direct=1 --ioengine=io_uring"
    by=$(command -v "${FIO:-fio}" || binary terrace-bench)
    # Written once, so that no write has to find room. shellcheck disable=SC2086
    "$by" $file --rw=write --iodepth=8 >/dev/null 2>&1
    # shellcheck disable=SC2086
    said=$("$by" $file --rw=randrw --iodepth=16 --time_based --runtime="${MIXED_SECONDS:-8}" --output-format=json)
    rm -f "$STORE/mixed"
    python3 -c 'import json, sys
job = json.load(sys.stdin)["jobs"][0]
read, write = (job[way]["bw_bytes"] / 1e9 for way in ("read", "write"))
print(f"disk: {read:.2f} + {write:.2f} GB/s by", sys.argv[1])' "$(basename "$by")" <<<"$said"
}
# A step that spills, with the disk measured before it, for its plan, and after.
spilled() { # SECTION OPTION…
    local said
    mkdir -p "$STORE"
    said=$(mixed)
    say "" "$said"
    [ -n "$said" ] || { echo "the disk in $STORE could not be measured" >&2 && return 1; }
    LIMIT=${LIMIT:-500} card "$1" --store "$STORE" --store-size "${SPILL:-56GiB}" --slabs "${SLABS:-48}" --steps 1 \
        ${TRACE:+--trace "$TRACE"} --disk-rate "$(awk '{print $2 + $4}' <<<"$said")GB" "${@:2}"
    say "" "$(grep '^disk: busy' "$table.card")"
    say "" "$(mixed)"
}
fourteen() {
    spilled "$1" --config $configs/qwen2.5-14b/config.json --micro-batch 16 --host-memory 112GiB "${@:2}"
}
# All moments of 4.35 B in the store and, in less host memory, residuals too.
moments() { # SECTION HOST DEVICE
    spilled "$1" --config $configs/qwen2.5-7b/config.json --layers 14 --micro-batch 16 --micro-batches 1 --clip 0 \
        --host-memory "$2" --device-memory "$3"
}
# What is suggested for this machine, with default rates, and the steps that it comes to.
suggested() { # MODEL
    local made words predicted config=$configs/$1/config.json
    made=$("$(binary terrace)" plan --suggest --model $config --device-memory 141GB --host-memory 118GiB \
        --store-space 56GiB --json) || return
    words=$(python3 -c 'import json, sys
row = json.load(sys.stdin)[0]
print("--micro-batch", row["micro_batch"], "--micro-batches", row["micro_batches"], "--clip", row["max_grad_norm"])
print(row["step_seconds"])' <<<"$made")
    predicted=$(tail -n 1 <<<"$words")
    # shellcheck disable=SC2046
    card "$1" --config $config --host-memory 118GiB --steps 3 $(head -n 1 <<<"$words")
    say "" "suggested: $(head -n 1 <<<"$words"), $predicted s a step predicted"
}
# The losses of twenty steps, all in host and half of the state in the store.
half_spilled() {
    local losses=()
    for host in "100GiB" "20GiB --device-memory 40GiB --store $STORE --store-size 40GiB"; do
        # shellcheck disable=SC2086
        LIMIT=400 half "in ${host%% *}" --micro-batches 1 --clip 0 --steps 18 --host-memory $host
        losses+=("$(grep -o '"losses":\[[^]]*\]' "$table.card")")
    done
    say half "$([ -n "${losses[0]}" ] && [ "${losses[0]}" = "${losses[1]}" ] && echo the same bits || echo DIFFERENT)"
    say "" "${losses[0]}"
}
# AdamW beside the stream of the same threads, and DeepSpeed's in turns where Python has it.
adamw() {
    local bytes=8589934592 threads said
    threads=$(nproc)
    for turn in 1 2; do
        said=$("$(binary adamw)" --bytes $bytes)
        echo "$said"
        say "adamw $turn" "$(grep '^{' <<<"$said" | tail -n 1 | cut -c1-300)"
        # 16 bytes a parameter.
        said=$(python3 benches/reference/deepspeed_adam.py --parameters $((bytes / 16)) --threads "$threads" 2>/dev/null)
        say "" "$(tail -n 1 <<<"$said" | cut -c1-300)"
    done
}
curve() { # SECTION DIRECTORY [--weights]
    local said
    said=$(timeout 500 python3 benches/reference/loss_curves.py --terrace "$(binary terrace)" --tokens "$TOKENS" \
        --config "$2" --steps 100 ${3:+"$3"} 2>&1 | grep -v Loading)
    tail -n 24 <<<"$said"
    say "$1" "$(grep 'over all' <<<"$said" | tail -n 1)"
}

every="right agree steps clip64 free64 clip16 free16 full7 kept7 suggested small in24 in12 depth depth180 adamw"
# shellcheck disable=SC2086
[ $# -gt 0 ] || set -- $every
for section in "$@"; do
    echo "=== $section $(date +%T)"
    case $section in
    right) tests golden_kernels && tests cuda_step ;;
    steps) tests golden_step ten_fp32 forward_and packed evaluation ;;
    agree) tests agreement ;;
    clip64) half $section --micro-batches 4 --clip 1 --steps 4 --trace "$table.trace" ;;
    free64) half $section --micro-batches 4 --clip 0 --steps 4 --trace "$table.trace" ;;
    clip16) half $section --micro-batches 1 --clip 1 --steps 8 --trace "$table.trace" ;;
    free16) half $section --micro-batches 1 --clip 0 --steps 8 --trace "$table.trace" ;;
    full7) seven $section --micro-batch 16 --micro-batches 4 --clip 1 --steps 3 --host-memory 112GiB --recompute all ;;
    kept7) seven $section --micro-batch 16 --micro-batches 4 --clip 1 --steps 3 --host-memory 112GiB ;;
    suggested) for model in qwen2.5-1.5b qwen2.5-7b; do suggested $model; done ;;
    adamw) adamw ;;
    small)
        card $section --config $configs/smollm2-135m/config.json --micro-batch 8 --clip 1 --steps 8 \
            --trace "$table.trace"
        ;;
    half) half_spilled ;;
    in24) budgeted $section 24GB 8 8 ;;
    in12) budgeted $section 12GB 4 16 ;;
    depth) for layers in ${DEPTHS:-28 56 112}; do deep $layers; done ;;
    depth180) deep 180 118GiB ;;
    spill14clip) fourteen $section --micro-batches 4 --clip 1 ;;
    spill14) fourteen $section --micro-batches 4 --clip 0 ;;
    spill14long) fourteen $section --micro-batches 16 --clip 0 ;;
    moments) moments $section 16GiB 16GiB ;;
    residuals) moments $section 7GiB 16GiB ;;
    real) curve $section "$MODEL" --weights ;;
    curves) curve smollm2 $configs/smollm2-135m && curve qwen-0.5b $configs/qwen2.5-0.5b ;;
    fine-tune)
        "$(binary terrace)" init "$table.toml" >/dev/null
        "$(binary terrace)" train "$table.toml" --device cuda:0 --set model.path="$MODEL" \
            --set data.train="$GSM8K/train.jsonl" --set data.eval="$GSM8K/test.jsonl" --set data.seq_len=1024 \
            --set train.steps=300 --set train.micro_batch=8 --set train.micro_batches=1 \
            --set train.learning_rate=2e-5 --set train.warmup_steps=20 --set train.eval_every=50 \
            --set checkpoint.every=300 --set log.dir=runs/gsm8k --set log.sample_every=100 2>&1 | tail -n 30
        ;;
    *) echo "no section $section" >&2 && exit 2 ;;
    esac
done
echo "=== $(date +%T)"
cat "$table"
rm -f "$table" "$table".*
