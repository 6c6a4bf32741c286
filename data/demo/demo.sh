# The benchmark in miniature. `make demo` runs these lines in its virtual environment; README shows the same lines.
set -eux
python data/demo/render.py
python extract.py --embedder qwen3-vl-embedding-2b --model data/demo/qwen3-vl-embedding --mode vl_joint --items data/demo/items/train.jsonl --images data/demo/images --out runs/demo/vectors/joint-train
python extract.py --embedder qwen3-vl-embedding-2b --model data/demo/qwen3-vl-embedding --mode vl_joint --items data/demo/items/dev.jsonl --images data/demo/images --out runs/demo/vectors/joint-dev
python extract.py --embedder qwen3-vl-embedding-2b --model data/demo/qwen3-vl-embedding --mode vl_joint --items data/demo/items/test.jsonl --images data/demo/images --out runs/demo/vectors/joint-test
python extract.py --embedder qwen3-vl-embedding-2b --model data/demo/qwen3-vl-embedding --mode visual_only --items data/demo/items/train.jsonl --images data/demo/images --out runs/demo/vectors/visual-train
python extract.py --embedder qwen3-vl-embedding-2b --model data/demo/qwen3-vl-embedding --mode visual_only --items data/demo/items/dev.jsonl --images data/demo/images --out runs/demo/vectors/visual-dev
python extract.py --embedder qwen3-vl-embedding-2b --model data/demo/qwen3-vl-embedding --mode visual_only --items data/demo/items/test.jsonl --images data/demo/images --out runs/demo/vectors/visual-test
python extract.py --embedder clip --model data/demo/clip --mode visual_only --items data/demo/items/train.jsonl --images data/demo/images --out runs/demo/vectors/clip-train
python extract.py --embedder clip --model data/demo/clip --mode visual_only --items data/demo/items/dev.jsonl --images data/demo/images --out runs/demo/vectors/clip-dev
python extract.py --embedder clip --model data/demo/clip --mode visual_only --items data/demo/items/test.jsonl --images data/demo/images --out runs/demo/vectors/clip-test
python train_decoder.py fit --train-items data/demo/items/train.jsonl --train-embeddings runs/demo/vectors/joint-train --dev-items data/demo/items/dev.jsonl --dev-embeddings runs/demo/vectors/joint-dev --decoder data/demo/decoder --out runs/demo/readouts/joint --normalize standardize --epochs 4 --batch-size 64 --lr-projector 2e-3 --lr-decoder 1e-3 --eval-every 100 --resume
python train_decoder.py fit --train-items data/demo/items/train.jsonl --train-embeddings runs/demo/vectors/visual-train --dev-items data/demo/items/dev.jsonl --dev-embeddings runs/demo/vectors/visual-dev --decoder data/demo/decoder --out runs/demo/readouts/visual --normalize standardize --epochs 4 --batch-size 64 --lr-projector 2e-3 --lr-decoder 1e-3 --eval-every 100 --resume
python train_decoder.py fit --train-items data/demo/items/train.jsonl --train-embeddings runs/demo/vectors/clip-train --dev-items data/demo/items/dev.jsonl --dev-embeddings runs/demo/vectors/clip-dev --decoder data/demo/decoder --out runs/demo/readouts/clip --normalize standardize --epochs 4 --batch-size 64 --lr-projector 2e-3 --lr-decoder 1e-3 --eval-every 100 --resume
python train_decoder.py fit --no-embedding --train-items data/demo/items/train.jsonl --dev-items data/demo/items/dev.jsonl --decoder data/demo/decoder --out runs/demo/readouts/text-only --epochs 4 --batch-size 64 --lr-decoder 1e-3 --eval-every 100 --resume
python controls.py run --readout runs/demo/readouts/joint --items data/demo/items/test.jsonl --embeddings runs/demo/vectors/joint-test --text-only-readout runs/demo/readouts/text-only --out runs/demo/controls/joint
python controls.py run --readout runs/demo/readouts/visual --items data/demo/items/test.jsonl --embeddings runs/demo/vectors/visual-test --text-only-readout runs/demo/readouts/text-only --out runs/demo/controls/visual
python controls.py run --readout runs/demo/readouts/clip --items data/demo/items/test.jsonl --embeddings runs/demo/vectors/clip-test --text-only-readout runs/demo/readouts/text-only --out runs/demo/controls/clip
python evaluate.py --items data/demo/items/test.jsonl --predictions "runs/demo/controls/*/*.jsonl" --out results/demo
python results/report.py results/demo --items data/demo/items/test.jsonl --images data/demo/images
