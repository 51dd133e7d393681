"""
Pictures of runs. They need matplotlib, which nothing else here does.

    python -m extras.plot results out/copy-* --out copy.png           # the tables of eval.py as a picture
    python -m extras.plot results results/runs.jsonl --best --attn tra,rope,cope,fox --task copy,wikitext-2
    python -m extras.plot losses out/copy-*                           # how the runs learned
    python -m extras.plot attention out/copy-tra-s0 --example "<bos> c a f <sep> c a"
    python -m extras.plot position out/wikitext-2-byte-*              # loss by position in a long window
    python -m extras.plot speed bench.json                            # from: python -m extras.bench --json bench.json
    python -m extras.plot gates out/copy-tra-s0                       # no picture but a table: what each head forgets
"""

import argparse
import json
import math
import re
import statistics
import sys

import torch

from eval import (METRICS, find_runs, group, load, load_checkpoint, make_record, markdown, open_task, predictions,
                  read_records)
from extras.campaign import at_best
from extras.fast import tra_blocked
from model import ATTENTIONS, TRA, causal_mask, count_back

try:
    import matplotlib.figure                    # not pyplot: no window, nothing global
except ImportError:
    matplotlib = None                           # gates and attention_weights work without it

# Okabe and Ito's colours, which every kind of eye can tell apart, and some more. The first are the attentions'.
COLOURS = "#D55E00 #0072B2 #009E73 #000000 #CC79A7 #56B4E9 #E69F00 #882255 #999999 #44AA99".split()
MARKERS = "os^DvPX*<>p"


def choose_styles(names):
    """{name of a line: its look}. The first line of an attention has the attention's colour, the next ones others."""
    reserved = {attn: place for place, attn in enumerate(ATTENTIONS)}
    styles = {}
    for name in names:
        attn = re.match(r"[\w-]*", name)[0]                     # tra, of "tra no-sparse" or "tra, gates at 0"
        place = reserved.pop(attn, len(styles) + len(reserved))         # or the first neither taken nor reserved
        label = ATTENTIONS[attn].__name__ + name[len(attn):] if attn in ATTENTIONS else name
        styles[name] = dict(label=label, color=COLOURS[place % len(COLOURS)], marker=MARKERS[place % len(MARKERS)],
                            linewidth=1.5 if place else 2.5)
    return styles


def draw_panels(points, xscale="log", legend_title=None):
    """A figure of up to four panels in a row, with one legend to their right.

    A point is (panel, name of its line, linestyle, x, y), and a panel (title, xlabel, ylabel, the largest x in training
    or None). A line goes through the mean at each x, and is shaded from the lowest to the highest.
    """
    if not points:
        raise ValueError("there is nothing to draw")
    styles = choose_styles(dict.fromkeys(name for _, name, *_ in points))
    panels = {}
    for panel, name, linestyle, x, y in points:
        panels.setdefault(panel, {}).setdefault((name, linestyle), {}).setdefault(x, []).append(y)
    rows, columns = math.ceil(len(panels) / 4), min(4, len(panels))
    figure = matplotlib.figure.Figure(figsize=(4.8 * columns, 3.8 * rows), layout="constrained")
    for place, ((title, xlabel, ylabel, trained), lines) in enumerate(panels.items(), start=1):
        ax = figure.add_subplot(rows, columns, place)
        ax.set(title=title, xlabel=xlabel, ylabel=ylabel, xscale=xscale)
        for (name, linestyle), seeds in lines.items():
            x, mean = list(seeds), list(map(statistics.fmean, seeds.values()))
            low, high = list(map(min, seeds.values())), list(map(max, seeds.values()))
            ax.fill_between(x, low, high, color=styles[name]["color"], linewidth=0, alpha=0.15)
            ax.plot(x, mean, linestyle=linestyle, markevery=math.ceil(len(x) / 15), **styles[name])
        if trained:
            ax.axvline(trained, color="gray", linestyle="--", linewidth=1)
        if xscale == "log":
            ticks = sorted({x for seeds in lines.values() for x in seeds})
            ax.set_xticks(ticks if len(ticks) < 8 else ticks[::-2])
        if ylabel.endswith("%"):
            ax.set_ylim(-4, 104)
        else:
            ax.set_yscale("log")
            ax.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.yaxis.set_major_formatter("{x:,g}")
        ax.minorticks_off()
        ax.grid(alpha=0.25)
    handles = [matplotlib.lines.Line2D([], [], **style) for style in styles.values()]
    figure.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, title=legend_title)
    return figure


def select(records, args):
    """Yield the records that the flags name, each with what its table in eval.py has in common and its row there."""
    if args.attn:
        records = [record for record in records if record["attn"] in args.attn.split(",")]
    if args.task:
        records = [record for task in args.task.split(",") for record in records if record["task"] == task]
    for about, rows in at_best(records) if args.best else group(records):
        for name, found in rows.items():
            for record in found:
                yield about, name, record


def find_length(split, trained):
    """The kind of a test set and its length: reverse, 20 of reverse-2x, if 10 was trained; sparse, 10 of sparse."""
    kind, _, length = split.rpartition("-")
    if re.fullmatch(r"[\d.]+x", length):
        return kind, int(float(length[:-1]) * trained)
    return (kind, int(length)) if length.isdigit() else (split, trained)        # digits are those of a window


def draw_results(runs, args, read=read_records, xlabel=None, ylabel=None):
    """The tables of eval.py: a panel for each kind of test set of a task."""
    records = [record for run in runs for record in read(run)]
    points = []
    for about, name, record in select(records, args):
        metric = METRICS[about["metric"]][0].partition(",")[0]          # "exact match in %", "perplexity by window"
        size = "length" if "length" in record["settings"] else "window"
        trained = record["settings"][size]
        for split, value in record["results"].items():
            kind, length = find_length(split, trained)
            panel = (f"{about['task']} {kind}".rstrip() + f", {about['scale']} scale",
                     f"{xlabel or size} (trained up to {trained:,})", ylabel or metric, trained)
            points.append((panel, name, "-", length, 100 * value if metric.endswith("%") else value))
    return draw_panels(points, legend_title="mean and range\nof the seeds")


def draw_position(runs, args):
    """The mean loss by position in a window, over as many tokens of the test text as the runs were tested on."""
    def read(run):
        model, task = load(run, args.device)
        settings = load_checkpoint(run)["args"]
        window = args.split or list(task.splits)[-1]
        if not window.isdigit():
            raise ValueError(f"{run}: {window} is not a window; position is for runs of a text")
        # The positions 1, 2, 3-4, 5-8 ... by the last one of each group
        losses = {}
        for *_, batch in predictions(model, task, window, settings["examples"]):
            for i, loss in enumerate(batch.T):
                last = min(2 ** i.bit_length(), int(window))
                losses.setdefault(str(last), []).extend(loss.tolist())
        means = {last: statistics.fmean(found) for last, found in losses.items()}
        return [make_record(settings, task, {}) | {"results": means}]

    return draw_results(runs, args, read, "position", "loss, nats per token")


def draw_losses(runs, args):
    """A panel per task: the training loss, and dashed the validation loss."""
    checkpoints = [load_checkpoint(run) for run in runs]
    records = [make_record(c["args"], open_task(c["args"]), {}) | {"log": c["log"]} for c in checkpoints]
    points = []
    for about, name, record in select(records, args):
        panel = (f"{about['task']}, {about['scale']} scale", "step", "loss, nats per scored token", None)
        for row in record["log"]:
            key, linestyle = ("loss", "-") if "loss" in row else ("val_loss", "--")
            points.append((panel, name, linestyle, row["step"], row[key]))
    return draw_panels(points, "linear", "mean and range\nof the seeds,\ndashed: validation")


def draw_speed(runs, args):
    """A panel for each kind of thing that extras.bench measured by window: all but generation."""
    with open(runs[0], encoding="utf-8") as file:
        rows = [row for row in json.load(file) if row["what"] != "generation" and "time, ms" in row]
    axes = ("window, tokens", "milliseconds", None)
    return draw_panels([((row["what"], *axes), row["name"], "-", row["window"], row["time, ms"]) for row in rows])


# -----------------------------------------------------------------------------
# Attention and gates


@torch.no_grad()
def layers_of(model, idx):
    """Yield each layer's attention and its input (B, T, C) when the model reads idx (B, T)."""
    x = model.embed(idx)
    for block in model.blocks:
        yield block.attn, block.norm1(x)
        x = block(x)


@torch.no_grad()
def attention_weights(model, idx):
    """Yield for each layer, of idx (1, S): the weights (H, S, S), and TRA's distances n (H, S, S), for others None."""
    S = idx.size(1)
    for attn, x in layers_of(model, idx):
        q, k, _ = attn.heads(x)                                                     # (1, H, S, D)
        # Attention returns A v. So with the identity as v it returns A.
        identity = torch.eye(S, device=q.device).expand(*q.shape[:2], S, S)
        weights, n = attn.attend(x, q, k, identity, None)[0], None
        if isinstance(attn, TRA):
            mask = causal_mask(S, S, q.device).expand_as(weights)
            n = count_back((q @ k.mT > 0)[0] & mask if attn.config.contextual else mask, torch.float32).cpu()
        yield weights.cpu(), n


def draw_attention(runs, args):
    """A row of panels per layer, a panel per head: the weights, gray where they are zero, and TRA's distances."""
    model, task = load(runs[0], args.device)
    x, _ = next(iter(task.test(list(task.splits)[1], 49)))
    ids = task.encode(args.example) if args.example else x[0, :48].tolist()
    names = [repr(task.decode([token]))[1:-1].replace(" ", "\u2423") for token in ids]
    idx = torch.tensor([ids], device=model.head.weight.device)
    S, L, H = len(ids), model.config.n_layer, model.config.n_head
    side = max(2.6, 0.13 * S + 0.3)
    figure = matplotlib.figure.Figure(figsize=(H * side, L * side), layout="constrained")
    axes = figure.subplots(L, H, squeeze=False, sharex=True, sharey=True)       # names at the edges only
    colours = matplotlib.colormaps["YlGnBu"].with_extremes(under="0.75")
    for layer, (weights, distances) in enumerate(attention_weights(model, idx)):
        for head, ax in enumerate(axes[layer]):
            # A key that was removed is below the range of the colours, and so gray. The future stays empty.
            cells = weights[head].where(weights[head] > 0, -1).masked_fill(~causal_mask(S, S, "cpu"), math.nan)
            image = ax.imshow(cells.numpy(), cmap=colours, vmin=0, vmax=1)
            if distances is not None and S <= 16:
                for i, j in weights[head].nonzero().tolist():
                    colour = "white" if cells[i, j] > 0.5 else "black"
                    ax.text(j, i, int(distances[head, i, j]), fontsize=7, ha="center", va="center", color=colour)
            ax.set(title=f"layer {layer + 1}, head {head + 1}", frame_on=False)
            ax.set_xticks(range(S), names, rotation=90, fontsize=8)
            ax.set_yticks(range(S), names, fontsize=8)
            ax.tick_params(length=0)
    figure.colorbar(image, ax=axes, label="weight (gray: zero)", shrink=0.6, pad=0.01)
    figure.suptitle(f"{task.name} with {ATTENTIONS[model.config.attn].__name__}: queries (y) and keys (x)")
    return figure


@torch.no_grad()
def measure_gates(attn, x):
    """What the heads of an attention with a forget gate do with x (B, T, C): {title of a column: its values (H,)}."""
    log_forget = attn.forget(x)                                                     # (B, H, T)
    of_head = log_forget.transpose(0, 1).flatten(1)                                 # (H, B * T)
    low, median, high = of_head.quantile(of_head.new_tensor([0.1, 0.5, 0.9]), dim=1)
    columns = {"forget f: 10%": low, "median": median, "90%": high}
    if isinstance(attn, TRA):
        q, k, v = attn.heads(x)
        mask = causal_mask(x.size(1), x.size(1), x.device)
        positive = ((q @ k.mT > 0) & mask).sum((0, 2, 3)) / (len(x) * mask.sum())
        _, reach = tra_blocked(q, k, v, log_forget, attn.config.sparse, attn.config.contextual, return_reach=True)
        # Each block of queries met reach + 1 blocks of keys. Up to its own there are 1, 2, 3 and so on.
        skipped = 1 - (reach + 1).sum((0, 2)) / (len(x) * sum(range(reach.size(-1) + 1)))
        columns |= {"keys with S > 0, %": 100 * positive, "key blocks skipped, %": 100 * skipped}
    return columns


def print_gates(runs, args):
    """A table for each run that has forget gates, over some 8,192 tokens of a test set."""
    for run in runs:
        model, task = load(run, args.device)
        if not hasattr(model.blocks[0].attn, "forget"):
            print(f"{run}: {model.config.attn} has no forget gates\n")
            continue
        split = args.split or list(task.splits)[1]
        x, _ = next(iter(task.test(split, 100_000)))
        cells = []
        for layer, (attn, inputs) in enumerate(layers_of(model, torch.from_numpy(x).to(model.head.weight.device)), 1):
            columns = measure_gates(attn, inputs)
            for head, values in enumerate(zip(*columns.values()), start=1):
                cells.append([str(layer), str(head), *(f"{value:.2f}" for value in values)])
        print(f"{run}, reading {len(x)} x {x.shape[1]} tokens of {split}:\n")
        print("\n".join(markdown([["layer", "head", *columns], *cells])) + "\n")


def main(argv=None):
    """Draw, save, and return the figure."""
    kinds = {"results": draw_results, "losses": draw_losses, "attention": draw_attention, "position": draw_position,
             "speed": draw_speed, "gates": print_gates}
    parser = argparse.ArgumentParser(prog="python -m extras.plot", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("kind", choices=kinds, metavar="KIND", help=", ".join(kinds))
    add("runs", nargs="*", default=["out"], metavar="RUN", help="as for eval.py; for speed, a file of extras.bench")
    add("--out", metavar="FILE", help="the picture: .png, .svg or .pdf (default KIND.png)")
    add("--attn", metavar="A,A", help="results, losses, position: only these attentions")
    add("--task", metavar="T,T", help="results, losses, position: only these tasks, in this order")
    add("--best", action="store_true", help="results: each attention only at the best of its settings")
    add("--example", metavar="TEXT", help="attention: the tokens to read (default: an example of the first test set)")
    add("--split", metavar="S", help="gates: the test set (default: the first); position: the window (the longest)")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps (default: the best there is)")
    args = parser.parse_args(argv)
    runs = find_runs(args.runs)
    if args.kind == "gates":
        return print_gates(runs, args)
    if matplotlib is None:
        raise ValueError("pictures need matplotlib: pip install matplotlib")
    if args.kind in ("attention", "speed") and len(runs) > 1:
        raise ValueError(f"a picture of {args.kind} shows one at a time, not {len(runs)}")
    path = args.out or f"{args.kind}.png"
    # In a name, a $ is a token like others. The picture grows to hold the legend.
    with matplotlib.rc_context({"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}):
        figure = kinds[args.kind](runs, args)
        figure.savefig(path, dpi=200, bbox_inches="tight")
    print(f"wrote {path}")
    return figure


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {str(error).splitlines()[0]}")
