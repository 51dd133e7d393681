"""
Pictures of runs. They need matplotlib, which nothing else here does.

    python -m extras.plot results out/copy-* --out copy.png           # the tables of eval.py as a picture
    python -m extras.plot results results/runs.jsonl --attn tra,rope --task copy,wikitext-2-byte
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
import os
import re
import statistics
import sys
import warnings
from dataclasses import dataclass

import numpy as np
import torch

from eval import (METRICS, choose, find_runs, group, load, load_checkpoint, make_record, markdown, open_task,
                  predictions, read_records)
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
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "font.size": 11,
        "axes.titlesize": "medium", "xtick.labelsize": "small", "figure.constrained_layout.h_pad": 0.07}
# Okabe and Ito's colours, which every kind of eye can tell apart, then some of Tol's. The first are the attentions'.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#000000", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#999999",
           "#999933", "#44AA99", "#AA4499"]
MARKERS = "os^DvPX*<>p"

# -----------------------------------------------------------------------------
# Panels with lines


@dataclass
class Panel:
    title: str
    xlabel: str
    ylabel: str
    lines: list                 # (name of a row, {x: the values of its seeds})
    dashed: list = ()           # more of these
    trained: int = None         # the longest x in training
    xscale: str = "log"


def choose_styles(rows):
    """{name of a row: its look}, in the order of model.py. The first row of an attention has the attention's look."""
    rank = {attn: place for place, attn in enumerate(ATTENTIONS)}
    attn_of = {row: re.match(r"\w*", row)[0] for row in rows}           # tra, of "tra no-sparse" and of "tra, seed 0"
    free, others, styles = dict(rank), itertools.count(len(rank)), {}
    for row in sorted(attn_of, key=lambda row: (rank.get(attn_of[row], len(rank)), row not in rank)):
        attn, label = attn_of[row], row
        if attn in ATTENTIONS:
            label = ATTENTIONS[attn].__name__ + row[len(attn):]
        place = free.pop(attn) if attn in free else next(others)
        styles[row] = dict(label=label, color=COLOURS[place % len(COLOURS)], marker=MARKERS[place % len(MARKERS)],
                           linewidth=1.5 if place else 2.5, zorder=2 if place else 3)
    return styles


def set_log_y(ax):
    """A logarithmic y axis, labelled over its whole range with 1,000 and 0.001 rather than 1e3 and 1e-3."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    if high / low < 4:
        ax.yaxis.set_major_locator(MaxNLocator(6))
    elif high / low < 30:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    elif high / low < 500:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:,.7f}".rstrip("0").rstrip("."))


def draw_panel(ax, panel, styles):
    """Means over seeds as lines, shaded from the lowest seed to the highest."""
    for i, (name, points) in enumerate([*panel.lines, *panel.dashed]):
        look = styles[name] | {"linestyle": "-" if i < len(panel.lines) else "--"}
        if len(points) > 15:
            look["marker"] = ""
        low, high = [min(seeds) for seeds in points.values()], [max(seeds) for seeds in points.values()]
        ax.fill_between(list(points), low, high, color=look["color"], linewidth=0, alpha=0.15)
        ax.plot(list(points), [statistics.fmean(seeds) for seeds in points.values()], **look)
    ax.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel, xscale=panel.xscale)
    if panel.trained:
        ax.axvline(panel.trained, color="gray", linestyle="--", linewidth=1, zorder=1)
        ax.set_xlabel(f"{panel.xlabel} (trained up to {panel.trained:,})")
    if panel.xscale == "log":
        ticks = sorted({x for _, points in panel.lines for x in points})
        ax.set_xticks(ticks if len(ticks) <= 7 else ticks[::-2])
    ax.xaxis.set_major_formatter("{x:,.0f}")
    if panel.ylabel.endswith("%"):
        ax.set_ylim(-4, 104)
    else:
        set_log_y(ax)
    ax.minorticks_off()
    ax.grid(alpha=0.25)


def draw_panels(panels, caption=""):
    """A figure of up to four panels in a row, with one legend."""
    styles = choose_styles([name for panel in panels for name, _ in panel.lines])
    if not styles:
        raise ValueError("there is nothing to draw")
    rows, columns = math.ceil(len(panels) / 4), min(4, len(panels))
    figure = Figure(figsize=(4.8 * columns, 3.8 * rows), layout="constrained")
    for place, panel in enumerate(panels, start=1):
        draw_panel(figure.add_subplot(rows, columns, place), panel, styles)
    inches = 0.8 + 0.1 * max(len(look["label"]) for look in styles.values())        # of an entry of the legend
    figure.legend(handles=[Line2D([], [], **look) for look in styles.values()], loc="outside upper center",
                  ncols=max(1, int(4.8 * columns / inches)))
    counts = {len(seeds) for panel in panels for _, points in panel.lines for seeds in points.values()}
    if max(counts, default=1) > 1:
        count = " or ".join(map(str, sorted(counts)))
        caption = f"mean of {count} seeds; shaded: from the lowest seed to the highest"
    figure.supxlabel(caption, fontsize="small", color="gray")
    return figure


# -----------------------------------------------------------------------------
# What the panels show


def select(records, args):
    """The records of the attentions and the tasks that the flags name, in the flags' order of tasks."""
    if args.attn:
        records = [record for record in records if record["attn"] in args.attn.split(",")]
    return choose(records, args.task and args.task.split(","))


def title_of(about, kind=""):
    return f"{about['title'] or about['task']} {kind}".rstrip() + f", {about['scale']} scale"


def find_length(split, trained):
    """The kind of a test set and its length: reverse, 20 of reverse-2x, if 10 was trained; sparse, 10 of sparse."""
    kind, _, length = split.rpartition("-")
    if length.isdigit():                                # a window
        return kind, int(length)
    if re.fullmatch(r"[\d.]+x", length):
        return kind, int(float(length[:-1]) * trained)
    return split, trained


def draw_records(records, xlabel=None, ylabel=None):
    """The tables of eval.py: a panel for each kind of test set of a task."""
    panels = []
    for about, rows in group(records):
        # The first size of a task is that of its longest training sequence.
        size, trained = next(iter(about["sizes"].items()))
        metric = METRICS[about["metric"]][0].partition(",")[0]          # "exact match in %", "perplexity by window"
        factor = 100 if metric.endswith("%") else 1
        lengths = {}
        for split in next(iter(rows.values()))[0]["results"]:
            kind, length = find_length(split, trained)
            lengths.setdefault(kind, {})[length] = split
        for kind, splits in lengths.items():
            panel = Panel(title_of(about, kind), xlabel or size, ylabel or metric, lines=[], trained=trained)
            for name, members in rows.items():
                points = {x: [factor * record["results"][split] for record in members] for x, split in splits.items()}
                panel.lines.append((name, points))
            panels.append(panel)
    return draw_panels(panels)


def draw_results(runs, args):
    records = [record for run in runs for record in read_records(run)]
    return draw_records(select(records, args))


def draw_losses(runs, args):
    """A panel per task: the training loss of every run, and its validation loss, dashed."""
    records = []
    for run in runs:
        settings = load_checkpoint(run)["args"]
        with open(os.path.join(run, "log.jsonl"), encoding="utf-8") as log:
            # A run that was killed may have left half a line.
            lines = [json.loads(line) for line in log if line.endswith("\n")]
        records.append(make_record(settings, open_task(settings), {}) | {"log": lines})
    panels = []
    for about, rows in group(select(records, args)):
        panel = Panel(title_of(about), "step", "loss, nats per scored token", lines=[], dashed=[], xscale="linear")
        for name, members in rows.items():
            for record in members:
                for key, lines in (("loss", panel.lines), ("val_loss", panel.dashed)):
                    lines.append((name, {line["step"]: [line[key]] for line in record["log"] if key in line}))
        panels.append(panel)
    return draw_panels(panels, "training; dashed: validation")


def loss_by_position(model, task, window, count):
    """Mean loss of the tokens at positions 1, 2, 3-4, 5-8 ... of their window: {last of these: nats}."""
    total, seen = torch.zeros(2, window, dtype=torch.float64)
    for _, _, _, loss in predictions(model, task, str(window), count):
        total[:loss.size(1)] += loss.double().sum(0)
        seen[:loss.size(1)] += loss.size(0)
    ends = [1 << i for i in range((window - 1).bit_length())] + [window]
    return {str(end): (total[start:end].sum() / seen[start:end].sum()).item()
            for start, end in zip([0, *ends], ends) if seen[start:end].any()}


def draw_position(runs, args):
    """A panel per text, over as many tokens of it as the runs were tested on."""
    records = []
    for run in runs:
        model, task = load(run, args.device)
        if task.unit != "tokens":
            raise ValueError(f"{run} was trained on {task.name}; position is for runs of a text")
        settings = load_checkpoint(run)["args"]
        window = args.split or list(task.splits)[-1]
        found = loss_by_position(model, task, int(window), settings["examples"])
        records.append(make_record(settings, task, {}) | {"results": found})
    return draw_records(records, "position in the window", "loss, nats per token")


def draw_speed(runs, args):
    """A panel for each kind of thing that extras.bench measured by window: all but generation."""
    with open(runs[0], encoding="utf-8") as file:
        rows = json.load(file)["rows"]
    times = {}
    for row in rows:
        if row["what"] != "generation" and "seconds" in row:
            points = times.setdefault(row["what"], {}).setdefault(row["name"], {})
            points[row["window"]] = [1000 * row["seconds"]]
    return draw_panels([Panel(what, "window, tokens", "milliseconds", list(lines.items()))
                        for what, lines in times.items()])


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


def choose_example(task, text=None):
    """Token ids and their names: of a text, or of the first example of the first test set, up to 48 tokens."""
    if text is None:
        x, y = next(iter(task.test(list(task.splits)[1], 49)))
        last = np.flatnonzero(y[0] >= 0)[-1]            # what comes after the last scored token is padding
        ids = x[0, :last + 1][:48].tolist()
    else:
        ids = task.encode(text)
    if not 1 <= len(ids) <= 128:
        raise ValueError(f"a picture of attention shows 1 to 128 tokens, not {len(ids)}: choose another --example")
    return ids, [repr(task.decode([token]))[1:-1].replace(" ", "\u2423") for token in ids]


def draw_attention(runs, args):
    """A row of panels per layer, a panel per head, queries (y) against keys (x). Gray: a weight of exactly zero."""
    model, task = load(runs[0], args.device)
    ids, names = choose_example(task, args.example)
    layers = attention_weights(model, torch.tensor([ids], device=model.head.weight.device))
    S, L, H = len(ids), model.config.n_layer, model.config.n_head
    has_distances = S <= 16 and layers[0][1] is not None
    side = max(2.6, 0.13 * S + 0.3)
    figure = Figure(figsize=(H * side, L * side), layout="constrained")
    axes = figure.subplots(L, H, squeeze=False, sharex=True, sharey=True)        # names at the edges only
    for (layer, head), ax in np.ndenumerate(axes):
        weights = layers[layer][0][head]
        is_gray = (weights == 0) & causal_mask(S, S, "cpu")
        image = ax.imshow(torch.where(weights != 0, weights, math.nan).numpy(), cmap="YlGnBu", vmin=0, vmax=1)
        ax.imshow(torch.where(is_gray, 0.75, math.nan).numpy(), cmap="gray", vmin=0, vmax=1)
        if has_distances:
            for i, j in weights.nonzero().tolist():
                ax.text(j, i, int(layers[layer][1][head, i, j]), fontsize=7, ha="center", va="center",
                        color="white" if weights[i, j] > 0.5 else "black")
        ax.set_title(f"layer {layer + 1}, head {head + 1}")
        ax.set_xticks(range(S), names, fontsize=8)
        ax.set_yticks(range(S), names, fontsize=8)
        for label in ax.get_xticklabels():
            label.set_rotation(90 if len(label.get_text()) > 2 else 0)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, label="weight", shrink=0.6, pad=0.01).outline.set_visible(False)
    figure.suptitle(f"{task.name} with {ATTENTIONS[model.config.attn].__name__}")
    in_cells = "; in a cell: TRA's distance n" if has_distances else ""
    figure.supxlabel(f"queries (y) and keys (x); gray: a weight of exactly zero{in_cells}", fontsize="small",
                     color="gray")
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
    quantiles = torch.tensor([0.1, 0.5, 0.9], device=x.device)
    low, median, high = log_forget.transpose(0, 1).flatten(1).quantile(quantiles, dim=1)    # (H,) each
    columns = {"forget f: 10%": low, "median": median, "90%": high}
    if isinstance(attn, TRA):
        q, k, v = attn.heads(x)
        # One head at a time: all of them may not fit.
        positive = [(q[:, h] @ k[:, h].mT > 0).tril().sum() for h in range(q.size(1))]
        pairs = x.size(0) * x.size(1) * (x.size(1) + 1) / 2
        columns["keys with S > 0, %"] = 100 * torch.stack(positive) / pairs
        skipped = skipped_share(q, k, v, log_forget, attn.config.sparse, attn.config.contextual)
        columns["key blocks skipped, %"] = 100 * skipped
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
    add("--attn", metavar="A,A", help="results, losses: only these attentions")
    add("--task", metavar="T,T", help="results, losses: only these tasks, in this order")
    add("--example", metavar="TEXT", help="attention: the tokens to read (default: an example of the first test set)")
    add("--split", metavar="S", help="position, gates: the test set to read (default: the first, or a text's longest "
        "window)")
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
    warnings.filterwarnings("ignore", "Glyph")          # a sign that the font lacks
    with matplotlib.rc_context(LOOK):
        figure = KINDS[args.kind](runs, args)
        figure.savefig(path, dpi=min(200, 20_000 / max(figure.get_size_inches())))
    print(f"wrote {path}")
    return figure


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {str(error).splitlines()[0]}")
