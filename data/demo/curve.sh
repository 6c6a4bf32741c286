# Score and usable bits against bytes per vector. `make demo-curve` runs these lines after `make demo`.
set -eux
python controls.py curve --items data/demo/items/test.jsonl --embeddings runs/demo/vectors/joint-test --train-items data/demo/items/train.jsonl --train-embeddings runs/demo/vectors/joint-train --dev-items data/demo/items/dev.jsonl --dev-embeddings runs/demo/vectors/joint-dev --decoder data/demo/decoder --budgets truncate:8,truncate:16,truncate:32,truncate:64,truncate:128,int8,binary,none --fit-flags "--normalize standardize --epochs 3 --batch-size 64 --lr-projector 2e-3 --lr-decoder 1e-3 --eval-every 100" --out runs/demo/curve
cp runs/demo/curve/curve.json runs/demo/curve/curve.svg results/demo/
