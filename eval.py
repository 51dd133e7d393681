"""
Measure trained runs: exact match on every test set, as one Markdown table per task.

    python eval.py out/copy-*                    # a row per attention, mean and spread over seeds
    python eval.py out/copy-* --examples 2000    # measure again, on more examples
    python eval.py out/copy-rope-s0 --mistakes 3 # what it got wrong: expected and predicted
    python eval.py out/copy-* --json

An example counts as right only if every scored token is the model's first choice, given the true tokens before it
(teacher forcing). That equals exact match of greedy generation: if the first choice is right at every position of the
true sequence, then greedy generation says the first answer token right, so its prefix is the true one, so it says the
second right, and so on to the end; and at the first wrong choice generation, too, leaves the true answer. One forward
pass scores a sequence.
"""

import json
import math
import os
import statistics
import warnings
from collections import OrderedDict

import torch

from model import GPT, GPTConfig
from tasks import Parser, fail, integer, make_task, script, show

FORMAT = 1                      # of ckpt.pt
TEST_SEED = 0                   # every run meets the same test examples
TOKENS_PER_BATCH = 8_192       # memory in evaluation: tokens, not sequences


def predictions(model, task, split, examples, device):
    """Yield x, y and the model's first choices, numpy (B, T) each, over the first examples of a test set."""
    model.eval()
    size = max(1, TOKENS_PER_BATCH // task.batch(split, TEST_SEED, 0, 1)[0].shape[1])
    for step, start in enumerate(range(0, examples, size)):
        x, y = task.batch(split, TEST_SEED, step, size)
        x, y = x[:examples - start], y[:examples - start]
        with torch.no_grad():
            logits, _ = model(torch.from_numpy(x).to(device))
        yield x, y, logits.argmax(-1).cpu().numpy()


def right(y, predicted):
    """(B,), True where every scored token of the example is predicted."""
    return ((predicted == y) | (y < 0)).all(1)


def exact_match(model, task, split, examples, device):
    """Right examples over all examples: a mean over examples, not over batches."""
    return sum(int(right(y, p).sum()) for _, y, p in predictions(model, task, split, examples, device)) / examples


def evaluate(model, task, examples, device, splits=None):
    """{test set: exact match} for the test sets named, or all of them."""
    return {split: exact_match(model, task, split, examples, device) for split in splits or list(task.splits)[1:]}


def pick_device(name):
    """auto is the best device here; one that is not here is an error the user can put right."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).sum().item()
    except Exception as error:  # each kind of device that is not there has its own
        fail(f"--device {name} does not work here: {str(error)[:150]}")
    return name


def label(args):
    """The name of a row: the attention, and what was switched off."""
    return args["attn"] + ("" if args["sparse"] else "-no-sparse") + ("" if args["contextual"] else "-no-contextual")


def load_checkpoint(run):
    """run/ckpt.pt as a dict. Tensors and plain values only: nothing in the file is ever executed."""
    path = os.path.join(run, "ckpt.pt")
    if not os.path.isfile(path):
        fail(f"{run} holds no run: there is no {path}")
    with open(path, "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ckpt = torch.load(file, map_location="cpu", weights_only=True)
        except Exception:       # a damaged file can raise nearly anything
            fail(f"{path} is damaged, or not a checkpoint of train.py")
    parts = {"format": [int], "step": [int], "config": [dict], "args": [dict], "model": [dict, OrderedDict]}
    if type(ckpt) is not dict or any(type(ckpt.get(name)) not in types for name, types in parts.items()):
        fail(f"{path} is not a checkpoint of train.py")
    if ckpt["format"] != FORMAT:
        fail(f"{path} has format {ckpt['format']}, and this version reads format {FORMAT}")
    return ckpt


def bad_checkpoint(run, why):
    fail(f"{os.path.join(run, 'ckpt.pt')} does not hold together: {why}"[:400])


def check_tensors(found, wanted):
    """Raise unless both dicts name the same tensors, of the same shapes and types, with memory behind every number."""
    for name in {**wanted, **found}:
        a, b = found.get(name), wanted.get(name)
        if b is None or type(a) is not torch.Tensor or (a.shape, a.dtype) != (b.shape, b.dtype) or not a.is_contiguous():
            raise ValueError(f"tensor {name!r} should be {'absent' if b is None else list(b.shape)}")


def load_model(run, ckpt):
    """The GPT of a checkpoint. Names and shapes are compared before any memory is taken for it."""
    try:
        config, state = GPTConfig(**ckpt["config"]), ckpt["model"]
        if config.n_layer > len(state):
            raise ValueError(f"{config.n_layer} layers but {len(state)} tensors")
        with torch.device("meta"):
            model = GPT(config)
        check_tensors(state, model.state_dict())
        if not all(tensor.isfinite().all() for tensor in state.values()):
            raise ValueError("weights that are not finite")
        model.load_state_dict(state, assign=True)
    except Exception as error:
        bad_checkpoint(run, error)
    return model


def load_task(run, ckpt):
    """The task of a checkpoint. Of its flags, those that a record repeats are checked too."""
    args, config = ckpt["args"], ckpt["config"]
    try:
        task = make_task(args["task"], args["scale"], length=args["length"], symbols=args["symbols"], pairs=args["pairs"])
        if len(task.vocab) != config["vocab_size"] or not isinstance(args["seed"], int):
            raise ValueError(f"{config['vocab_size']} tokens and seed {args['seed']}, for {task}")
        if any(args[name] != config[name] for name in ("attn", "sparse", "contextual")):
            raise ValueError("flags and config are not the same")
    except Exception as error:
        bad_checkpoint(run, error)
    return task


def record(args, task, examples, results):
    """What eval.json holds."""
    return {"task": args["task"], "attn": args["attn"], "seed": args["seed"], "scale": args["scale"],
            "metric": "exact match", "examples": examples, "results": results,
            "label": label(args), "sizes": vars(task)}


def read_record(run):
    """run/eval.json, checked; None if there is none yet."""
    path = os.path.join(run, "eval.json")
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        results, sizes = found["results"], found["sizes"]
        texts = [found[key] for key in ("task", "attn", "scale", "metric", "label")] + [*results, *sizes]
        texts += [value for value in sizes.values() if type(value) is not int]
        if not results or not all(0 <= value < 1e12 for value in results.values()) or not all(text.isprintable() for text in texts):
            raise ValueError
        if type(found["seed"]) is not int or type(found["examples"]) is not int:
            raise ValueError
    except Exception:           # JSON can hold nearly anything
        fail(f"{path} is damaged; python eval.py {run} --examples 500 measures again")
    return found


def summarise(records):
    """Runs -> groups that share task and sizes, each a list of rows (one per label), each with all its runs' values."""
    groups = {}
    for r in records:
        key = (r["task"], r["scale"], r["metric"], json.dumps(r["sizes"], sort_keys=True), tuple(r["results"]))
        groups.setdefault(key, {}).setdefault(r["label"], []).append(r)
    for (task, scale, metric, sizes, splits), rows in groups.items():
        yield {"task": task, "scale": scale, "metric": metric, "sizes": json.loads(sizes), "rows": [
            {"attn": name, "seeds": [r["seed"] for r in runs], "examples": [r["examples"] for r in runs],
             "results": {s: {"mean": statistics.fmean(v), "std": statistics.stdev(v) if len(v) > 1 else None, "values": v}
                         for s in splits for v in [[r["results"][s] for r in runs]]}}
            for name, runs in rows.items()]}


def percent(value):
    """Rounded down: 100.0 is said only where nothing was wrong."""
    return f"{math.floor(round(value * 1000, 6)) / 10:.1f}"


def table(records):
    """Markdown: a row per attention, a column per test set, percent, mean +- standard deviation over seeds."""
    lines = []
    for group in summarise(records):
        splits = list(group["rows"][0]["results"])
        sizes = ", ".join(f"{k} {v}" for k, v in group["sizes"].items())
        lines += [f"{group['task']}, {group['scale']} scale ({sizes}): {group['metric']}, %", ""]
        cells = [["attention", "seeds", *splits]]
        for row in group["rows"]:
            cells.append([row["attn"], str(len(row["seeds"]))] + [
                percent(r["mean"]) + (f" ± {100 * r['std']:.1f}" if r["std"] is not None else "") for r in row["results"].values()])
        width = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        cells.insert(1, ["-" * width[0]] + ["-" * (w - 1) + ":" for w in width[1:]])
        for line in cells:
            lines.append("| " + " | ".join([line[0].ljust(width[0])] + [c.rjust(w) for c, w in zip(line[1:], width[1:])]) + " |")
        lines.append("")
    return "\n".join(lines)


def print_mistakes(run, model, task, splits, examples, count, device):
    """The first wrong examples of a run: what it read, what it should have said, what it said."""
    left = count
    for split in splits:
        for x, y, predicted in predictions(model, task, split, examples, device):
            for i in (~right(y, predicted)).nonzero()[0][:left]:
                names = lambda tokens: " ".join(task.vocab[t] for t in tokens[y[i] >= 0])
                wrong = [n for n, (a, b) in enumerate(zip(predicted[i][y[i] >= 0], y[i][y[i] >= 0]), 1) if a != b]
                print(f"{run}, {split}: wrong at {len(wrong)} of {(y[i] >= 0).sum()} scored tokens, first at number {wrong[0]}")
                print(f"  example    {show(task, x[i], y[i])}\n  expected   {names(y[i])}\n  predicted  {names(predicted[i])}\n")
                left -= 1
            if not left:
                return
    print(f"{run}: {count - left} mistakes in {examples} examples of each of {', '.join(splits)}")


@script
def main():
    parser = Parser(prog="eval.py", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders that train.py wrote, such as out/copy-tra-s0")
    parser.add_argument("--examples", type=integer(1), metavar="N", help="measure again on N examples of each test set "
                        "(default: what eval.json says; for --mistakes 500)")
    parser.add_argument("--split", metavar="S", help="only this test set")
    parser.add_argument("--mistakes", type=integer(1), metavar="N", help="print N wrong examples of each run")
    parser.add_argument("--json", action="store_true", help="the table as JSON, with every seed's value")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, mps")
    args = parser.parse_args()
    device = pick_device(args.device)
    records = []
    for run in args.runs:
        found = None if args.examples or args.mistakes else read_record(run)
        if found is None:
            ckpt = load_checkpoint(run)
            model, task = load_model(run, ckpt).to(device), load_task(run, ckpt)
            if args.split and args.split not in list(task.splits)[1:]:
                fail(f"{run} has no test set {args.split!r}; choose one of {', '.join(list(task.splits)[1:])}")
            splits, examples = [args.split] if args.split else list(task.splits)[1:], args.examples or 500
            if args.mistakes:
                print_mistakes(run, model, task, splits, examples, args.mistakes, device)
                continue
            found = record(ckpt["args"], task, examples, evaluate(model, task, examples, device, splits))
        elif args.split:
            if args.split not in found["results"]:
                fail(f"{run} has no test set {args.split!r}; choose one of {', '.join(found['results'])}")
            found["results"] = {args.split: found["results"][args.split]}
        records.append(found)
    if records:
        print(json.dumps(list(summarise(records)), indent=1) if args.json else table(records), end="" if not args.json else "\n")


if __name__ == "__main__":
    main()
