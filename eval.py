"""
Measure trained runs: exact match on every test set, or perplexity at every window, as one Markdown table per task.

    python eval.py out/copy-*                                    # a row per attention, mean and spread over seeds
    python eval.py out/copy-* --examples 2000                    # measure again, on more examples
    python eval.py out/copy-rope-s0 --mistakes 3                 # what it got wrong: expected and predicted
    python eval.py out/copy-* --json
    python eval.py out/wikitext-* --windows 128,1024,4096        # perplexity of the test text at these windows
    python eval.py out/wikitext-tra-s0 --prompt "The river "     # what it would write

Exact match: an example counts as right only if every scored token is the model's first choice, given the true tokens before it
(teacher forcing). That equals exact match of greedy generation: if the first choice is right at every position of the
true sequence, then greedy generation says the first answer token right, so its prefix is the true one, so it says the
second right, and so on to the end; and at the first wrong choice generation, too, leaves the true answer. One forward
pass scores a sequence.

Perplexity: the text is cut into consecutive windows, and each window reads its tokens and predicts the one after each. So at
every window size every token but the very first is scored exactly once, and the mean is over tokens, not over windows.
"""

import codecs
import json
import math
import os
import statistics
import warnings
from collections import OrderedDict

import torch
import torch.nn.functional as F

from data import WikiText, encoding
from model import GPT, GPTConfig
from tasks import Parser, fail, integer, make_task, number, script, show

FORMAT = 1                      # of ckpt.pt
TEST_SEED = 0                   # every run meets the same test examples
TOKENS_PER_BATCH = 8_192        # memory in evaluation: tokens, not sequences


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


def text_losses(model, tokens, window, device):
    """Yield the loss in nats of every token but the first, (B, W) at a time: whole windows, then what is left as a shorter one."""
    model.eval()
    count, whole = len(tokens) - 1, (len(tokens) - 1) // window * window
    size = max(1, TOKENS_PER_BATCH // window)
    parts = [(at, min(at + size * window, whole), window) for at in range(0, whole, size * window)]
    for start, end, width in parts + [(whole, count, count - whole)] * (whole < count):
        ids = torch.from_numpy(tokens[start:end + 1].astype("int64")).to(device)
        x, y = ids[:-1].view(-1, width), ids[1:].view(-1, width)
        with torch.no_grad():
            logits, _ = model(x)
        yield F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="none").view_as(y).double().cpu()


def mean_loss(model, tokens, window, device):
    """Nats per token: the sum over all windows divided by the number of tokens scored."""
    return sum(loss.sum().item() for loss in text_losses(model, tokens, window, device)) / (len(tokens) - 1)


def loss_by_position(model, tokens, window, device):
    """Mean loss of the tokens with 1, 2, 3-4, 5-8 ... tokens of their window before them: [[from, to, nats], ...]."""
    total, seen = torch.zeros(window, dtype=torch.float64), torch.zeros(window, dtype=torch.float64)
    for loss in text_losses(model, tokens, window, device):
        total[:loss.size(1)] += loss.sum(0)
        seen[:loss.size(1)] += loss.size(0)
    edges = [0] + [1 << i for i in range(window.bit_length()) if 1 << i < window] + [window]
    return [[a + 1, b, (total[a:b].sum() / seen[a:b].sum()).item()] for a, b in zip(edges, edges[1:]) if seen[a:b].sum()]


def evaluate(model, task, count, device, splits=None):
    """{test set: exact match on count examples, or perplexity of the first count tokens} for the test sets named, or all of them."""
    splits = splits or list(task.splits)[1:]
    if task.metric == "perplexity":
        return {split: math.exp(mean_loss(model, task.tokens["test"][:count], int(split), device)) for split in splits}
    return {split: exact_match(model, task, split, count, device) for split in splits}


def validate(model, task, device):
    """A quick look in the middle of training, as (name, value)."""
    if task.metric == "perplexity":
        return "val_loss", mean_loss(model, task.tokens["val"][:32_769], task.window, device)
    first = list(task.splits)[1]
    return f"exact_match_{first}", exact_match(model, task, first, 100, device)


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


def open_task(args):
    """The task that a run's flags name."""
    sizes = {name: args[name] for name in ("length", "symbols", "pairs", "window", "data")}
    if args["task"] == "wikitext":
        wrong = [name for name in ("length", "symbols", "pairs") if sizes[name] is not None]
        return fail(f"--{wrong[0]} means nothing to wikitext; its sizes are --window, --data") if wrong else WikiText(args["data"], args["window"])
    return make_task(args["task"], args["scale"], **sizes)


def load_task(run, ckpt):
    """The task of a checkpoint. Of its flags, those that a record repeats are checked too."""
    args, config = ckpt["args"], ckpt["config"]
    try:
        task = open_task(args)
        if task.vocab_size != config["vocab_size"] or not isinstance(args["seed"], int):
            raise ValueError(f"a vocabulary of {config['vocab_size']} and seed {args['seed']}, for {task.name} with {task.vocab_size}")
        if any(args[name] != config[name] for name in ("attn", "sparse", "contextual")):
            raise ValueError("flags and config are not the same")
    except Exception as error:
        bad_checkpoint(run, error)
    return task


def record(args, task, count, results):
    """What eval.json holds. Of a text, the examples are the tokens scored at each window."""
    examples = count if task.metric == "exact match" else min(count, len(task.tokens["test"])) - 1
    return {"task": args["task"], "attn": args["attn"], "seed": args["seed"], "scale": args["scale"],
            "metric": task.metric, "examples": examples, "results": results,
            "label": label(args), "sizes": task.sizes}


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


def replace_file(path, write):
    """write(file) into a temporary file, flush it to disk, put it in the place of path: whole, or not at all."""
    temporary = path + ".tmp"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        if os.path.exists(temporary):
            os.remove(temporary)                        # half a file on a full disk helps nobody
        full = isinstance(error.__context__, OSError)   # torch.save makes a RuntimeError of a full disk
        raise error.__context__ if full else error


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
                         for s in splits for v in [[r["results"][s] for r in runs]]},
             **({"by_position": [r["by_position"] for r in runs]} if all("by_position" in r for r in runs) else {})}
            for name, runs in rows.items()]}


def cell(result, metric, tokenizer):
    """Exact match in percent, rounded down, so that 100.0 is said only where nothing was wrong; or perplexity, for bytes with bits per byte."""
    mean, std = result["mean"], result["std"]
    if metric == "perplexity":
        return f"{mean:.2f}" + (f" ± {std:.2f}" if std is not None else "") + (f" ({math.log2(mean):.2f})" if tokenizer == "byte" else "")
    return f"{math.floor(round(mean * 1000, 6)) / 10:.1f}" + (f" ± {100 * std:.1f}" if std is not None else "")


def table(records):
    """Markdown: a row per attention, a column per test set, mean ± standard deviation over seeds."""
    lines = []
    for group in summarise(records):
        metric, tokenizer, rows = group["metric"], group["sizes"].get("tokenizer"), group["rows"]
        sizes = ", ".join(f"{k} {v}" for k, v in group["sizes"].items())
        counts = sorted({n for row in rows for n in row["examples"]})
        what = f"{metric}, %, on {', '.join(map(str, counts))} examples each"
        if metric == "perplexity":
            what = f"perplexity{' (bits per byte)' * (tokenizer == 'byte')} by window, {', '.join(f'{n:,}' for n in counts)} tokens scored at each"
        lines += [f"{group['task']}, {group['scale']} scale ({sizes}): {what}", ""]
        cells = [["attention", "seeds", *rows[0]["results"]]]
        for row in rows:
            cells.append([row["attn"], str(len(row["seeds"]))] + [cell(r, metric, tokenizer) for r in row["results"].values()])
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


def continue_text(model, task, args, device):
    """Write on from a prompt, to the terminal, token by token. A character may take several tokens: it is shown when it is whole."""
    enc, decoder = encoding(task.meta["tokenizer"]), codecs.getincrementaldecoder("utf-8")(errors="replace")
    ids = enc.encode(args.prompt, disallowed_special=())
    if not ids:
        fail("--prompt is empty; give it at least one character")
    torch.manual_seed(args.seed)
    print(args.prompt, end="", flush=True)
    for new in model.stream(torch.tensor([ids], device=device), args.tokens, args.temperature, args.top_k):
        print(decoder.decode(enc.decode_single_token_bytes(new.item())), end="", flush=True)
    print()


def windows(text):
    """An argparse type: 128,256,512"""
    parts = [integer(1, 2**20)(part) for part in text.split(",")]
    return [str(part) for part in dict.fromkeys(parts)]


@script
def main():
    parser = Parser(prog="eval.py", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders that train.py wrote, such as out/copy-tra-s0")
    parser.add_argument("--examples", type=integer(1), metavar="N", help="measure again on N examples of each test set, or on the first N "
                        "tokens of a test text (default: what eval.json says)")
    parser.add_argument("--split", metavar="S", help="only this test set")
    parser.add_argument("--mistakes", type=integer(1), metavar="N", help="print N wrong examples of each run")
    parser.add_argument("--json", action="store_true", help="the table as JSON, with every seed's value")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, mps")
    group = parser.add_argument_group("wikitext")
    group.add_argument("--windows", type=windows, metavar="N,N,...", help="measure perplexity at these windows; with --json also the loss by position "
                       "in the longest")
    group.add_argument("--data", metavar="DIR", help="the prepared text, if it is no longer where it was in training")
    group.add_argument("--prompt", metavar="TEXT", help="continue this text; it may be longer than the training window")
    group.add_argument("--tokens", type=integer(1), default=200, metavar="N", help="how many tokens to write (default 200)")
    group.add_argument("--temperature", type=number(0, 100), default=0.8, metavar="X", help="0 takes the likeliest token (default 0.8)")
    group.add_argument("--top-k", type=integer(1), metavar="K", help="choose among the K likeliest tokens only")
    group.add_argument("--seed", type=integer(0), default=0, metavar="N", help="of the choice (default 0)")
    args = parser.parse_args()
    device = pick_device(args.device)
    measure = args.examples or args.mistakes or args.windows or args.prompt is not None
    records = []
    for run in args.runs:
        found = None if measure else read_record(run)
        if found is None:
            ckpt = load_checkpoint(run)
            if args.data:
                ckpt["args"]["data"] = args.data
            model, task = load_model(run, ckpt).to(device), load_task(run, ckpt)
            if task.metric != "perplexity" and (args.windows or args.prompt is not None):
                fail(f"{run} was trained on {task.name}; --windows and --prompt are for runs of wikitext")
            if task.metric == "perplexity" and args.mistakes:
                fail(f"{run} was trained on a text; --mistakes is for the synthetic tasks")
            tests = args.windows or list(task.splits)[1:]
            if args.split and args.split not in tests:
                fail(f"{run} has no test set {args.split!r}; choose one of {', '.join(tests)}")
            splits, count = [args.split] if args.split else tests, args.examples or ckpt["args"]["examples"]
            if args.prompt is not None:
                continue_text(model, task, args, device)
                continue
            if args.mistakes:
                print_mistakes(run, model, task, splits, count, args.mistakes, device)
                continue
            found = record(ckpt["args"], task, count, evaluate(model, task, count, device, splits))
            if args.windows and args.json:
                found["by_position"] = loss_by_position(model, task.tokens["test"][:count], max(map(int, splits)), device)
        elif args.split:
            if args.split not in found["results"]:
                fail(f"{run} has no test set {args.split!r}; choose one of {', '.join(found['results'])}")
            found["results"] = {args.split: found["results"][args.split]}
        records.append(found)
    if records:
        print(json.dumps(list(summarise(records)), indent=1) if args.json else table(records), end="" if not args.json else "\n")


if __name__ == "__main__":
    main()
