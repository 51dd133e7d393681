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

from eval import find_runs, group, load, load_checkpoint, make_record, markdown, open_task, predictions, read_records
from extras.fast import tra_blocked
from model import ATTENTIONS, TRA, causal_mask, count_back

LOOK = {"text.parse_math": False,       # a $ is a token like others
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        "font.size": 11, "axes.titlesize": "medium", "lines.markersize": 6}
# Okabe and Ito's colours, which every kind of eye can tell apart, then some of Tol's. The first are the attentions'.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#000000", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#999999",
           "#999933", "#44AA99", "#AA4499"]
MARKERS = "os^DvPX*<>ph"

# -----------------------------------------------------------------------------
# Panels with lines


@dataclass
class Panel:
    title: str
    xlabel: str
    ylabel: str
    lines: list                 # (name of a row, x of its points, values of its seeds at each x, special style)
    ticks: list = None          # of x: numbers, or names for x = 0, 1, 2 ...
    trained: int = None         # the longest x in training
    is_log_x: bool = False
    is_log_y: bool = False


def new_figure(rows, columns, width, height):
    """A figure and its rows x columns panels, each of this width and height in inches."""
    from matplotlib.figure import Figure        # not pyplot: no window, nothing global
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def choose_styles(rows):
    """{name of a row: its look}, in the order of model.py. An attention's shortest name takes the attention's look."""
    order = list(ATTENTIONS)
    attn_of = {row: re.split("[ ,]", row)[0] for row in rows}           # tra, of "tra no-sparse" and of "tra, seed 0"
    places = {}
    for row in sorted(attn_of, key=len):
        place = order.index(attn_of[row]) if attn_of[row] in order else None
        is_free = place is not None and place not in places.values()
        places[row] = place if is_free else max([*places.values(), len(order) - 1]) + 1
    styles = {}
    for row in sorted(attn_of, key=lambda row: (order + [attn_of[row]]).index(attn_of[row])):
        attn, place = attn_of[row], places[row]
        name = ATTENTIONS[attn].__name__ + row[len(attn):] if attn in order else row
        styles[row] = dict(label=name, color=COLOURS[place % len(COLOURS)], marker=MARKERS[place % len(MARKERS)],
                           linewidth=1.5 if place else 2.5, zorder=2 if place else 3)
    return styles


def plain_number(x, _=None):
    """1,000 and 0.001 rather than 1e3 and 1e-3."""
    return f"{x:,.7f}".rstrip("0").rstrip(".")


def set_log_y(ax):
    """A logarithmic y axis that is labelled over its whole range, the denser the shorter it is."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    digits = (1,) if high / low > 500 else (1, 2, 5) if high / low > 30 else (1, 1.5, 2, 3, 4, 6)
    ax.yaxis.set_major_locator(MaxNLocator(6) if high / low < 4 else LogLocator(subs=digits))
    ax.yaxis.set_major_formatter(plain_number)
    ax.yaxis.set_minor_locator(NullLocator())


def draw_panels(panels, caption=""):
    """Means over seeds as lines, shaded from the lowest seed to the highest; where x is a name, dots side by side."""
    styles = choose_styles([name for panel in panels for name, *_ in panel.lines])
    rows = 1 if len(panels) <= 3 else 2
    figure, axes = new_figure(rows, math.ceil(len(panels) / rows), 4.8, 3.8)
    handles = {}
    for ax, panel in zip(axes.flat, panels):
        is_named = panel.ticks is not None and isinstance(panel.ticks[0], str)
        for i, (name, x, values, special) in enumerate(panel.lines):
            look = styles[name] | special
            low, high = [min(seeds) for seeds in values], [max(seeds) for seeds in values]
            if is_named:
                look["linestyle"] = "none"
                aside = (i - (len(panel.lines) - 1) / 2) * min(0.16, 0.8 / len(panel.lines))
                x = [place + aside for place in x]
                ax.vlines(x, low, high, color=look["color"], linewidth=5, alpha=0.3)
            else:
                ax.fill_between(x, low, high, color=look["color"], linewidth=0, alpha=0.15)
            line, = ax.plot(x, [statistics.fmean(seeds) for seeds in values], **look)
            handles.setdefault(name, line)
        finish_panel(ax, panel, is_named)
    for ax in axes.flat[len(panels):]:
        ax.remove()
    inches_of_one = 0.8 + 0.1 * max(len(look["label"]) for look in styles.values())
    figure.legend(handles=[handles[name] for name in styles], loc="outside upper center",
                  ncols=max(1, int(figure.get_figwidth() / inches_of_one)))
    counts = sorted({len(seeds) for panel in panels for _, _, values, _ in panel.lines for seeds in values})
    if counts[-1] > 1:
        count = str(counts[-1]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        caption = f"mean of {count} seeds; shaded: from the lowest seed to the highest"
    figure.supxlabel(caption, fontsize="small", color="gray")
    return figure


def finish_panel(ax, panel, is_named):
    """Axes, grid and texts."""
    ax.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    ax.grid(alpha=0.25)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    if panel.is_log_x:
        ax.set_xscale("log")
    if panel.is_log_y:
        set_log_y(ax)
    if panel.ylabel.endswith("%"):
        ax.set_ylim(-4, 104)
    if is_named:
        ax.set_xticks(range(len(panel.ticks)), panel.ticks, fontsize="small")
    elif panel.ticks:
        ticks = panel.ticks if len(panel.ticks) <= 7 else panel.ticks[::-2]
        ax.set_xticks(ticks, [plain_number(tick) for tick in ticks], fontsize="small")
        ax.set_xticks([], minor=True)
    if panel.trained and not is_named:
        ax.axvline(panel.trained, color="gray", linestyle="--", linewidth=1, zorder=1)
        ax.text(panel.trained, 1.02, "trained up to here", color="gray", fontsize="small",
                transform=ax.get_xaxis_transform())
        ax.set_title(panel.title, pad=18)       # above that text


# -----------------------------------------------------------------------------
# What the panels show


def title_of(about, part=""):
    return f"{about['title'] or about['task']} {part}".rstrip() + f", {about['scale']} scale"


def lines_of(rows, key, places, factor=1):
    """The lines of a panel: for each row record[key][name] at x = places[name]."""
    return [(row, list(places.values()), [[factor * record[key][name] for record in members] for name in places], {})
            for row, members in rows.items()]


def draw_results(records):
    """The tables of eval.py: a panel per task, and for a task with several instructions one per instruction."""
    panels = []
    for about, rows in group(records):
        splits = list(next(iter(rows.values()))[0]["results"])
        if about["metric"] == "perplexity":
            places = {split: int(split) for split in splits}
            panels.append(Panel(title_of(about), "window, tokens", "perplexity", lines_of(rows, "results", places),
                                list(places.values()), about["sizes"]["window"], is_log_x=True, is_log_y=True))
            continue
        # Test sets such as 2x and reverse-10x have a length. If one has none, as in flip-flop, all stay names.
        ylabel, length = f"{about['metric']}, %", about["sizes"].get("length")
        matches = {split: re.fullmatch(r"(?:(.+)-)?([\d.]+)x", split) for split in splits}
        if length is None or not all(matches.values()):
            places = {split: x for x, split in enumerate(splits)}
            panels.append(Panel(title_of(about), "test set", ylabel, lines_of(rows, "results", places, 100), splits))
            continue
        for part in dict.fromkeys(match[1] for match in matches.values()):
            places = {split: int(float(match[2]) * length) for split, match in matches.items() if match[1] == part}
            panels.append(Panel(title_of(about, part or ""), "length", ylabel, lines_of(rows, "results", places, 100),
                                list(places.values()), length))
    return draw_panels(panels)


def read_log(run, name):
    """Steps and values of a run's log, without the half line that a killed run may have left."""
    with open(os.path.join(run, "log.jsonl"), encoding="utf-8") as log:
        lines = [json.loads(line) for line in log if line.endswith("\n")]
    lines = [line for line in lines if name in line]
    return [line["step"] for line in lines], [line[name] for line in lines]


def draw_losses(records):
    """A panel per task: the training loss of every run, and its validation loss, dashed. Each record names its run."""
    panels = []
    for about, rows in group([record | {"results": {}} for record in records]):
        lines = []
        for name, members in rows.items():
            for record in members:
                for key, linestyle in (("loss", "-"), ("val_loss", "--")):
                    steps, values = read_log(record["run"], key)
                    special = dict(linestyle=linestyle, linewidth=1.2, marker="." if len(steps) == 1 else "")
                    if steps:
                        lines.append((name, steps, [[value] for value in values], special))
        if not lines:
            raise ValueError(f"the log of {record['run']} holds no loss yet")
        panels.append(Panel(title_of(about), "step", "loss, nats per scored token", lines, is_log_y=True))
    return draw_panels(panels, "training; dashed: validation")


def loss_by_position(model, task, window, count):
    """Mean loss of the tokens at positions 1, 2, 3-4, 5-8 ... of their window: {last of these: nats}."""
    total, seen = torch.zeros(2, window, dtype=torch.float64)
    for _, _, _, loss in predictions(model, task, str(window), count):
        total[:loss.size(1)] += loss.double().sum(0)
        seen[:loss.size(1)] += loss.size(0)
    ends = [1 << i for i in range(window.bit_length()) if 1 << i < window] + [window]
    return {end: (total[start:end].sum() / seen[start:end].sum()).item()
            for start, end in zip([0, *ends], ends) if seen[start:end].any()}


def draw_position(runs, args):
    records = []
    for run in runs:
        model, task = load(run, args.device, args.data)
        if task.metric != "perplexity":
            raise ValueError(f"{run} was trained on {task.name}; position is for runs of a text")
        settings = load_checkpoint(run)["args"]
        window = max(map(int, args.windows or list(task.splits)[1:]))
        found = loss_by_position(model, task, window, args.examples or settings["examples"])
        records.append(make_record(settings, task, {}) | {"by_position": found})
    panels = []
    for about, rows in group(records):
        ends = list(next(iter(rows.values()))[0]["by_position"])
        lines = lines_of(rows, "by_position", dict(zip(ends, ends)))
        panels.append(Panel(title_of(about), "position in the window, up to", "loss, nats per token", lines, ends,
                            about["sizes"]["window"], is_log_x=True))
    return draw_panels(panels)


def draw_speed(path):
    """Time by window of what extras.bench measured. Generation has no windows and is left to the table."""
    with open(path, encoding="utf-8") as file:
        rows = json.load(file).get("rows", [])
    rows = [row for row in rows if row["what"] != "generation" and row["seconds"]]
    if not rows:
        raise ValueError(f"{path} holds no times by window; python -m extras.bench --json FILE writes some")
    panels = []
    for what in dict.fromkeys(row["what"] for row in rows):
        here = [row for row in rows if row["what"] == what]
        lines = []
        for name in dict.fromkeys(row["name"] for row in here):
            times = {row["window"]: [1000 * row["seconds"]] for row in here if row["name"] == name}
            lines.append((name, list(times), list(times.values()), {}))
        ticks = sorted({row["window"] for row in here})
        panels.append(Panel(what, "window, tokens", "milliseconds", lines, ticks, is_log_x=True, is_log_y=True))
    return draw_panels(panels)


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
    names = [task.decode([token]) for token in ids]
    return ids, [(name if name.isprintable() else repr(name)[1:-1]).replace(" ", "\u2423") for name in names]


def draw_attention(title, names, layers):
    """A row of panels per layer, a panel per head, queries (y) against keys (x). Gray: a weight of exactly zero."""
    S, H = len(names), layers[0][0].size(0)
    side = max(2.6, 0.13 * S + 0.3)
    figure, axes = new_figure(len(layers), H, side, side)
    causal = causal_mask(S, S, "cpu")
    has_distances = S <= 16 and layers[0][1] is not None
    for (layer, head), ax in np.ndenumerate(axes):
        weights = layers[layer][0][head]
        image = ax.imshow(torch.where(weights != 0, weights, math.nan).numpy(), cmap="YlGnBu", vmin=0, vmax=1)
        ax.imshow(torch.where((weights == 0) & causal, 0.75, math.nan).numpy(), cmap="gray", vmin=0, vmax=1)
        if has_distances:
            for i, j in weights.nonzero().tolist():
                ax.text(j, i, int(layers[layer][1][head, i, j]), fontsize=7, ha="center", va="center",
                        color="white" if weights[i, j] > 0.5 else "black")
        ax.set_title(f"layer {layer + 1}, head {head + 1}")
        ax.set_xticks(range(S), names if layer == len(layers) - 1 else [""] * S, fontsize=8,
                      rotation=90 if max(map(len, names)) > 2 else 0)
        ax.set_yticks(range(S), names if head == 0 else [""] * S, fontsize=8)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, label="weight", shrink=0.6, pad=0.01).outline.set_visible(False)
    figure.suptitle(title)
    in_cells = "; in a cell: TRA's distance n" if has_distances else ""
    figure.supxlabel(f"queries (y) and keys (x); gray: a weight of exactly zero{in_cells}", fontsize="small",
                     color="gray")
    return figure


def skipped_share(reach):
    """The share of key blocks that tra_blocked never met, (H,), by its reach (B, H, blocks)."""
    possible = torch.arange(1, reach.size(-1) + 1, device=reach.device).expand_as(reach)
    return 1 - (reach + 1).sum((0, 2)) / possible.sum((0, 2))


@torch.no_grad()
def measure_gates(model, idx):
    """What each head with a forget gate does when the model reads idx (B, T): [{layer, head, forget, ...}, ...].

    forget: the gates' 10%, 50% and 90% quantiles. positive, the share of keys with S > 0, and skipped are TRA's.
    """
    rows, (B, T) = [], idx.shape
    for layer, (attn, x) in enumerate(layers_of(model, idx), start=1):
        if not hasattr(attn, "forget"):
            continue
        log_forget = attn.forget(x)                                                 # (B, H, T)
        quantiles = torch.tensor([0.1, 0.5, 0.9], device=idx.device)
        forget = log_forget.transpose(0, 1).flatten(1).quantile(quantiles, dim=1).T         # (H, 3)
        heads = [dict(layer=layer, head=head, forget=f) for head, f in enumerate(forget.tolist(), start=1)]
        if isinstance(attn, TRA):
            q, k, v = attn.heads(x)
            reach = tra_blocked(q, k, v, log_forget, attn.config.sparse, attn.config.contextual, return_reach=True)[1]
            count = 0
            for end in range(256, T + 256, 256):        # some rows at a time: T x T may not fit
                scores = q[:, :, end - 256:end] @ k[:, :, :end].mT
                count = count + ((scores > 0) & causal_mask(*scores.shape[2:], idx.device)).sum((0, 2, 3))      # (H,)
            positive = count / (B * T * (T + 1) / 2)
            for head, p, s in zip(heads, positive.tolist(), skipped_share(reach).tolist()):
                head.update(positive=p, skipped=s)
        rows += heads
    return rows


def print_gates(runs, args):
    """A table for each run that has forget gates, over up to 100 examples, or over one window of the test text."""
    found = 0
    for run in runs:
        model, task = load(run, args.device, args.data)
        split, count = list(task.splits)[1], 100
        if task.metric == "perplexity":
            window = max(map(int, args.windows or [4096]))
            split, count = str(window), window + 1
        x, _ = next(iter(task.test(split, count)))
        rows = measure_gates(model, torch.from_numpy(x).to(model.head.weight.device))
        cells = [["layer", "head", "forget f: 10%", "median", "90%", "keys with S > 0, %", "key blocks skipped, %"]]
        for row in rows:
            shares = [f"{100 * row[name]:.0f}" if name in row else "" for name in ("positive", "skipped")]
            cells.append([str(row["layer"]), str(row["head"]), *(f"{f:.2f}" for f in row["forget"]), *shares])
        if rows:
            found += 1
            print(f"{run}, reading {len(x)} x {x.shape[1]} tokens of {split}:", "", *markdown(cells), "", sep="\n")
    if not found:
        raise ValueError("none of these runs has forget gates; those of tra and fox do")


# -----------------------------------------------------------------------------
# The command line


def read_runs(runs, args):
    """The records that the flags ask for, each with the run it comes from."""
    records = []
    for run in runs:
        found = read_records(run)
        if not found and args.kind == "losses":
            settings = load_checkpoint(run)["args"]
            found = [make_record(settings, open_task(settings), {})]
        elif not found:
            print(f"{run} was not tested yet and is left out", file=sys.stderr)
        records += [record | {"run": run} for record in found if not args.attn or record["attn"] in args.attn]
    if args.task:
        records = [record for task in args.task for record in records if task in (record["task"], record.get("title"))]
    if not records:
        raise ValueError(f"{', '.join(args.runs)}: nothing to draw is left")
    return records


def draw(args):
    """The figure that the flags ask for."""
    runs = find_runs(args.runs)
    if args.kind in ("attention", "speed") and len(runs) > 1:
        raise ValueError(f"a picture of {args.kind} shows one at a time, not {len(runs)}")
    if args.kind == "attention":
        model, task = load(runs[0], args.device, args.data)
        ids, names = choose_example(task, args.example)
        layers = attention_weights(model, torch.tensor([ids], device=model.head.weight.device))
        return draw_attention(f"{task.name} with {ATTENTIONS[model.config.attn].__name__}", names, layers)
    if args.kind == "position":
        return draw_position(runs, args)
    if args.kind == "speed":
        return draw_speed(runs[0])
    records = read_runs(runs, args)
    return draw_results(records) if args.kind == "results" else draw_losses(records)


def main(argv=None):
    """Draw, save, and return the figure."""
    def names(text):
        return text.split(",")

    parser = argparse.ArgumentParser(prog="python -m extras.plot", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("kind", choices=("results", "losses", "attention", "position", "speed", "gates"), metavar="KIND",
        help="results, losses, attention, position, speed or gates")
    add("runs", nargs="*", default=["out"], metavar="RUN", help="folders that train.py wrote, patterns, folders of "
        "runs (default: all in out/), .jsonl files of records; for speed, a file of extras.bench")
    add("--out", metavar="FILE", help="the picture: .png, .svg or .pdf (default KIND.png)")
    add("--attn", type=names, metavar="A,A", help="results, losses: only these attentions")
    add("--task", type=names, metavar="T,T", help="results, losses: only these tasks, in this order")
    add("--example", metavar="TEXT", help="attention: the tokens to read (default: an example of the first test set)")
    add("--windows", type=names, metavar="N,N", help="position, gates: the longest of these windows")
    add("--examples", type=int, metavar="N", help="position: the first N tokens of the text (default: as tested)")
    add("--data", metavar="DIR", help="the prepared text, if it is no longer where it was in training")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps (default: the best there is)")
    args = parser.parse_args(argv)
    if args.kind == "gates":
        return print_gates(find_runs(args.runs), args)
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("pictures need matplotlib: pip install matplotlib") from error
    path = args.out or f"{args.kind}.png"
    if not path.endswith((".png", ".svg", ".pdf")):
        raise ValueError(f"{path} does not end in .png, .svg or .pdf")
    with matplotlib.rc_context(LOOK), warnings.catch_warnings():
        warnings.simplefilter("ignore")                 # about signs that the font lacks
        figure = draw(args)
        figure.savefig(path, dpi=min(200, 20_000 / max(figure.get_size_inches())))
    print(f"wrote {path}")
    return figure


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {str(error).splitlines()[0]}")
