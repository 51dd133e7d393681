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
import itertools
import json
import math
import re
import statistics
import sys
from collections import defaultdict, namedtuple

import numpy as np
import torch

from eval import (METRICS, find_runs, group, load, load_checkpoint, make_record, markdown, open_task, predictions,
                  read_records)
from extras.campaign import at_best
from extras.fast import tra_blocked
from model import ATTENTIONS, TRA, causal_mask, count_back

try:
    import matplotlib
    from matplotlib.figure import Figure        # not pyplot: no window, nothing global
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, MaxNLocator
except ImportError:
    matplotlib = None                           # gates and attention_weights work without it

LOOK = {"text.parse_math": False,               # a $ is a token like others
        "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": "medium", "legend.frameon": False,
        "font.size": 11, "xtick.labelsize": "small", "ytick.labelsize": "small"}
# Okabe and Ito's colours, which every kind of eye can tell apart, then some of Tol's. The first are the attentions'.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#000000", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#999999",
           "#999933", "#44AA99", "#AA4499"]
MARKERS = "os^DvPX*<>p"

# -----------------------------------------------------------------------------
# Panels with lines

# lines is {Line: {x: the values of its seeds}}, trained the longest x in training.
Panel = namedtuple("Panel", "title xlabel ylabel lines trained xscale", defaults=[None, "log"])
Line = namedtuple("Line", "name linestyle run", defaults=["-", None])


def choose_styles(names):
    """{name of a row: its look}, in the order of model.py. The first row of an attention has the attention's colour."""
    rank = {attn: place for place, attn in enumerate(ATTENTIONS)}
    attn_of = {name: re.match(r"\w*", name)[0] for name in sorted(names)}       # tra, of "tra no-sparse", "tra, seed 0"
    free, others, styles = dict(rank), itertools.count(len(rank)), {}
    for name, attn in sorted(attn_of.items(), key=lambda item: rank.get(item[1], len(rank))):
        place = free.pop(attn) if attn in free else next(others)
        label = ATTENTIONS[attn].__name__ + name[len(attn):] if attn in ATTENTIONS else name
        styles[name] = dict(label=label, color=COLOURS[place % len(COLOURS)], marker=MARKERS[place % len(MARKERS)],
                            linewidth=1.5 if place else 2.5)
    return styles


def draw_panel(ax, panel, styles):
    """Means over seeds as lines, shaded from the lowest seed to the highest."""
    for line, points in panel.lines.items():
        x, seeds = list(points), list(points.values())
        look = styles[line.name] | {"linestyle": line.linestyle}
        if len(x) > 15:
            look["marker"] = ""
        ax.fill_between(x, list(map(min, seeds)), list(map(max, seeds)), color=look["color"], linewidth=0, alpha=0.15)
        ax.plot(x, list(map(statistics.fmean, seeds)), **look)
    ax.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel, xscale=panel.xscale)
    if panel.trained:
        ax.axvline(panel.trained, color="gray", linestyle="--", linewidth=1)
        ax.set_xlabel(f"{panel.xlabel} (trained up to {panel.trained:,})")
    if panel.xscale == "log":
        ticks = sorted({x for points in panel.lines.values() for x in points})
        ax.set_xticks(ticks if len(ticks) <= 7 else ticks[::-2])
    ax.xaxis.set_major_formatter("{x:,.0f}")
    if panel.ylabel.endswith("%"):
        ax.set_ylim(-4, 104)
    else:
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        ax.yaxis.set_major_locator(MaxNLocator(6) if high / low < 5 else LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:,g}")
    ax.minorticks_off()
    ax.grid(alpha=0.25)


def draw_panels(panels, caption=""):
    """A figure of up to four panels in a row, with one legend to their right."""
    if not panels:
        raise ValueError("there is nothing to draw")
    styles = choose_styles({line.name for panel in panels for line in panel.lines})
    rows, columns = math.ceil(len(panels) / 4), min(4, len(panels))
    figure = Figure(figsize=(4.8 * columns, 3.8 * rows), layout="constrained")
    for place, panel in enumerate(panels, start=1):
        draw_panel(figure.add_subplot(rows, columns, place), panel, styles)
    handles = [Line2D([], [], **look) for look in styles.values()]
    figure.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.supxlabel(caption, fontsize="small", color="gray")
    return figure


# -----------------------------------------------------------------------------
# What the panels show


def select(records, args):
    """What group() returns, of the attentions and the tasks that the flags name, in the flags' order of tasks."""
    if args.attn:
        records = [record for record in records if record["attn"] in args.attn.split(",")]
    if args.task:
        records = [record for task in args.task.split(",") for record in records if record["task"] == task]
    return at_best(records) if args.best else group(records)


def find_length(split, trained):
    """The kind of a test set and its length: reverse, 20 of reverse-2x, if 10 was trained; sparse, 10 of sparse."""
    kind, _, length = split.rpartition("-")
    if length.isdigit():                                # a window
        return kind, int(length)
    if re.fullmatch(r"[\d.]+x", length):
        return kind, int(float(length[:-1]) * trained)
    return split, trained


def draw_records(records, args, xlabel=None, ylabel=None):
    """The tables of eval.py: a panel for each kind of test set of a task."""
    panels, counts = [], set()
    for about, rows in select(records, args):
        settings = next(iter(rows.values()))[0]["settings"]
        size = "length" if "length" in settings else "window"
        trained = settings[size]
        metric = METRICS[about["metric"]][0].partition(",")[0]          # "exact match in %", "perplexity by window"
        factor = 100 if metric.endswith("%") else 1
        by_kind = defaultdict(lambda: defaultdict(dict))
        for name, found in rows.items():
            counts.add(len(found))
            for split in found[0]["results"]:
                kind, length = find_length(split, trained)
                by_kind[kind][Line(name)][length] = [factor * record["results"][split] for record in found]
        for kind, lines in by_kind.items():
            title = f"{about['task']} {kind}".rstrip() + f", {about['scale']} scale"
            panels.append(Panel(title, xlabel or size, ylabel or metric, lines, trained))
    seeds = " or ".join(map(str, sorted(counts)))
    return draw_panels(panels, f"seeds: {seeds}; line: their mean; shaded: from the lowest to the highest")


def draw_results(runs, args):
    return draw_records([record for run in runs for record in read_records(run)], args)


def draw_losses(runs, args):
    """A panel per task: the training loss of every run, and its validation loss, dashed."""
    records, panels = [], []
    for run in runs:
        settings = load_checkpoint(run)["args"]
        records.append(make_record(settings, open_task(settings), {}) | {"run": run})
    for about, rows in select(records, args):
        lines = {}
        for name, run in [(name, record["run"]) for name, found in rows.items() for record in found]:
            with open(f"{run}/log.jsonl", encoding="utf-8") as file:
                # A run that was killed may have left half a line.
                log = [json.loads(line) for line in file if line.endswith("\n")]
            for key, linestyle in (("loss", "-"), ("val_loss", "--")):
                lines[Line(name, linestyle, run)] = {row["step"]: [row[key]] for row in log if key in row}
        title = f"{about['task']}, {about['scale']} scale"
        panels.append(Panel(title, "step", "loss, nats per scored token", lines, xscale="linear"))
    return draw_panels(panels, "training; dashed: validation")


def draw_position(runs, args):
    """A panel per text, over as many tokens of it as the runs were tested on: the mean loss by position in a window."""
    records = []
    for run in runs:
        model, task = load(run, args.device)
        if task.unit != "tokens":
            raise ValueError(f"{run} was trained on {task.name}; position is for runs of a text")
        settings = load_checkpoint(run)["args"]
        window = int(args.split or list(task.splits)[-1])
        # The positions 1, 2, 3-4, 5-8 ... by the last one of each group
        losses = defaultdict(list)
        for _, _, _, batch in predictions(model, task, str(window), settings["examples"]):
            for i, loss in enumerate(batch.T):
                losses[str(min(1 << i.bit_length(), window))] += loss.tolist()
        results = {last: statistics.fmean(values) for last, values in losses.items()}
        records.append(make_record(settings, task, {}) | {"results": results})
    return draw_records(records, args, "position in the window", "loss, nats per token")


def draw_speed(runs, args):
    """A panel for each kind of thing that extras.bench measured by window: all but generation."""
    with open(runs[0], encoding="utf-8") as file:
        rows = json.load(file)["rows"]
    measured = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["what"] != "generation" and "seconds" in row:
            measured[row["what"]][Line(row["name"])][row["window"]] = [1000 * row["seconds"]]
    return draw_panels([Panel(what, "window, tokens", "milliseconds", lines) for what, lines in measured.items()])


# -----------------------------------------------------------------------------
# Attention and gates


@torch.no_grad()
def layers_of(model, idx):
    """[(a layer's attention, its input (B, T, C)), ...] when the model reads idx (B, T)."""
    found, x = [], model.embed(idx)
    for block in model.blocks:
        found.append((block.attn, block.norm1(x)))
        x = block(x)
    return found


@torch.no_grad()
def attention_weights(model, idx):
    """For each layer, of idx (1, S): the weights (H, S, S), and TRA's distances n (H, S, S), None for the others.

    Attention returns A v. So with the identity as v it returns A.
    """
    S, found = idx.size(1), []
    for attn, x in layers_of(model, idx):
        q, k, _ = attn.heads(x)                                                     # (1, H, S, D)
        identity = torch.eye(S, device=q.device).expand(*q.shape[:2], S, S)
        weights, n = attn.attend(x, q, k, identity, None)[0], None
        if isinstance(attn, TRA):
            mask = causal_mask(S, S, q.device).expand_as(weights)
            n = count_back((q @ k.mT > 0)[0] & mask if attn.config.contextual else mask, torch.float32).cpu()
        found.append((weights.cpu(), n))
    return found


def draw_head(ax, weights, distances, names):
    """The weights (S, S) of a head, queries (y) against keys (x). Gray: a weight of exactly zero."""
    S = len(names)
    is_gray = (weights == 0) & causal_mask(S, S, "cpu")
    image = ax.imshow(torch.where(weights != 0, weights, math.nan).numpy(), cmap="YlGnBu", vmin=0, vmax=1)
    ax.imshow(torch.where(is_gray, 0.75, math.nan).numpy(), cmap="gray", vmin=0, vmax=1)
    if distances is not None and S <= 16:
        for i, j in weights.nonzero().tolist():
            colour = "white" if weights[i, j] > 0.5 else "black"
            ax.text(j, i, int(distances[i, j]), fontsize=7, ha="center", va="center", color=colour)
    ax.set_xticks(range(S), names)
    ax.set_yticks(range(S), names)
    for label in ax.get_xticklabels():
        label.set_rotation(90 if len(label.get_text()) > 2 else 0)
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)
    return image


def draw_attention(runs, args):
    """A row of panels per layer, a panel per head."""
    model, task = load(runs[0], args.device)
    if args.example is None:
        x, _ = next(iter(task.test(list(task.splits)[1], 49)))
        ids = x[0, :48].tolist()
    else:
        ids = task.encode(args.example)
    if not 1 <= len(ids) <= 128:
        raise ValueError(f"a picture of attention shows 1 to 128 tokens, not {len(ids)}: choose another --example")
    names = [repr(task.decode([token]))[1:-1].replace(" ", "\u2423") for token in ids]
    layers = attention_weights(model, torch.tensor([ids], device=model.head.weight.device))
    L, H, side = model.config.n_layer, model.config.n_head, max(2.6, 0.13 * len(ids) + 0.3)
    figure = Figure(figsize=(H * side, L * side), layout="constrained")
    axes = figure.subplots(L, H, squeeze=False, sharex=True, sharey=True)       # names at the edges only
    for (layer, head), ax in np.ndenumerate(axes):
        weights, n = layers[layer]
        image = draw_head(ax, weights[head], None if n is None else n[head], names)
        ax.set_title(f"layer {layer + 1}, head {head + 1}")
    figure.colorbar(image, ax=axes, label="weight", shrink=0.6, pad=0.01)
    figure.suptitle(f"{task.name} with {ATTENTIONS[model.config.attn].__name__}")
    figure.supxlabel("queries (y) and keys (x); gray: a weight of exactly zero; numbers, if any: TRA's distance n",
                     fontsize="small", color="gray")
    return figure


def skipped_share(q, k, v, log_forget, sparse=True, contextual=True):
    """The share of key blocks that tra_blocked never looks at, (H,)."""
    _, reach = tra_blocked(q, k, v, log_forget, sparse, contextual, return_reach=True)      # (B, H, blocks)
    possible = torch.arange(1, reach.size(-1) + 1, device=reach.device).expand_as(reach)
    return 1 - (reach + 1).sum((0, 2)) / possible.sum((0, 2))


@torch.no_grad()
def measure_gates(attn, x):
    """What the heads of an attention with a forget gate do with x (B, T, C): {title of a column: its values (H,)}."""
    log_forget = attn.forget(x)                                                     # (B, H, T)
    of_head = log_forget.transpose(0, 1).flatten(1)                                 # (H, B * T)
    quantiles = {"forget f: 10%": 0.1, "median": 0.5, "90%": 0.9}
    columns = {title: of_head.quantile(share, dim=1) for title, share in quantiles.items()}
    if isinstance(attn, TRA):
        q, k, v = attn.heads(x)
        # One head at a time: all of them may not fit.
        positive = [(q[:, h] @ k[:, h].mT > 0).tril().sum() for h in range(q.size(1))]
        pairs = x.size(0) * x.size(1) * (x.size(1) + 1) / 2
        columns["keys with S > 0, %"] = 100 * torch.stack(positive) / pairs
        columns["key blocks skipped, %"] = 100 * skipped_share(q, k, v, log_forget, attn.config.sparse,
                                                               attn.config.contextual)
    return columns


def print_gates(runs, args):
    """A table for each run that has forget gates, over up to 100 examples, or over one window of the test text."""
    for run in runs:
        model, task = load(run, args.device)
        if not hasattr(model.blocks[0].attn, "forget"):
            print(f"{run}: {model.config.attn} has no forget gates\n")
            continue
        is_text = task.unit == "tokens"
        split = args.split or list(task.splits)[-1 if is_text else 1]
        x, _ = next(iter(task.test(split, int(split) + 1 if is_text else 100)))
        idx = torch.from_numpy(x).to(model.head.weight.device)
        cells = []
        for layer, (attn, inputs) in enumerate(layers_of(model, idx), start=1):
            columns = measure_gates(attn, inputs)
            for head, values in enumerate(zip(*columns.values()), start=1):
                cells.append([str(layer), str(head), *(f"{value:.2f}" for value in values)])
        print(f"{run}, reading {len(x)} x {x.shape[1]} tokens of {split}:\n")
        print("\n".join(markdown([["layer", "head", *columns], *cells])) + "\n")


# -----------------------------------------------------------------------------

KINDS = {"results": draw_results, "losses": draw_losses, "attention": draw_attention, "position": draw_position,
         "speed": draw_speed, "gates": print_gates}


def main(argv=None):
    """Draw, save, and return the figure."""
    parser = argparse.ArgumentParser(prog="python -m extras.plot", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    add("runs", nargs="*", default=["out"], metavar="RUN", help="folders that train.py wrote, patterns, folders of "
        "runs (default: all in out/); for results also .jsonl files of records, for speed a file of extras.bench")
    add("--out", metavar="FILE", help="the picture: .png, .svg or .pdf (default KIND.png)")
    add("--attn", metavar="A,A", help="results, losses, position: only these attentions")
    add("--task", metavar="T,T", help="results, losses, position: only these tasks, in this order")
    add("--best", action="store_true", help="results: each attention only at the best of its settings")
    add("--example", metavar="TEXT", help="attention: the tokens to read (default: an example of the first test set)")
    add("--split", metavar="S", help="position, gates: the test set (default: the first, or a text's longest window)")
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
    with matplotlib.rc_context(LOOK):
        figure = KINDS[args.kind](runs, args)
        # tight: the picture grows to hold the legend
        figure.savefig(path, dpi=min(200, 20_000 / max(figure.get_size_inches())), bbox_inches="tight")
    print(f"wrote {path}")
    return figure


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {str(error).splitlines()[0]}")
