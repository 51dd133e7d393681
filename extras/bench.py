"""
Time and memory, side by side in one process: a training step, attention alone, generation. With runs of a text, their
perplexity pass.

    python -m extras.bench --attn rope tra
    python -m extras.bench --windows 1024,4096 --batch 4 --dropout 0
    python -m extras.bench out/wikitext-2-byte-* --windows 4096,16384
    python -m extras.bench --json bench.json                # for a picture: python -m extras.plot speed bench.json

The contestants take turns, round after round, and the best of each counts: so warming up, and whatever else the machine
does, is left out. Ratios are to the first row of a window, which is RoPE or torch's own attention. On CUDA the forward
passes run under the autocast of train.py: bfloat16 where the GPU has it.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from functools import partial

import torch
import torch.nn.functional as F

from eval import find_runs, load, load_checkpoint, make_record, markdown, measure, name_rows, pick_device
from extras.fast import tra_blocked, tra_for_long_sequences
from extras.plot import layers_of, skipped_share
from model import ATTENTIONS, GPT, GPTConfig, TRA, full_precision, tra_attention, tra_plain

# -----------------------------------------------------------------------------
# Clocks


def precision(device):
    """The dtype of train.py's autocast on this device."""
    native = torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float32


def autocast(device):
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=precision(device) != torch.float32)


def time_once(run, device):
    """Seconds of one call. CUDA works while Python goes on, so there events tell the time."""
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
    """Bytes that one call holds at most, beside what was there before; None on MPS, which does not count them."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    if kind != "cpu":
        return None
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")     # or the profiler announces itself
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(changes, initial=0))


def side_by_side(what, window, batch, contestants, device, tokens=None, rounds=6):
    """A row for each of {name: function}: its best time, and its memory. One that fails says why; the rest goes on."""
    best, peak, failures = dict.fromkeys(contestants, math.inf), {}, {}
    for name in [*contestants] * rounds:
        if name in failures:
            continue
        try:
            best[name] = min(best[name], time_once(contestants[name], device))
            if name not in peak:
                peak[name] = peak_memory(contestants[name], device)
        except RuntimeError as error:
            text = str(error)
            is_full = "out of memory" in text or "allocate memory" in text
            failures[name] = "out of memory" if is_full else text.strip().splitlines()[0][:80]
    first, rows = next(iter(contestants)), []
    for name, seconds in best.items():
        row = dict(what=what, name=name, window=window, batch=batch, failure=failures.get(name), seconds=None)
        if name not in failures:
            row |= dict(seconds=seconds, ratio=None if first in failures else seconds / best[first],
                        tokens_per_second=(tokens or window * batch) / seconds, peak_bytes=peak[name])
        rows.append(row)
    return rows


# -----------------------------------------------------------------------------
# What is measured


@torch.no_grad()
def add_skipped(rows, models, idx):
    """To the rows of TRA, the share of key blocks that it skips when it reads idx (B, T)."""
    for row in rows:
        shares = []
        for attn, x in layers_of(models[row["name"]], idx):
            if isinstance(attn, TRA):
                settings = attn.forget(x), attn.config.sparse, attn.config.contextual
                shares.append(skipped_share(tra_blocked(*attn.heads(x), *settings, return_reach=True)[1]).mean().item())
        if shares:
            row["skipped"] = statistics.fmean(shares)
    return rows


def training_step(model, optimizer, x, y):
    with autocast(x.device):
        loss = model(x, y)[1]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def bench_step(attns, window, batch, dropout, device):
    """A training step of the paper's mini model on random tokens. The learning rate is 0, so that nothing changes."""
    x, y = torch.randint(256, (2, batch, window), device=device)
    models = {attn: GPT(GPTConfig(attn=attn, vocab_size=256, dropout=dropout)).to(device) for attn in attns}
    steps = {}
    for attn, model in models.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        steps[attn] = partial(training_step, model, optimizer, x, y)
    return add_skipped(side_by_side("training step", window, batch, steps, device), models, x)


def attend(attention, inputs, out_gradient):
    with autocast(out_gradient.device):
        out = attention(*inputs)
    if out.requires_grad:
        torch.autograd.grad(out, inputs, out_gradient)


def bench_attention(window, batch, backward, device):
    """Attention alone, 8 heads of width 64, gates at -0.5. "tra" is tra_attention: without CUDA that is tra_blocked."""
    q, k, v = torch.randn(3, batch, 8, window, 64, device=device)
    q, k = F.rms_norm(q, (64,)), F.rms_norm(k, (64,))
    f = torch.full((batch, 8, window), -0.5, device=device)
    skipped = skipped_share(tra_blocked(q, k, v, f, return_reach=True)[1]).mean().item()
    qkv = [tensor.to(precision(device)).requires_grad_(backward) for tensor in (q, k, v)]
    with_gates, with_open_gates = ([*qkv, gate.requires_grad_(backward)] for gate in (f, torch.zeros_like(f)))
    plain, is_cuda = full_precision(tra_plain), f.is_cuda
    contestants = {"sdpa": (partial(F.scaled_dot_product_attention, is_causal=True), qkv),
                   "tra": (tra_attention, with_gates)}
    if window <= 4096 or is_cuda:
        contestants["tra, gates at 0"] = tra_attention, with_open_gates
    if window <= 4096:
        contestants["tra_plain"] = plain, with_gates
    if is_cuda:
        if window <= 4096:
            contestants["tra_plain, compiled"] = torch.compile(plain, dynamic=False), with_gates
        long_form = tra_for_long_sequences(f.device)
        contestants[long_form.__name__] = long_form, with_gates             # tra_fused, where it works
        contestants["tra_blocked"] = full_precision(tra_blocked), with_gates
    what = "attention, forward and backward" if backward else "attention, forward"
    out_gradient = torch.randn_like(qkv[2])
    runs = {name: partial(attend, *how, out_gradient) for name, how in contestants.items()}
    rows = side_by_side(what, window, batch, runs, device)
    for row in rows:
        if row["name"] in ("tra", "tra_blocked", "tra_fused"):
            row["skipped"] = skipped
    return rows


@torch.no_grad()
def generate_without_cache(model, idx, count):
    for _ in range(count):
        idx = torch.cat((idx, model(idx)[0][:, -1:].argmax(-1)), dim=1)


def bench_generation(attn, count, device):
    """Greedy generation from one token, with the cache and without."""
    model = GPT(GPTConfig(attn=attn, vocab_size=256)).to(device).eval()
    start = torch.zeros(1, 1, dtype=torch.int64, device=device)
    contestants = {f"{attn}, cache": partial(model.generate, start, count, temperature=0),
                   f"{attn}, no cache": partial(generate_without_cache, model, start, count)}
    with autocast(device):
        return side_by_side("generation", count, 1, contestants, device, rounds=3)


def bench_runs(runs, windows, device, data):
    """The perplexity pass of trained runs over twice the longest window of their test text."""
    models, records = [], []
    for run in runs:
        model, task = load(run, device, data)
        if task.metric != "perplexity":
            raise ValueError(f"{run} was trained on {task.name}; bench measures runs of a text")
        models.append(model)
        records.append(make_record(load_checkpoint(run)["args"], task, {}))
    if len({record["sizes"]["text"] for record in records}) > 1:
        raise ValueError("these runs were trained on different texts")
    names = [f"{name}, seed {record['seed']}" for name, record in zip(name_rows(records), records)]
    # RoPE first: the others are compared with it.
    models = dict(sorted(zip(names, models), key=lambda item: item[1].config.attn != "rope"))
    count = 2 * max(windows) + 1
    for window in windows:
        perplexity = {}

        def score(name):
            with autocast(device):
                perplexity[name] = measure(models[name], task, str(window), count)["perplexity"]

        passes = {name: partial(score, name) for name in models}
        batch = max(1, min(8192, count - 1) // window)
        rows = side_by_side("perplexity pass", window, batch, passes, device, tokens=count - 1, rounds=5)
        for row in rows:
            row["perplexity"] = perplexity.get(row["name"])
        idx = torch.from_numpy(next(iter(task.test(str(window), window + 1)))[0]).to(device)
        yield from add_skipped(rows, models, idx)


def measurements(args, device):
    """Yield every row that the flags ask for."""
    is_cuda = torch.device(device).type == "cuda"
    if args.runs:
        yield from bench_runs(find_runs(args.runs), args.windows or [4096, 16384], device, args.data)
        return
    attns = sorted(args.attn or ATTENTIONS, key=lambda attn: attn != "rope")
    tokens = 32_768 if is_cuda else 4096                # in a training step
    for window in args.windows or ([256, 1024, 4096, 16384, 65536] if is_cuda else [256, 1024]):
        if window <= 4096 or is_cuda:
            yield from bench_step(attns, window, args.batch or max(1, tokens // window), args.dropout, device)
    for backward in (False, True):
        for window in args.windows or ([1024, 4096, 16384, 65536] if is_cuda else [1024, 4096, 16384]):
            yield from bench_attention(window, args.batch or 1, backward, device)
    for attn in attns:
        yield from bench_generation(attn, args.tokens, device)


# -----------------------------------------------------------------------------


def table(rows):
    """A Markdown table. Columns that no row has are left out."""
    columns = {"time, ms": ("seconds", 1000, ",.1f"), "ratio": ("ratio", 1, ".2f"),
               "tokens/s": ("tokens_per_second", 1, ",.0f"), "peak memory, MB": ("peak_bytes", 2**-20, ",.0f"),
               "key blocks skipped, %": ("skipped", 100, ".0f"), "perplexity": ("perplexity", 1, ".2f")}
    columns = {head: how for head, how in columns.items() if any(row.get(how[0]) is not None for row in rows)}
    cells = [["", "window", "batch", *columns]]
    for row in rows:
        values = [(row.get(key), factor, form) for key, factor, form in columns.values()]
        shown = ["" if value is None else format(factor * value, form) for value, factor, form in values]
        if row["failure"]:
            shown[0] = row["failure"]
        cells.append([row["name"], f"{row['window']:,}", str(row["batch"]), *shown])
    return "\n".join([f"{rows[0]['what']}:", "", *markdown(cells), ""])


def main(argv=None):
    def numbers(text):
        return sorted(map(int, text.split(",")))

    parser = argparse.ArgumentParser(prog="python -m extras.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="runs of a text: measure their perplexity pass instead")
    add("--attn", nargs="+", choices=ATTENTIONS, metavar="A", help="these attentions (default: all)")
    add("--windows", type=numbers, metavar="N,N", help="these windows; without CUDA training is measured up to "
        "4,096")
    add("--batch", type=int, metavar="N", help="sequences (default 1; training 4,096 tokens, or 32,768 on CUDA)")
    add("--dropout", type=float, default=GPTConfig.dropout, metavar="P", help="in the training step (default "
        "%(default)s); with 0, torch's fused kernels serve the other attentions on a CPU, too")
    add("--tokens", type=int, default=512, metavar="N", help="to generate (default 512)")
    add("--json", metavar="FILE", help="also write every number to this file")
    add("--data", metavar="DIR", help="the prepared text of the runs, if it has moved")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps (default: the best there is)")
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    about = dict(device=device, torch=torch.__version__, threads=torch.get_num_threads(),
                 dtype=str(precision(device)).removeprefix("torch."))
    if torch.device(device).type == "cuda":
        about["device"] = torch.cuda.get_device_name(device)
        torch.cuda.set_device(torch.device(device).index or 0)
        torch.set_float32_matmul_precision("high")      # TF32, as in train.py
    print(f"{about['device']}, torch {about['torch']}, {about['threads']} CPU threads, {about['dtype']}\n", flush=True)
    rows = []
    for _, new in itertools.groupby(measurements(args, device), key=lambda row: (row["what"], row["window"])):
        new = list(new)
        rows += new
        print(table(new), flush=True)
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump({"about": about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {str(error).splitlines()[0]}")
