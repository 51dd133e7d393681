"""
Measure trained runs: exact match on every test set, or perplexity at every window, as one Markdown table per task.

    python eval.py out/copy-*                                    # a row per attention, mean and spread over seeds
    python eval.py out/copy-* --examples 4000                    # measure again, on more examples
    python eval.py out/copy-rope-s0 --mistakes 3                 # what it got wrong: expected and predicted
    python eval.py out/copy-* --json
    python eval.py out/wikitext-* --windows 128,1024,4096        # perplexity of the test text at these windows
    python eval.py out/wikitext-tra-s0 --prompt "The river "     # what it would write
    python eval.py out/copy-* --plot copy.png                    # the table as a picture
    python eval.py out/copy-* --curves loss.png                  # how they learned
    python eval.py out/copy-tra-s0 --attention a.png --example "<bos> c a f <sep> c a"
    python eval.py out/copy-tra-s0 --attention                   # the last query, in the terminal
    python eval.py out/copy-tra-s0 --gates                       # how much each head forgets, and how many keys it keeps
    python eval.py --bench --attn rope tra                       # time and memory, side by side

Exact match: an example counts as right only if every scored token is the model's first choice, given the true tokens before it
(teacher forcing), which one forward pass tells. Greedy generation would say the same: up to the first wrong choice both have read
the same tokens, the true ones, so both make that choice, or none.

Perplexity: the text is cut into consecutive windows, and each window reads its tokens and predicts the one after each. So at
every window size every token but the very first is scored exactly once, and the mean is over tokens, not over windows.
"""

import argparse
import codecs
import functools
import itertools
import json
import math
import os
import re
import shlex
import statistics
import sys
import time
import warnings
from collections import OrderedDict

import numpy as np
import torch
import torch.nn.functional as F

from data import WikiText, encoding
from model import ATTENTIONS, GPT, GPTConfig, TRA, causal_mask, tra_attention, tra_blocked, tra_plain
from tasks import SIZES, Parser, fail, integer, make_task, number, script, show

FORMAT = 1                      # of ckpt.pt
TEST_SEED = 0                   # every run meets the same test examples
TOKENS_PER_BATCH = 8_192        # of a forward pass in evaluation. A test set is drawn in such batches: another number, other examples


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
        yield F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="none").view_as(y).cpu().double()


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


def perplexity(loss):
    return math.exp(min(loss, 27))          # worse than 5e11 is no more a number to read


def evaluate(model, task, count, device, splits):
    """{test set: exact match on count examples, or perplexity of the first count tokens} for the test sets named."""
    if task.metric == "perplexity":
        tokens = task.tokens["test"][:count]
        if longer := [split for split in splits if int(split) >= len(tokens)]:
            print(f"note: {len(tokens) - 1} tokens are scored, fewer than a window of {', '.join(longer)}", file=sys.stderr)
        return {split: perplexity(mean_loss(model, tokens, int(split), device)) for split in splits}
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
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        found = torch.zeros(1, device=name)
        found.sum().item()
    except Exception as error:  # each kind of device that is not there has its own
        fail(f"--device {name} does not work here: {str(error)[:150]}")
    if found.is_cuda:
        torch.set_float32_matmul_precision("high")      # TF32
        torch.cuda.set_device(found.device)     # its random state is then the one that is saved, its memory the one that is measured
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
    sizes = {name: args.get(name) for name in (*SIZES, "window", "data")}       # a size may be younger than the run
    if args["task"] == "wikitext":
        if args["examples"] < 2:
            fail("--examples must be at least 2 for a text, whose first token is not scored")
        wrong = [name for name in SIZES if sizes[name] is not None]
        return fail(f"--{wrong[0]} means nothing to wikitext; its sizes are --window, --data") if wrong else WikiText(args["data"], args["window"])
    return make_task(args["task"], args["scale"], **sizes)


def load_task(run, ckpt):
    """The task of a checkpoint. Of its flags, those that a record repeats are checked too."""
    args, config = ckpt["args"], ckpt["config"]
    try:
        task = open_task(args)
        if task.vocab_size != config["vocab_size"] or not isinstance(args["seed"], int):
            raise ValueError(f"a vocabulary of {config['vocab_size']} and seed {args['seed']}, for {task.name} with {task.vocab_size}")
        if any(type(args[name]) is not int or args[name] < 1 for name in ("examples", "steps")):
            raise ValueError("no number of examples or steps")
        if any(args[name] != config[name] for name in ("attn", "sparse", "contextual")):
            raise ValueError("flags and config are not the same")
    except Exception as error:
        bad_checkpoint(run, error)
    return task


MACHINE = ("examples", "compile", "log_every", "eval_every", "save_every")      # flags that do not change what is learned


def record(args, task, count, results):
    """What eval.json holds. Of a text, the examples are the tokens scored at each window."""
    examples = count if task.metric == "exact match" else min(count, len(task.tokens["test"])) - 1
    return {"task": args["task"], "attn": args["attn"], "seed": args["seed"], "scale": args["scale"],
            "metric": task.metric, "examples": examples, "results": results,
            "label": label(args), "sizes": task.sizes,
            "settings": {name: value for name, value in args.items()
                         if type(value) in (int, float, bool) and name != "seed" and name not in MACHINE}}


def read_record(run):
    """run/eval.json, checked; None if there is none yet."""
    path = os.path.join(run, "eval.json")
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        found.pop("by_position", None)                  # train.py writes none, and what is drawn was measured
        results, sizes = found["results"], found["sizes"]
        texts = [found[key] for key in ("task", "attn", "scale", "metric", "label")] + [*results, *sizes, *found.get("settings", {})]
        texts += [value for value in sizes.values() if type(value) is not int]
        numbers = [*results.values(), *(value for value in sizes.values() if type(value) is int)]
        if not results or not all(0 <= value < 1e12 for value in numbers) or not all(text.isprintable() for text in texts):
            raise ValueError
        if found["metric"] == "perplexity" and min(results.values()) < 1:
            raise ValueError
        if type(found["seed"]) is not int or type(found["examples"]) is not int:
            raise ValueError
    except Exception:           # JSON can hold nearly anything
        fail(f"{path} is damaged; python train.py --resume --out {shlex.quote(run)} writes it anew")
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


LABELS = ["tra", "rope", "cope", "nope", "alibi", "fox", "tra-no-sparse", "tra-no-contextual", "tra-no-sparse-no-contextual"]


def rank(name):
    """The place of a row in tables and pictures. An attention that someone adds takes the next one."""
    names = LABELS + [attn for attn in ATTENTIONS if attn not in LABELS]
    return names.index(name) if name in names else len(names)


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
             "settings": [r.get("settings") for r in runs],
             **({"by_position": [r["by_position"] for r in runs]} if all("by_position" in r for r in runs) else {})}
            for name, runs in sorted(rows.items(), key=lambda row: rank(row[0]))]}


def warn_of_mixed_rows(groups):
    """Say so where runs that differ in more than their seed fall into one row."""
    for group in groups:
        for row in group["rows"]:
            known = [settings for settings in row["settings"] if isinstance(settings, dict)]
            differ = [name for name in (known[0] if known else ()) if any(settings.get(name, known[0][name]) != known[0][name] for settings in known)]
            if differ or len(set(row["seeds"])) < len(row["seeds"]):
                print(f"note: the {row['attn']} runs of {group['task']} share a row, but "
                      + (f"differ in {', '.join(differ)}" if differ else "a seed occurs twice"), file=sys.stderr)


def level(share):
    """0 to 1 as one sign, rounded down: ▁ to █, or 0 to 9 where stdout cannot show blocks."""
    signs = "▁▂▃▄▅▆▇█" if (sys.stdout.encoding or "").lower().replace("-", "") == "utf8" else "0123456789"
    return signs[int(max(0, min(share, 1)) * (len(signs) - 1))]


def cell(result, metric, tokenizer):
    """Exact match in percent, rounded down, so that 100.0 is said only where nothing was wrong; or perplexity, for bytes with bits per byte."""
    mean, std = result["mean"], result["std"]
    if metric == "perplexity":
        return f"{mean:.2f}" + (f" ± {std:.2f}" if std is not None else "") + (f" ({math.log2(mean):.2f})" if tokenizer == "byte" else "")
    return f"{math.floor(round(mean * 1000, 6)) / 10:.1f}" + (f" ± {100 * std:.1f}" if std is not None else "")


def markdown(cells):
    """The lines of a Markdown table; the first row is its head."""
    width = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    rule = ["-" * width[0]] + ["-" * (w - 1) + ":" for w in width[1:]]
    return ["| " + " | ".join([line[0].ljust(width[0])] + [c.rjust(w) for c, w in zip(line[1:], width[1:])]) + " |"
            for line in (cells[0], rule, *cells[1:])]


def table(groups):
    """Markdown: a row per attention, a column per test set, mean ± standard deviation over seeds. Many columns: a table per instruction."""
    lines = []
    for group in groups:
        metric, tokenizer, rows = group["metric"], group["sizes"].get("tokenizer"), group["rows"]
        sizes = ", ".join(f"{k} {v}" for k, v in group["sizes"].items())
        counts = sorted({n for row in rows for n in row["examples"]})
        what = f"{metric}, %, on {', '.join(map(str, counts))} examples each"
        if metric == "perplexity":
            what = f"perplexity{' (bits per byte)' * (tokenizer == 'byte')} by window, {', '.join(f'{n:,}' for n in counts)} tokens scored at each"
        lines += [f"{group['task']}, {group['scale']} scale ({sizes}): {what}", ""]
        bars = metric != "perplexity" and sys.stdout.isatty() and level(1) == "█"         # a file gets pure Markdown
        splits = list(rows[0]["results"])
        for _, part in itertools.groupby(splits, key=lambda split: len(splits) > 8 and split.rpartition("-")[0]):
            part = list(part)
            cells = [["attention", "seeds", *part]]
            for row in rows:
                cells.append([row["attn"], str(len(row["seeds"]))] + [
                    cell(row["results"][s], metric, tokenizer) + (" " + level(row["results"][s]["mean"]) if bars else "") for s in part])
            lines += [*markdown(cells), ""]
    return "\n".join(lines)


def print_mistakes(run, ckpt, model, task, splits, args, device):
    """The first wrong examples of a run: what it read, what it should have said, what it said."""
    left, examples = args.mistakes, ckpt["args"]["examples"]
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
    print(f"{run}: {args.mistakes - left} mistakes in {examples} examples of each of {', '.join(splits)}")


def continue_text(run, ckpt, model, task, splits, args, device):
    """Write on from a prompt, to the terminal, token by token. A character may take several tokens: it is shown when it is whole."""
    enc, decoder = encoding(task.meta["tokenizer"]), codecs.getincrementaldecoder("utf-8")(errors="replace")
    ids = enc.encode(args.prompt, disallowed_special=())
    if not ids:
        fail("--prompt is empty; give it at least one character")
    torch.manual_seed(args.seed or 0)
    print(f"{run}:\n" * (len(args.runs) > 1) + args.prompt, end="", flush=True)
    for new in model.stream(torch.tensor([ids], device=device), args.tokens or 200, 0.8 if args.temperature is None else args.temperature, args.top_k):
        print(decoder.decode(enc.decode_single_token_bytes(new.item())), end="", flush=True)
    print()


COLOURS = ["#D55E00", "#0072B2", "#009E73", "#000000", "#CC79A7", "#56B4E9", "#E69F00",     # Okabe and Ito's, for every kind of eye,
           "#882255", "#999999", "#999933", "#44AA99"]                                      # and Tol's
SHORT, LONG = 48, 128           # tokens in a picture of attention: as far as an example is shown by itself, and the most that can be asked for


def style(name):
    """The colour and marker of a row, the same in every picture."""
    i = rank(name)
    return {"color": COLOURS[i % len(COLOURS)], "marker": "os^DvPX*"[i % 8], "linewidth": 1.5 if i else 2.5, "zorder": 2 if i else 3}


def picture(path):
    """An argparse type: a file to draw into. What could stop that is said now, not after minutes of measuring."""
    if os.path.splitext(path)[1] not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{path!r} does not end in .png, .svg or .pdf")
    try:
        import matplotlib.figure
        open(path + ".tmp", "wb").close()       # save_figure does so too
        os.remove(path + ".tmp")
    except ImportError:
        fail("pictures need matplotlib: pip install matplotlib")
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")
    return path if not os.path.isdir(path) else fail(f"cannot write {path}: it is a folder")


def new_figure(rows, columns, width, height):
    """A figure and its rows x columns panels, each of this width and height in inches."""
    from matplotlib.figure import Figure        # not pyplot: no window, nothing global
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def save_figure(figure, path):
    import matplotlib
    with warnings.catch_warnings(), matplotlib.rc_context({"text.parse_math": False}):      # a $ is a token like others
        warnings.simplefilter("ignore")                                                     # signs that the font lacks
        dpi = min(110, 20_000 / max(figure.get_size_inches()))
        replace_file(path, lambda file: figure.savefig(file, format=path[-3:], dpi=dpi))
    print(f"wrote {path}")


def finish_panel(ax, log, ticks=(), **texts):
    """Grid, legend and texts, and these ticks of x, numbers or names; plain numbers if the y axis is logarithmic."""
    from matplotlib.ticker import LogFormatter
    if log:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))     # only where there is room
    ax.set(**texts)
    if ticks:
        named = isinstance(ticks[0], str)
        ax.set_xticks(range(len(ticks)) if named else ticks, ticks if named else [f"{tick:,}" for tick in ticks], fontsize="small")
        ax.set_xticks([], minor=True)
    ax.grid(alpha=0.25)
    ax.legend(fontsize="small")


def panels(group):
    """What there is to draw of a group: title, labels of the axes, and for each row its name, x, and the values of its seeds at each x."""
    rows, length, text = group["rows"], group["sizes"].get("length", 1), group["metric"] == "perplexity"
    found, parts = {split: re.fullmatch(r"(?:(\w+)-)?(\d{1,7}(?:\.\d{1,3})?)(x?)", split) for split in rows[0]["results"]}, {}
    for split, match in found.items():          # 1.5x, reverse-10x, or a window; if not all are, as for flip-flop, names
        if all(found.values()) and type(length) is int:
            parts.setdefault(match[1] or "", {})[split] = int(float(match[2]) * (length if match[3] else 1))
        else:
            parts.setdefault("", {})[split] = split
    unit = "bytes" if group["sizes"].get("tokenizer") == "byte" else "tokens"
    for part, x in parts.items():
        yield (f"{group['task']} {part}".strip() + f", {group['scale']} scale",
               f"window, {unit}" if text else "length", "perplexity" if text else "exact match, %",
               [(row["attn"], [*x.values()], [[v if text else 100 * v for v in row["results"][split]["values"]] for split in x]) for row in rows])
    lines = [(row["attn"], list(zip(*row["by_position"]))) for row in rows if "by_position" in row]
    if lines:
        yield (f"{group['task']}, {group['scale']} scale", "position in the longest window, up to", f"loss, nats per {unit[:-1]}",
               [(name, [runs[0][1] for runs in bins], [[nats for _, _, nats in runs] for runs in bins]) for name, bins in lines])


def draw_results(groups):
    """The tables as a figure: a panel per task, or per instruction; mean over seeds, and from the lowest seed to the highest."""
    drawings = [(group, *panel) for group in groups for panel in panels(group)]
    height = 1 if len(drawings) < 4 else 2
    figure, axes = new_figure(height, math.ceil(len(drawings) / height), 5, 4)
    for ax in axes.flat[len(drawings):]:
        ax.remove()
    for ax, (group, title, x_label, y_label, lines) in zip(axes.flat, drawings):
        ticks, trained, text = lines[0][1], group["sizes"].get("length", group["sizes"].get("window")), group["metric"] == "perplexity"
        named = isinstance(ticks[0], str)
        for i, (name, x, values) in enumerate(lines):
            look, low, high, seeds = style(name), [min(v) for v in values], [max(v) for v in values], len(values[0])
            if named:                           # dots, side by side
                look["linestyle"], x = "none", [at + (i - (len(lines) - 1) / 2) * min(0.16, 0.8 / len(lines)) for at in range(len(x))]
                ax.vlines(x, low, high, color=look["color"], linewidth=4, alpha=0.4)
            else:
                ax.fill_between(x, low, high, color=look["color"], linewidth=0, alpha=0.15)
            ax.plot(x, [statistics.fmean(v) for v in values], label=f"{name}, {seeds} seed{'s' * (seeds > 1)}", **look)
        if not named and isinstance(trained, int):
            ax.axvline(trained, color="gray", linestyle="--", linewidth=1, label="trained up to here")
        finish_panel(ax, y_label == "perplexity", ticks if len(ticks) < 8 else ticks[::-2],
                     title=title, xlabel="test set" if named else x_label, ylabel=y_label,
                     xscale="log" if text and not named else "linear", **({} if text else {"ylim": (-4, 104)}))
    if any(len(row["seeds"]) > 1 for group in groups for row in group["rows"]):
        figure.supxlabel("mean over seeds; shaded: from the lowest seed to the highest", fontsize="small")
    return figure


def read_losses(run):
    """run/log.jsonl as {"loss": [(step, loss), ...], "val_loss": ...}; without the half line that a killed run may have left."""
    path = os.path.join(run, "log.jsonl")
    if not os.path.isfile(path):
        fail(f"{run} holds no log: there is no {path}")
    try:
        with open(path, "rb") as file:
            rows = [json.loads(line) for line in file if line.endswith(b"\n")]
        losses = {name: [(row["step"], row[name]) for row in rows if name in row] for name in ("loss", "val_loss")}
        if not all(0 <= value < 1e12 for points in losses.values() for point in points for value in point):
            raise ValueError
    except Exception:           # a line can hold anything
        fail(f"{path} is damaged")
    return losses if losses["loss"] else fail(f"{path} has no loss yet")


def draw_curves(runs, records):
    """A panel per task: the training loss of every run, and its validation loss, dashed, if it has one."""
    titles = [f"{found['task']}, {found['scale']} scale" for found in records]
    figure, axes = new_figure(1, len(set(titles)), 5, 4)
    axes = dict(zip(dict.fromkeys(titles), axes.flat))
    for run, title, found in zip(runs, titles, records):
        ax, losses = axes[title], read_losses(run)
        known = [line.get_label() for line in ax.lines]
        for name, points, dashes in ((found["label"], losses["loss"], "-"), ("validation", losses["val_loss"], "--")):
            if points:          # a single one needs a dot to be seen
                look = style(found["label"]) | {"linewidth": 0.9, "linestyle": dashes, "marker": "." if len(points) == 1 else ""}
                ax.plot(*zip(*points), label="_" * (name in known) + name, **look)
    for title, ax in axes.items():
        finish_panel(ax, True, title=title, xlabel="step", ylabel="training loss, nats per scored token")
    return figure


def layers_of(model, idx):
    """Yield each layer's attention and what it reads, (B, T, C), when the model reads idx (B, T)."""
    model.eval()
    x = model.embed(idx)
    for block in model.blocks:
        yield block.attn, block.norm1(x)
        x = block(x)


@torch.no_grad()
def attention_weights(model, idx):
    """For each layer, of idx (1, S): the weights (H, S, S), True where a key is kept, and TRA's distances n or None.

    Attention returns A v. So with the identity as v it returns A.
    """
    S, H, config, found = idx.size(1), model.config.n_head, model.config, []
    mask = causal_mask(S, S, idx.device).expand(H, S, S)
    for attn, x in layers_of(model, idx):
        q, k, _ = attn.heads(x)
        try:
            weights = attn.attend(x, q, k, torch.eye(S, device=idx.device).expand(1, H, S, S), None)[0]
        except RuntimeError:
            fail(f"--attention needs an attend() that returns A v for a v of any width; {config.attn} does not")
        keep, n = mask, None
        if type(attn) is TRA:
            relevant = (q @ k.mT > 0)[0] & mask
            keep = relevant if config.sparse else mask
            n = (relevant if config.contextual else mask).flip(-1).cumsum(-1).flip(-1).cpu()
        found.append((weights.cpu(), keep.cpu(), n))
    return found


def pick_example(task, split, text):
    """The tokens and their names: of a text, or of an example drawn as for a test set; by default of few enough for a picture."""
    if task.metric == "perplexity":
        enc = encoding(task.meta["tokenizer"])
        ids = task.tokens["test"][:int(split or SHORT)].tolist() if text is None else enc.encode(text, disallowed_special=())
        names = [enc.decode_single_token_bytes(i).decode("utf-8", "backslashreplace") for i in ids]
        names = [(name if name.isprintable() else repr(name)[1:-1]).replace(" ", "␣") for name in names]
    elif text is None:
        x, y = task.batch(split or list(task.splits)[1], TEST_SEED, 0, 1)
        ids = x[0, :(y[0] >= 0).nonzero()[0][-1] + 1].tolist()[:None if split else SHORT]     # without padding
        names = [task.vocab[i] for i in ids]
    else:
        names = text.split()
        for name in names:
            if name not in task.vocab:
                fail(f"--example: {name!r} is not in the vocabulary of {task.name}: {' '.join(task.vocab)}")
        ids = [task.vocab.index(name) for name in names]
    return (ids, names) if ids else fail("--example is empty; give it at least one token")


def draw_attention(title, names, layers):
    """A row of panels per layer, a panel per head, queries against keys. Removed keys are gray; a kept key has a colour, however small its weight."""
    S, H = len(names), layers[0][0].size(0)
    side, small = max(2.5, 0.1 * S + 0.3), 7 if S <= SHORT else 5
    figure, axes = new_figure(len(layers), H, side, side)
    for (layer, head), ax in np.ndenumerate(axes):
        weights, keep, n = (None if part is None else part[head] for part in layers[layer])
        image = ax.imshow(weights.masked_fill(~keep, math.nan).numpy(), cmap="YlGnBu", vmin=0, vmax=1)
        ax.imshow(torch.where(causal_mask(S, S, "cpu") & ~keep, 0.75, math.nan).numpy(), cmap="gray", vmin=0, vmax=1)
        for i in range(S) if n is not None else ():
            ax.text(S - 0.3, i, int(keep[i].sum()), fontsize=small, va="center", color="gray")
            for j in keep[i].nonzero().flatten().tolist() if S <= 16 else ():
                ax.text(j, i, int(n[i, j]), fontsize=small, ha="center", va="center", color="white" if weights[i, j] > 0.5 else "black")
        ax.set_title(f"layer {layer + 1}, head {head + 1}", fontsize="medium")
        ax.set_xticks(range(S), names if layer == len(layers) - 1 else [""] * S, rotation=90, fontsize=small)
        ax.set_yticks(range(S), names if head == 0 else [""] * S, fontsize=small)
        ax.tick_params(length=0)
    figure.colorbar(image, ax=axes, label="weight", shrink=0.6)
    figure.suptitle(title)
    told = "; gray: removed; at the right: number of kept keys" + "; in a cell: distance n" * (S <= 16)
    figure.supxlabel("keys (x) of each query (y)" + told * (n is not None), fontsize="small")
    return figure


def show_attention(run, ckpt, model, task, splits, args, device):
    """Attention on one example: as a picture, or as text, where every key of the last query is followed by its weight, or by - if it was removed."""
    title = f"{task.name} with {label(ckpt['args'])}, seed {ckpt['args']['seed']}"
    ids, names = pick_example(task, args.split, args.example)
    if args.attention and len(ids) > LONG:
        fail(f"{len(ids)} tokens are too many for a picture, which shows up to {LONG}; --attention without a file shows more")
    layers = attention_weights(model, torch.tensor([ids], device=device))
    if args.attention:
        return save_figure(draw_attention(title, names, layers), args.attention)
    print(f"{title}: what the last of {len(ids)} tokens attends to, from {level(0)} to {level(1)}; - is a removed key")
    for layer, (weights, keep, _) in enumerate(layers, 1):
        for head, (row, kept) in enumerate(zip(weights[:, -1].tolist(), keep[:, -1].tolist()), 1):
            print(f"layer {layer} head {head} keeps {sum(kept)}:", *(f"{name}:{level(weight) if k else '-'}" for name, weight, k in zip(names, row, kept)))
    print()


def is_tra(model):
    return type(model.blocks[0].attn) is TRA        # of a variant nobody here knows which keys it keeps


def skipped_share(reach):
    """Of the blocks of keys left of or at each block of queries, (B, H, blocks), the share that TRA never met, (H,)."""
    there = torch.arange(1, reach.size(-1) + 1, device=reach.device).expand_as(reach).sum((0, 2))
    return 1 - (reach + 1).sum((0, 2)) / there


@torch.no_grad()
def gates(model, idx):
    """What TRA's heads do when they read idx (B, T): [{layer, head, forget, kept, skipped}, ...], means over queries."""
    rows = []
    for layer, (attn, x) in enumerate(layers_of(model, idx)):
        q, k, v = attn.heads(x)
        log_forget = attn.forget(x)
        reach = tra_blocked(q, k, v, log_forget, attn.config.sparse, attn.config.contextual, tell_reach=True)[1]
        kept, (B, T) = 0, idx.shape
        for end in range(256, T + 256, 256):                # rows by rows: T x T may not fit
            some, seen = q[:, :, end - 256:end], k[:, :, :end]
            kept += ((some @ seen.mT > 0) & causal_mask(some.size(2), seen.size(2), idx.device)).sum((0, 2, 3)) / (B * T * (T + 1) / 2)     # (H,)
        spread = log_forget.transpose(0, 1).flatten(1).quantile(torch.tensor([0.1, 0.5, 0.9], device=idx.device), dim=1)    # (3, H)
        rows += [{"layer": layer + 1, "head": head + 1, "forget": spread[:, head].tolist(), "kept": kept[head].item(),
                  "skipped": share.item()} for head, share in enumerate(skipped_share(reach))]
    return rows


def print_gates(run, ckpt, model, task, splits, args, device):
    """A table of gates(), over a batch of a test set or a window of the test text; with --json it is returned instead."""
    if not is_tra(model):
        fail(f"{run} has {model.config.attn} attention; --gates is for tra")
    if task.metric == "perplexity":
        window = min(int(args.split or max(args.windows or [4096], key=int)), len(task.tokens["test"]) - 1)
        what, ids = f"the first {window:,} tokens of the test text", task.tokens["test"][None, :window].astype("int64")
    else:
        split = args.split or list(task.splits)[1]
        ids = task.batch(split, TEST_SEED, 0, 1)[0]
        ids = task.batch(split, TEST_SEED, 0, max(1, min(100, TOKENS_PER_BATCH // ids.shape[1])))[0]
        what = f"{len(ids)} examples of {split}, {ids.shape[1]} tokens each"
    rows = gates(model, torch.from_numpy(ids).to(device))
    if args.json:
        return {"run": run, "read": what, "heads": rows}
    cells = [["layer", "head", "forget f: 10%", "median", "90%", "keys with S > 0, %", "key blocks skipped, %"]]
    cells += [[str(row["layer"]), str(row["head"]), *(f"{f:.2f}" for f in row["forget"]), f"{100 * row['kept']:.0f}", f"{100 * row['skipped']:.0f}"]
              for row in rows]
    print(f"{run}, reading {what}:\n\n" + "\n".join(markdown(cells)) + "\n")


def seconds(run, device):
    """One call on the clock: by events on CUDA, which works while Python goes on."""
    if torch.device(device).type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    start = time.perf_counter()
    run()
    torch.get_device_module(device).synchronize()
    return time.perf_counter() - start


def peak_memory(run, device):
    """Bytes that one call holds at most, beside what was there before; None where nobody counts (MPS)."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    if kind != "cpu":
        return None
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")     # or it announces itself
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(changes, initial=0))


def race(what, window, batch, contestants, device, tokens=None, rounds=6, memory=True):
    """Time contestants, {name: function}, against each other: all in turn, round after round, the best of each.

    The first is the one that the others are compared with; the best of several rounds leaves the warming up out.
    """
    best = dict.fromkeys(contestants, math.inf)
    for _ in range(rounds):
        for name, run in contestants.items():
            best[name] = min(best[name], seconds(run, device))
    return [{"what": what, "name": name, "window": window, "batch": batch, "seconds": best[name], "ratio": best[name] / best[next(iter(best))],
             "tokens_per_second": (tokens or window * batch) / best[name], "peak_bytes": peak_memory(run, device) if memory else None, "skipped": None}
            for name, run in contestants.items()]


def with_skipped(rows, models, idx):
    """The rows; those of TRA with the share of key blocks that it skips when it reads idx (B, T)."""
    return [row | {"skipped": statistics.fmean(head["skipped"] for head in gates(models[row["name"]], idx))} if is_tra(models[row["name"]]) else row
            for row in rows]


def bench_step(attns, window, batch, dropout, device):
    """A training step of the paper's mini model, on random tokens."""
    x, y = torch.randint(256, (2, batch, window), device=device)
    models = {attn: GPT(GPTConfig(attn=attn, vocab_size=256, dropout=dropout)).to(device) for attn in attns}

    def step(model, optimizer):
        model(x, y)[1].backward()
        optimizer.step()
        optimizer.zero_grad()

    rows = race("training step", window, batch, {        # with a learning rate of 0: the weights stay as they are
        attn: functools.partial(step, model, torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)) for attn, model in models.items()},
        device, rounds=10)
    return with_skipped(rows, models, x)


def bench_attention(window, batch, backward, device):
    """The attention alone, 8 heads of width 64: torch's own kernel; TRA with gates at -0.5; while it fits, with gates at 0, where nothing
    is forgotten, and in its plain form.
    """
    q, k, v = torch.randn(3, batch, 8, window, 64, device=device)
    q, k, f = F.rms_norm(q, (64,)), F.rms_norm(k, (64,)), torch.full((batch, 8, window), -0.5, device=device)
    skipped = skipped_share(tra_blocked(q, k, v, f, tell_reach=True)[1]).mean().item()
    contestants = {"sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), "tra": lambda: tra_attention(q, k, v, f)}
    if window <= 4096:
        contestants |= {"tra, gates at 0": lambda: tra_attention(q, k, v, 0 * f), "tra_plain": lambda: tra_plain(q, k, v, f)}
    if backward:
        for x in (q, k, v, f):
            x.requires_grad_()
        contestants = {name: lambda run=run: run().sum().backward() for name, run in contestants.items()}
    rows = race("attention, forward" + " and backward" * backward, window, batch, contestants, device)
    return [row | {"skipped": skipped} if row["name"] == "tra" else row for row in rows]


def bench_generation(attn, count, device):
    """Generation from one token, with the cache and without."""
    model, start = GPT(GPTConfig(attn=attn, vocab_size=256)).to(device).eval(), torch.zeros(1, 1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def without():
        idx = start
        for _ in range(count):
            idx = torch.cat((idx, model(idx)[0][:, -1:].argmax(-1)), dim=1)

    contestants = {f"{attn}, cache": lambda: model.generate(start, count, temperature=0), f"{attn}, no cache": without}
    return race("generation", count, 1, contestants, device, tokens=count, rounds=4, memory=False)


def bench_text(models, tokens, window, device):
    """A perplexity pass of trained models, {name: model}, over a text."""
    losses = {}

    def score(name):
        losses[name] = mean_loss(models[name], tokens, window, device)

    batch = max(1, min(TOKENS_PER_BATCH, len(tokens) - 1) // window)
    rows = race("perplexity pass", window, batch, {name: lambda name=name: score(name) for name in models},
                device, tokens=len(tokens) - 1, rounds=5)
    rows = [row | {"perplexity": perplexity(losses[row["name"]])} for row in rows]
    return with_skipped(rows, models, torch.from_numpy(tokens[None, :window].astype("int64")).to(device))


def bench_table(what, rows):
    """Markdown; columns that nothing has are left out."""
    cells = [["", "window", "batch", "time, ms", "ratio", "tokens/s", "peak memory, MB", "key blocks skipped, %", "perplexity"]]
    for row in rows:
        cells.append([row["name"], f"{row['window']:,}", str(row["batch"]), f"{1000 * row['seconds']:,.0f}", f"{row['ratio']:.2f}",
                      f"{row['tokens_per_second']:,.0f}", "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}",
                      "" if row["skipped"] is None else f"{100 * row['skipped']:.1f}", f"{row['perplexity']:.2f}" if "perplexity" in row else ""])
    used = [i for i, column in enumerate(zip(*cells)) if i == 0 or any(column[1:])]
    base = "its own cache" if what == "generation" else "the first row of its window"
    return "\n".join([f"{what}; ratio to {base}:", "", *markdown([[line[i] for i in used] for line in cells]), ""])


def draw_bench(rows):
    """Time by window, a panel for each thing that was measured."""
    measured = list(dict.fromkeys(row["what"] for row in rows if row["what"] != "generation"))
    figure, axes = new_figure(1, len(measured), 5, 4)
    for ax, what in zip(axes.flat, measured):
        for name in dict.fromkeys(row["name"] for row in rows if row["what"] == what):
            found = [row for row in rows if (row["what"], row["name"]) == (what, name)]
            ax.plot([row["window"] for row in found], [row["seconds"] for row in found], label=name,
                    **style({"sdpa": "rope", "tra, gates at 0": "tra-no-contextual", "tra_plain": "tra-no-sparse"}.get(name, name.split(",")[0])))
        ticks = sorted({row["window"] for row in rows if row["what"] == what})
        finish_panel(ax, True, ticks, title=what, xlabel="window, tokens", ylabel="seconds", xscale="log")
    return figure


def measurements(args, device):
    """What --bench measures, row by row: training, attention and generation; or the perplexity pass of the runs that are named."""
    sizes = [int(window) for window in args.windows or ()]
    wrong = args.attn or args.batch or args.tokens or args.dropout is not None if args.runs else args.examples or args.data
    if wrong:
        fail("--bench with runs takes --examples and --data, and without runs --attn, --batch, --tokens and --dropout")
    if args.runs:
        ckpts, models, tasks = zip(*(open_run(run, args, device) for run in args.runs))
        named = {f"{label(ckpt['args'])}, seed {ckpt['args']['seed']}": model for ckpt, model in zip(ckpts, models)}
        if any(task.metric != "perplexity" or task.sizes != tasks[0].sizes for task in tasks) or len(named) < len(models):
            fail("--bench takes runs of wikitext on the same text, each with its own attention or seed")
        named = dict(sorted(named.items(), key=lambda item: item[1].config.attn != "rope"))     # the others are compared with RoPE
        sizes = sizes or [4096, 16384]
        tokens = tasks[0].tokens["test"][:args.examples or 2 * max(sizes) + 1]
        if len(tokens) <= max(sizes):
            fail(f"{len(tokens):,} tokens of test text are too few for a window of {max(sizes):,}")
        for window in sizes:
            yield from bench_text(named, tokens, window, device)
        return
    attns = sorted(args.attn or ATTENTIONS, key=lambda name: name != "rope")
    for window in sizes or [256, 1024]:
        if window <= 4096:
            yield from bench_step(attns, window, args.batch or max(1, 4096 // window), GPTConfig.dropout if args.dropout is None else args.dropout, device)
    for backward in (False, True):
        for window in sizes or [1024, 4096, 16384]:
            if window >= 1024:
                yield from bench_attention(window, args.batch or 1, backward, device)
    for attn in attns:
        yield from bench_generation(attn, args.tokens or 512, device)


def bench(args, device):
    """Print each table as soon as it is measured; or everything as JSON."""
    about = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads()}
    if not args.json:
        print(f"torch {about['torch']} on {device}, {about['threads']} CPU threads; side by side in one process, the best of several rounds\n", flush=True)
    rows = []
    for what, new in itertools.groupby(measurements(args, device), key=lambda row: row["what"]):
        rows += (new := list(new))
        if not args.json:
            print(bench_table(what, new), flush=True)
    if args.plot:
        save_figure(draw_bench(rows), args.plot)
    if args.json:
        print(json.dumps(about | {"rows": rows}, indent=1))


def windows(text):
    """An argparse type: 128,256,512"""
    return [str(window) for window in sorted({integer(1, 2**20)(part) for part in text.split(",")})]


def open_run(run, args, device):
    """A run's checkpoint, model and task."""
    ckpt = load_checkpoint(run)
    ckpt["args"] |= {name: getattr(args, name) for name in ("data", "examples") if getattr(args, name)}
    return ckpt, load_model(run, ckpt).to(device), load_task(run, ckpt)


@script
def main():
    parser = Parser(prog="eval.py", description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folders that train.py wrote, such as out/copy-tra-s0")
    group = parser.add_argument_group("measuring")
    group.add_argument("--examples", type=integer(1), metavar="N", help="measure again on N examples of each test set, or on the first N "
                       "tokens of a test text, which may be more than it has (default: eval.json's, or the run's own)")
    group.add_argument("--split", metavar="S", help="only this test set, such as 2x, dense-4x or 1024")
    group.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, mps")
    group = parser.add_argument_group("instead of the table (as are --prompt, --curves, --attention, --gates, --bench: one at a time)")
    group.add_argument("--mistakes", type=integer(1), metavar="N", help="print N wrong examples of each run")
    group.add_argument("--json", action="store_true", default=None, help="the table, with every seed's value, as JSON; or --gates, or --bench")
    group = parser.add_argument_group("pictures (FILE ends in .png, .svg or .pdf; they need matplotlib)")
    group.add_argument("--plot", type=picture, metavar="FILE", help="draw the table too: exact match by length; perplexity by "
                       "window, with --windows also the loss by position; with --bench, time by window")
    group.add_argument("--curves", type=picture, metavar="FILE", help="draw the training loss of each run, by its log.jsonl")
    group.add_argument("--attention", type=picture, nargs="?", const=False, metavar="FILE", help="draw every head's attention weights on one "
                       "example; without FILE the last query's, as text, of any number of runs")
    group.add_argument("--example", metavar="TEXT", help="for --attention: tokens with spaces between them, or for wikitext any text (default: "
                       f"an example of --split, or of the first test set up to {SHORT} tokens)")
    group = parser.add_argument_group("wikitext")
    group.add_argument("--windows", "--window", type=windows, metavar="N,N,...", help="measure perplexity at these windows; with --json or --plot also the loss "
                       "by position in the longest")
    group.add_argument("--data", metavar="DIR", help="the prepared text, if it is no longer where it was in training")
    group = parser.add_argument_group("text from a prompt (wikitext)")
    group.add_argument("--prompt", metavar="TEXT", help="continue this text; it may be longer than the training window")
    group.add_argument("--tokens", type=integer(1), metavar="N", help="how many tokens to write (default 200, and 512 in --bench)")
    group.add_argument("--temperature", type=number(0, 100), metavar="X", help="0 takes the likeliest token (default 0.8)")
    group.add_argument("--top-k", type=integer(1), metavar="K", help="choose among the K likeliest tokens only")
    group.add_argument("--seed", type=integer(0), metavar="N", help="of the choice (default 0)")
    group = parser.add_argument_group("gates and speed")
    group.add_argument("--gates", action="store_true", default=None, help="what the heads of a TRA run do: forget gates, share of keys kept, share of the work "
                       "that forgetting saves; on up to 100 examples of --split, or the first --window tokens of a text (default 4096)")
    group.add_argument("--bench", action="store_true", default=None, help="time and memory, side by side. Without runs: a training step of the paper's mini model (windows "
                       "to 4,096), attention alone (windows from 1,024), generation. With runs of wikitext: their perplexity pass. --windows sets the sizes, "
                       "--examples the tokens of the text")
    group.add_argument("--attn", nargs="+", choices=ATTENTIONS, metavar="A", help="--bench of these attentions (default all)")
    group.add_argument("--batch", type=integer(1), metavar="N", help="--bench with this batch (default 4,096 tokens a training step, and 1)")
    group.add_argument("--dropout", type=number(0, 0.99), metavar="P", help=f"of the training step in --bench (default {GPTConfig.dropout}); with 0, torch's "
                       "fused kernel serves the other attentions on a CPU, too")
    args = parser.parse_args()
    modes = [name for name in ("mistakes", "prompt", "curves", "attention", "gates", "bench") if getattr(args, name) is not None] or ["table"]
    if len(modes) > 1:
        fail(f"--{modes[0]} and --{modes[1]} do not go together; ask for one at a time")
    fits = {"json": "table gates bench", "plot": "table bench", "example": "attention", "split": "table mistakes attention gates",
            "examples": "table mistakes bench", "windows": "table gates bench", "tokens": "prompt bench", "temperature": "prompt", "top_k": "prompt", "seed": "prompt",
            "attn": "bench", "batch": "bench", "dropout": "bench"}
    for name, where in fits.items():
        if getattr(args, name) is not None and modes[0] not in where.split():
            fail(f"--{name.replace('_', '-')} does not go with " + ("the table" if modes == ["table"] else f"--{modes[0]}") + ", but with "
                 + ", ".join("the table" if mode == "table" else f"--{mode}" for mode in where.split()))
    if args.json and args.plot:
        fail("--json and --plot do not go together; ask for one at a time")
    if args.example is not None and args.split:
        fail("--example and --split both name an example; give one of them")
    if args.attention and len(args.runs) > 1:
        fail(f"--attention {args.attention} draws one run, not {len(args.runs)}; without a file it prints any number")
    device = pick_device(args.device)
    if args.bench:
        return bench(args, device)
    if not args.runs:
        fail("RUN is missing: name at least one, for example python eval.py out/copy-*")
    # what is done with each run instead of measuring it; all with one signature
    act = {"mistakes": print_mistakes, "prompt": continue_text, "attention": show_attention, "gates": print_gates}.get(modes[0])
    records, said = [], []
    for run in args.runs:
        found = None if act or args.data or args.examples or args.windows else read_record(run)
        if found is None:
            ckpt, model, task = open_run(run, args, device)
            if ckpt["step"] < ckpt["args"]["steps"]:
                print(f"note: {run} is at step {ckpt['step']} of {ckpt['args']['steps']}", file=sys.stderr)
            for name in ("mistakes",) if task.metric == "perplexity" else ("windows", "prompt"):
                if getattr(args, name) is not None:
                    fail(f"--{name} is not for {run}, which was trained on {task.name}")
        tests = list(found["results"]) if found else args.windows or list(task.splits)[1:]
        if args.split and args.split not in tests:
            fail(f"{run} has no test set {args.split!r}; choose one of {', '.join(tests)}")
        splits = [args.split] if args.split else tests
        if act:
            said.append(act(run, ckpt, model, task, splits, args, device))
            continue
        if found:
            found["results"] = {split: found["results"][split] for split in splits}
        else:
            count = ckpt["args"]["examples"]
            found = record(ckpt["args"], task, count, {} if args.curves else evaluate(model, task, count, device, splits))
            if args.windows and (args.json or args.plot):
                found["by_position"] = loss_by_position(model, task.tokens["test"][:count], max(map(int, splits)), device)
        records.append(found)
    if args.gates and args.json:
        print(json.dumps(said, indent=1))
    groups = list(summarise(records))
    warn_of_mixed_rows(groups)
    if args.curves:
        save_figure(draw_curves(args.runs, records), args.curves)
    elif records:
        print(json.dumps(groups, indent=1) if args.json else table(groups), end="" if not args.json else "\n")
    if args.plot:
        save_figure(draw_results(groups), args.plot)


if __name__ == "__main__":
    main()
