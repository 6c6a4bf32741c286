#!/usr/bin/env bash
# One row of the paper's table, from data to report. `make paper EMBEDDER=... MODE=...` runs it in the virtual environment.
#
#   bash data/paper.sh qwen3-vl-embedding-2b vl_joint      # run what is not done yet; a killed run goes on where it stopped
#   PRINT=1 bash data/paper.sh clip visual_only            # only print the commands
#
# Every script looks at its own output and skips what is done by the same inputs and flags, so a second call costs seconds.
# Data and the text-only readout are made once and shared by all rows; the last two commands score and show all rows made so far.
# Settings, as environment variables (default): GPUS (1), MODEL (the embedder's hub id), DECODER (Qwen/Qwen3-0.6B), GEB (data/geb),
# TRAIN (data/llava_next), RUNS (runs/paper), RESULTS (results/paper), EXTRACT_FLAGS, FIT_FLAGS, CONTROLS_FLAGS (none).
set -euo pipefail

known="clip siglip qwen3-vl-embedding-2b qwen3-vl-embedding-8b vlm2vec-v2 ume-r1-2b ume-r1-7b embed-rl-2b embed-rl-4b"
embedder=${1:-} mode=${2:-}
if [[ " $known " != *" $embedder "* || -z $embedder ]]; then
    echo "EMBEDDER: expected one of $known; found '$embedder'. For example: make paper EMBEDDER=clip MODE=visual_only" >&2
    exit 2
fi
if [[ $mode != visual_only && $mode != vl_joint ]]; then
    echo "MODE: expected visual_only or vl_joint, found '$mode'" >&2
    exit 2
fi
if [[ $mode == vl_joint && ($embedder == clip || $embedder == siglip) ]]; then
    echo "MODE: the paper has no joint row for $embedder: it embeds an image and a text apart. Use MODE=visual_only" >&2
    exit 2
fi
gpus=${GPUS:-1} geb=${GEB:-data/geb} train=${TRAIN:-data/llava_next} runs=${RUNS:-runs/paper} results=${RESULTS:-results/paper}
decoder=${DECODER:-Qwen/Qwen3-0.6B} row="$embedder-$mode"
read -ra extract_flags <<< "${EXTRACT_FLAGS:-}" || true
read -ra fit_flags <<< "${FIT_FLAGS:-}" || true
read -ra controls_flags <<< "${CONTROLS_FLAGS:-}" || true
launch=(python)
if (( gpus > 1 )); then launch=(torchrun --nproc-per-node "$gpus"); fi
if [[ -n ${MODEL:-} ]]; then extract_flags+=(--model "$MODEL"); fi

step() {                                                # print a command as one can paste it, then run it
    local line="" word
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_./:=+,-]+$ ]]; then line+="$word "; else line+="\"$word\" "; fi
    done
    echo "${line% }"
    if [[ -z ${PRINT:-} ]]; then "$@"; fi
}

step python data/prepare.py geb --out "$geb"
step python data/prepare.py train --out "$train"
for split in train dev test; do
    items=$geb/$split.jsonl images=$geb/images prefix=$runs/vectors/$row-$split
    if [[ $split == train ]]; then items=$train/items.jsonl images=$train/images; fi
    if (( gpus > 1 )) && [[ -z ${PRINT:-} && -e $prefix.meta.json ]]; then
        echo "$prefix: already merged"
        continue
    fi
    step "${launch[@]}" extract.py --embedder "$embedder" --mode "$mode" --items "$items" --images "$images" --out "$prefix" "${extract_flags[@]}"
    if (( gpus > 1 )); then step python extract.py --merge "$gpus" --out "$prefix"; fi
done
common=(--train-items "$train/items.jsonl" --dev-items "$geb/dev.jsonl" --decoder "$decoder" --resume "${fit_flags[@]}")
vectors=(--train-embeddings "$runs/vectors/$row-train" --dev-embeddings "$runs/vectors/$row-dev")
step "${launch[@]}" train_decoder.py fit "${vectors[@]}" "${common[@]}" --out "$runs/readouts/$row"
step "${launch[@]}" train_decoder.py fit --no-embedding "${common[@]}" --out "$runs/readouts/text-only"
step python controls.py run --readout "$runs/readouts/$row" --items "$geb/test.jsonl" --embeddings "$runs/vectors/$row-test" \
    --text-only-readout "$runs/readouts/text-only" --out "$runs/controls/$row" "${controls_flags[@]}"
step python evaluate.py --items "$geb/test.jsonl" --predictions "$runs/controls/*/*.jsonl" --paper results/paper.json --out "$results"
step python results/report.py "$results" --items "$geb/test.jsonl" --images "$geb/images"
