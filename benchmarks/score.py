"""How fast is the scorer? Edit distance against the plain quadratic loop, and each rule on many items with ten answers, in one run.

    python benchmarks/score.py --predictions 100000

READS   evaluate.py beside this folder. WRITES one JSON object on standard output: per string length the microseconds a pair by the plain
loop and by evaluate.py and their ratio (the distances are compared as well), and per rule the seconds for N predictions with ten answers.
Processor time of one core, so that a busy machine decides less; no file is touched in the timed part. The aim is a ratio of 5 or more at
200 characters and seconds for 100,000.
"""
import argparse
import importlib.util
import json
import os
import platform
import random
import sys
import time


def load_evaluate():
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "evaluate.py")
    spec = importlib.util.spec_from_file_location("scorer", path)  # by path: `evaluate` is also the name of a package
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_distance(a, b):
    """The quadratic loop that scorers usually carry: one row of the table at a time."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y)))
    return row[-1]


def timed(function, pairs):
    """Best of three: (microseconds a pair, results)."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        results = [function(a, b) for a, b in pairs]
        best = min(best, time.process_time() - start)
    return best / len(pairs) * 1e6, results


def make_cases(metric, n, rng):
    """n (prediction, item) of one rule with ten answers each; a third of the predictions is right, a third is near, a third is not."""
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5000)]
    for _ in range(n):
        answers = [" ".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(10)]
        item = {"metric": metric, "source": "own", "question": "", "answers": answers}
        prediction = rng.choice([answers[0], answers[3] + "x.", " ".join(rng.choices(words, k=3))])
        if metric == "choice":
            item.update(options=answers[:4], answers=["B"])
        if metric == "yes_no":
            item.update(answers=["Yes"] * 10)
        yield prediction, item


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Time the scorer.", allow_abbrev=False)
    parser.add_argument("--predictions", type=int, default=100_000, help="predictions a rule, ten answers each (default: 100000)")
    parser.add_argument("--pairs", type=int, default=30, help="string pairs a length for the edit distance (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the made-up texts (default: 0)")
    return parser.parse_args(argv)


def main(argv=None):
    args, scorer = parse_args(argv), load_evaluate()
    rng, lengths, rules = random.Random(args.seed), {}, {}
    for length in (10, 50, 200, 1000):
        pairs = []
        for _ in range(args.pairs if length < 1000 else max(1, args.pairs // 10)):
            a = [rng.choice("abcdefghij ") for _ in range(length)]
            b = [c if rng.random() < 0.7 else rng.choice("abcdefghij ") for c in a]  # about 30 percent changed, as in near misses
            pairs.append(("".join(a), "".join(b)))
        (plain, expected), (ours, found) = timed(plain_distance, pairs), timed(scorer.edit_distance, pairs)
        if expected != found:
            raise SystemExit(f"the distances differ at length {length}: {expected} and {found}")
        lengths[length] = {"plain_us": round(plain, 1), "evaluate_us": round(ours, 1), "times_faster": round(plain / ours, 1)}
        print(f"length {length}: {lengths[length]}", file=sys.stderr)
    for metric in scorer.METRICS:
        cases = list(make_cases(metric, args.predictions, rng))
        start = time.process_time()
        for prediction, item in cases:
            scorer.score_one(prediction, item)
        rules[metric] = round(time.process_time() - start, 2)
        print(f"{metric}: {rules[metric]} s for {args.predictions:,} predictions", file=sys.stderr)
    print(json.dumps({"edit_distance": lengths, "predictions": args.predictions, "seconds_per_rule": rules, "seed": args.seed,
                      "python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}, indent=2))


if __name__ == "__main__":
    main()
