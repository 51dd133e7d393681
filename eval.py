"""
Measure trained runs: exact match on every test set, or perplexity at every window, as one Markdown table per task.

    python eval.py                                              # every run in out/
    python eval.py out/copy-* --examples 4000                   # measure again, on more examples
    python eval.py out/copy-rope-s0 --mistakes 3                # examples it got wrong, as [right->predicted]
    python eval.py out/wikitext-2-byte-* --windows 128,4096     # perplexity of the test text at these windows
    python eval.py out/wikitext-2-byte-tra-s0 --prompt "The river "
    python eval.py results/runs.jsonl                           # records that were kept, one JSON object a line

In a notebook: from eval import load; model, task = load("out/copy-tra-s0")

Exact match: an example counts as right only if every scored token is the model's first choice, given the true tokens
before it (teacher forcing), which one forward pass tells. Greedy generation would say the same: until its first mistake
it has produced exactly the true tokens, so it makes the same first mistake.

Perplexity: the text is cut into consecutive windows, and each window reads its tokens and predicts the one after each.
So at every window size every token but the very first is scored exactly once, and the mean is over tokens.
"""

import argparse
import glob
import itertools
import json
import math
import os
import statistics
import sys
from dataclasses import asdict

import torch
import torch.nn.functional as F

from data import Text
from model import ATTENTIONS, GPT, GPTConfig
from tasks import TASKS, as_text

# -----------------------------------------------------------------------------
# Load


def pick_device(name="auto"):
    """The device of this name, ready for use; auto is the best there is."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.zeros(1, device=name).device
    except Exception as error:          # each kind of device that is not there has its own
        raise ValueError(f"device {name} does not work here: {str(error).splitlines()[0][:150]}") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")      # TF32
    return name


def load_checkpoint(run):
    """run/ckpt.pt as a dict of plain values and tensors. Nothing in the file is ever executed."""
    path = os.path.join(run, "ckpt.pt")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{run} holds no run: there is no {path}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:          # a damaged file can raise nearly anything
        raise ValueError(f"{path} is damaged, or not a checkpoint of train.py") from error


def load(run, device="auto"):
    """The model of a run, in eval mode on the best device, and its task."""
    ckpt = load_checkpoint(run)
    model = GPT(GPTConfig(**ckpt["config"]))
    model.load_state_dict(ckpt["model"])
    return model.to(pick_device(device)).eval(), open_task(ckpt["args"])


def open_task(args):
    """The task that a run's settings name."""
    kind = TASKS.get(args["task"], Text)
    return kind(**{name: args[name] for name in kind.__dataclass_fields__ if name in args})


# -----------------------------------------------------------------------------
# Measure


@torch.no_grad()
def predictions(model, task, split, count):
    """Yield x, y, the model's first choices and the losses in nats, (B, T) each, over count examples (or tokens)."""
    model.eval()
    for x, y in task.test(split, count):
        x, y = (torch.from_numpy(array).to(model.head.weight.device) for array in (x, y))
        logits, _ = model(x)                                                        # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), ignore_index=-1, reduction="none")
        yield x.cpu(), y.cpu(), logits.argmax(-1).cpu(), loss.view_as(y).cpu()


def measure(model, task, split, count):
    """Means over examples and over scored tokens, never over batches."""
    examples = right_examples = tokens = right_tokens = nats = 0
    for _, y, predicted, loss in predictions(model, task, split, count):
        scored, is_right = y >= 0, (predicted == y) | (y < 0)
        examples, right_examples = examples + len(y), right_examples + is_right.all(1).sum().item()
        tokens, right_tokens = tokens + scored.sum().item(), right_tokens + (is_right & scored).sum().item()
        nats += loss.double().sum().item()
    perplexity = math.exp(min(nats / tokens, 27))       # at most 5e11: larger ones mean nothing
    return {"exact match": right_examples / examples, "right tokens": right_tokens / tokens, "perplexity": perplexity,
            "loss": nats / tokens, "examples": examples, "tokens": tokens}


# Flags that do not change the trained model, or are in the name already: they name neither a folder nor a row.
NOT_SETTINGS = ("attn", "task", "data", "scale", "seed", "examples", "out", "resume", "overwrite", "device", "compile",
                "log_every", "eval_every", "save_every")


def make_record(args, task, measured):
    """eval.json: what was measured on each test set, and every setting of the run."""
    return {"task": task.name, "attn": args["attn"], "seed": args["seed"], "scale": args["scale"],
            "metric": task.metric, "examples": max((found[task.unit] for found in measured.values()), default=0),
            "results": {split: found[task.metric] for split, found in measured.items()},
            "right_tokens": {split: found["right tokens"] for split, found in measured.items()},
            "settings": {name: value for name, value in args.items() if name not in NOT_SETTINGS}}


# -----------------------------------------------------------------------------
# Tables


def name_rows(records):
    """A name for each record: its attention, and every setting in which these records differ beside the seed."""
    # Older records lack newer fields. They had the default.
    usual = {name: value for name, value in asdict(GPTConfig()).items() if name not in ("attn", "vocab_size")}
    settings = [usual | record["settings"] | {"examples": record["examples"]} for record in records]
    differ = [name for name in dict.fromkeys(name for s in settings for name in s)
              if len({json.dumps(s.get(name)) for s in settings}) > 1]
    names = []
    for record, own in zip(records, settings):
        parts = [record["attn"]]
        for name in differ:
            if isinstance(own.get(name), bool):
                parts += [] if own[name] == usual.get(name) else [name if own[name] else f"no-{name}"]
            elif name in own:
                parts.append(f"{name}={own[name]}")
        names.append(" ".join(parts))
    return names


def group(records):
    """Records -> [(what a table has in common, {name of a row: its records})], attentions in the order of model.py."""
    groups = {}
    for record in records:
        about = {name: record[name] for name in ("task", "scale", "metric")}
        groups.setdefault(json.dumps([about, list(record["results"])]), (about, []))[1].append(record)
    for about, members in groups.values():
        rows = {}
        for name, record in zip(name_rows(members), members):
            rows.setdefault(name, []).append(record)
        order = {attn: place for place, attn in enumerate(ATTENTIONS)}
        yield about, dict(sorted(rows.items(), key=lambda row: order.get(row[1][0]["attn"], len(order))))


def with_spread(form, values):
    """Mean ± standard deviation over seeds."""
    spread = f" ± {form(statistics.stdev(values))}" if len(values) > 1 else ""
    return form(statistics.fmean(values)) + spread


def percent(share):
    """Show 100.0 only if nothing was wrong."""
    return f"{100 if share == 1 else min(100 * share, 99.9):.1f}"


METRICS = {         # how a table introduces a metric, how it shows a value, and which value is the best
    "exact match": ("exact match in %, examples per test set", percent, max),
    "right tokens": ("right tokens in %, examples per test set", percent, max),
    "perplexity": ("perplexity by window, tokens scored", "{:.2f}".format, min),
}


def markdown(cells):
    """The lines of a Markdown table; the first row is its head."""
    width = [max(map(len, column)) for column in zip(*cells)]
    rule = ["-" * width[0]] + ["-" * (w - 1) + ":" for w in width[1:]]
    return ["| " + " | ".join([line[0].ljust(width[0])] + [c.rjust(w) for c, w in zip(line[1:], width[1:])]) + " |"
            for line in (cells[0], rule, *cells[1:])]


def table(records, key="results"):
    """A Markdown table per task: a row per attention and setting, a column per test set."""
    lines = []
    for about, rows in group(records):
        introduction, form, _ = METRICS[about["metric"] if key == "results" else "right tokens"]
        counts = ", ".join(f"{n:,}" for n in sorted({r["examples"] for found in rows.values() for r in found}))
        lines += [f"{about['task']}, {about['scale']} scale: {introduction}: {counts}", ""]
        splits = list(next(iter(rows.values()))[0][key])
        # Many columns, such as those of instruct: a table for each word before the dash.
        for _, part in itertools.groupby(splits, key=lambda split: len(splits) > 8 and split.rpartition("-")[0]):
            part = list(part)
            cells = [["attention", "seeds", *part]]
            cells += [[name, str(len(found)), *(with_spread(form, [r[key][split] for r in found]) for split in part)]
                      for name, found in rows.items()]
            lines += [*markdown(cells), ""]
    return "\n".join(lines)


# -----------------------------------------------------------------------------
# The command line


def find_runs(names):
    """Folders of runs and .jsonl files: as named, by a pattern, or inside a folder that is named."""
    found = []
    for name in names:
        for path in sorted(glob.glob(name)) or [name]:
            inside = sorted(os.path.dirname(p) for p in glob.glob(os.path.join(path, "*", "ckpt.pt")))
            found += inside or [os.path.normpath(path)]
    return list(dict.fromkeys(found))


def read_records(path):
    """The records of a run that was tested, or of a .jsonl file; [] if a run is not finished yet."""
    file = path if path.endswith(".jsonl") else os.path.join(path, "eval.json")
    if file != path and not os.path.exists(file):
        step = load_checkpoint(path)["step"]
        print(f"{path} is left out: it is unfinished, at step {step}; train.py --resume goes on", file=sys.stderr)
        return []
    with open(file, encoding="utf-8") as lines:
        try:
            return [json.loads(line) for line in lines] if file == path else [json.load(lines)]
        except ValueError as error:
            raise ValueError(f"{file} is damaged: {error}") from error


def print_mistakes(run, model, task, splits, examples, wanted):
    """The first wrong examples: all their tokens, with [right->predicted] where the model was wrong."""
    for split in splits:
        for x, y, predicted, _ in predictions(model, task, split, examples):
            is_right = (predicted == y) | (y < 0)
            for i in (~is_right.all(1)).nonzero().flatten().tolist()[:wanted]:
                scored = y[i] >= 0
                print(f"{run}, {split}: {(is_right[i] & scored).sum()} of {scored.sum()} scored tokens are right")
                print(f"  {as_text(task, x[i].numpy(), y[i].numpy(), predicted[i].numpy())}")
                wanted -= 1
            if wanted == 0:
                return
    print(f"{run}: no more mistakes in {examples} examples of {', '.join(splits)}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", default=["out"], metavar="RUN",
                        help="folders that train.py wrote, patterns, or .jsonl files of records (default: all in out/)")
    parser.add_argument("--examples", type=int, metavar="N", help="measure again on N examples of each test set, or on "
                        "the first N tokens of a test text")
    parser.add_argument("--split", "--windows", metavar="S,S", type=lambda text: text.split(","),
                        help="only these test sets, such as 2x,4x, or for a text windows of any size")
    parser.add_argument("--tokens", action="store_true", help="a table of right tokens instead of right sequences")
    parser.add_argument("--mistakes", type=int, metavar="N", help="print N wrong examples of each run instead")
    parser.add_argument("--prompt", metavar="TEXT", help="continue this text instead; for a synthetic task, its tokens")
    parser.add_argument("--count", type=int, default=200, metavar="N", help="tokens to write (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0: the likeliest (default 0.8)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice (default 0)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps (default: the best there is)")
    args = parser.parse_args(argv)
    if args.examples is not None and args.examples < 2:
        parser.error("--examples must be at least 2")
    records = []
    for run in find_runs(args.runs):
        if not (args.examples or args.split or args.mistakes or args.prompt is not None):
            records += read_records(run)
            continue
        model, task = load(run, args.device)
        settings = load_checkpoint(run)["args"]
        settings["examples"] = args.examples or settings["examples"]
        splits = args.split or list(task.splits)[1:]
        if args.mistakes:
            print_mistakes(run, model, task, splits, settings["examples"], args.mistakes)
        elif args.prompt is not None:
            ids = task.encode(args.prompt)
            if not ids:
                raise ValueError("--prompt is empty; give it at least one character")
            torch.manual_seed(args.seed)
            idx = torch.tensor([ids], device=model.head.weight.device)
            print(f"{run}: {task.decode(model.generate(idx, args.count, args.temperature)[0].tolist())}")
        else:
            measured = {split: measure(model, task, split, settings["examples"]) for split in splits}
            records.append(make_record(settings, task, measured))
    if records:
        print(table(records, "right_tokens" if args.tokens else "results"), end="")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
