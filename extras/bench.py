"""
Time and memory side by side: a training step, attention alone, generation. Or the perplexity pass of runs of a text.

    python -m extras.bench --attn rope,tra
    python -m extras.bench --windows 512,2048 --batch 4 --dropout 0         # a CPU's fused kernels have no dropout
    python -m extras.bench out/wikitext-2-byte-* --windows 4096,16384
    python -m extras.bench --json bench.json                # for a picture: python -m extras.plot speed bench.json

The contestants take turns, round after round, and the best of each counts: so warming up, and whatever else the machine
does, is left out. Ratios are to the first row, RoPE or torch's own attention. On CUDA the forward passes run under the
autocast of train.py: bfloat16 where the GPU has it. Elsewhere training is measured up to a window of 2,048.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from functools import partial

import torch
import torch.nn.functional as F

from eval import find_runs, load, markdown, measure, pick_device
from extras.fast import tra_blocked, tra_for_long_sequences
from model import ATTENTIONS, GPT, GPTConfig, full_precision, nope_attention, tra_plain

ROUNDS = 5
# The measured columns, and how a table shows them. In the JSON file, rows have the same names.
COLUMNS = {"time, ms": ",.1f", "ratio": ".2f", "peak memory, MB": ",.0f", "perplexity": ".2f"}


def autocast_dtype(device):
    is_native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_native else torch.float32


def with_autocast(device, function, *args, **kwargs):
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast_dtype(device) == torch.bfloat16):
        return function(*args, **kwargs)


def milliseconds_of(run, device):
    """The time of one call. A GPU works while Python goes on, so we wait for it before and after."""
    wait = torch.get_device_module(device).synchronize
    wait()
    start = time.perf_counter()
    run()
    wait()
    return 1000 * (time.perf_counter() - start)


def peak_memory(run, device):
    """Megabytes that one call holds at most, beside what was there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")     # or the profiler announces itself
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(changes, initial=0)) / 2**20


def time_side_by_side(what, window, batch, contestants, device):
    """A row for each of {name: function}, RoPE first. One that fails says why, and the rest goes on."""
    names = sorted(contestants, key=lambda name: not name.startswith("rope"))
    rows = [dict(what=what, name=name, window=window, batch=batch) for name in names]
    for row in rows * ROUNDS:
        run = contestants[row["name"]]
        try:
            row["time, ms"] = min(row.get("time, ms", math.inf), milliseconds_of(run, device))
            if "peak memory, MB" not in row and device.type in ("cpu", "cuda"):         # MPS does not count it
                row["peak memory, MB"] = peak_memory(run, device)
        except RuntimeError as error:
            row["failure"] = str(error).strip().splitlines()[0][:60]        # CUDA out of memory, for example
    for row in rows:
        if "failure" not in row:
            row["ratio"] = row["time, ms"] / rows[0].get("time, ms", math.nan)
            if what == "perplexity pass":
                row["perplexity"] = contestants[row["name"]]()["perplexity"]
    return rows


# -----------------------------------------------------------------------------
# What is measured: names and functions to call


def training_step(attn, x, y, dropout):
    """A step of the paper's mini model. The learning rate is 0, so that nothing changes."""
    model = GPT(GPTConfig(attn=attn, vocab_size=256, dropout=dropout)).to(x.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def step():
        _, loss = with_autocast(x.device, model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


def attention_forms(window, batch, backward, device):
    """Attention alone, 8 heads of width 64. The gates are at -0.5, or at 0, where nothing is forgotten or skipped."""
    q, k, v = F.rms_norm(torch.randn(3, batch, 8, window, 64, device=device, dtype=autocast_dtype(device)), (64,))
    f, zero = (torch.full((batch, 8, window), gate, device=device) for gate in (-0.5, 0.0))
    for tensor in (q, k, v, f, zero):
        tensor.requires_grad_(backward)
    out_gradient = torch.randn_like(v)

    def attend(attention, *gates):
        out = with_autocast(device, attention, q, k, v, *gates)
        if backward:
            torch.autograd.grad(out, (q, k, v, *gates), out_gradient)

    # model.py's choice for long sequences: the fused kernel where it works, else blocks
    long_form = tra_for_long_sequences(f.device)
    name = long_form.__name__.replace("_", " ")
    yield "sdpa", partial(attend, nope_attention)
    yield name, partial(attend, long_form, f)
    if device.type == "cuda" or window <= 4096:         # a CPU that runs out of memory does not just say so
        yield f"{name}, gates at 0", partial(attend, long_form, zero)
        yield "tra plain", partial(attend, tra_plain, f)
    if device.type == "cuda":
        yield "tra plain, compiled", partial(attend, torch.compile(tra_plain, dynamic=False), f)
        yield "tra blocked", partial(attend, full_precision(tra_blocked), f)


def generation(attns, count, device):
    """The likeliest continuation of one token."""
    start = torch.zeros(1, 1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def generate_without_cache(model):
        idx = start
        for _ in range(count):
            idx = torch.cat((idx, model(idx)[0][:, -1:].argmax(-1)), dim=1)

    for attn in attns:
        model = GPT(GPTConfig(attn=attn, vocab_size=256)).to(device).eval()
        yield f"{attn}, cache", partial(with_autocast, device, model.generate, start, count, temperature=0)
        yield f"{attn}, no cache", partial(with_autocast, device, generate_without_cache, model)


def perplexity_passes(runs, window, count, device):
    """Trained runs over the start of their test text."""
    for run in find_runs(runs):
        model, task = load(run, device)
        yield f"{model.config.attn} {run}", partial(with_autocast, device, measure, model, task, str(window), count)


def measurements(args, device):
    """Yield the title, window, batch and contestants of one table after the other."""
    if args.runs:
        windows = args.windows or [4096, 16384]
        for window in windows:
            batch = 2 * max(windows) // window          # as many tokens at every window
            yield "perplexity pass", window, batch, perplexity_passes(args.runs, window, batch * window + 1, device)
        return
    attns, windows = args.attn.split(","), args.windows or [256, 1024, 4096, 16384]
    for window in windows:
        if device.type == "cuda" or window <= 2048:
            x, y = torch.randint(256, (2, args.batch or 4, window), device=device)
            yield "training step", window, len(x), [(attn, training_step(attn, x, y, args.dropout)) for attn in attns]
    for what in ("attention, forward", "attention, forward and backward"):
        for window in windows:
            batch = args.batch or 1
            yield what, window, batch, attention_forms(window, batch, what.endswith("backward"), device)
    yield "generation", args.tokens, 1, generation(attns, args.tokens, device)


def table(rows):
    """A Markdown table. Columns that no row has are left out."""
    columns = {title: form for title, form in COLUMNS.items() if any(title in row for row in rows)}
    cells = [["", *columns]]
    for row in rows:
        name = f"{row['name']}: {row['failure']}" if "failure" in row else row["name"]
        cells.append([name, *(format(row[title], form) if title in row else "" for title, form in columns.items())])
    return "\n".join(["{what}, {batch} x {window:,} tokens:".format_map(rows[0]), "", *markdown(cells), ""])


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m extras.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="runs of a text: measure their perplexity pass instead")
    add("--attn", default=",".join(ATTENTIONS), metavar="A,A", help="these attentions (default: all)")
    add("--windows", metavar="N,N", type=lambda text: sorted(map(int, text.split(","))), help="these windows")
    add("--batch", type=int, metavar="N", help="sequences (default: 4 in training, 1 for attention alone)")
    add("--dropout", type=float, default=GPTConfig.dropout, metavar="P", help="in training (default %(default)s)")
    add("--tokens", type=int, default=512, metavar="N", help="to generate (default 512)")
    add("--json", metavar="FILE", help="also write every number to this file")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps (default: the best there is)")
    args = parser.parse_args(argv)
    device = torch.device(pick_device(args.device))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} CPU threads, {autocast_dtype(device)}\n")
    rows = []
    for what, window, batch, contestants in measurements(args, device):
        new = time_side_by_side(what, window, batch, dict(contestants), device)
        print(table(new), flush=True)
        rows += new
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {str(error).splitlines()[0]}")
