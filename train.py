"""
Train one attention on one task, then test it on sequences longer than any it was trained on.

    python train.py --attn tra --task copy                      # minutes on a laptop, then a table
    python train.py --attn tra --task copy --no-contextual      # TRA without its contextual distance
    python train.py --attn tra --data data/wikitext-2-byte      # a text that data.py prepared
    python train.py --attn tra --task copy --scale paper        # the paper's setting, for a GPU
    python train.py --attn tra --task copy --resume             # after Ctrl-C or a crash: ends as if never stopped
    python train.py --task copy --help                          # every flag, with the value of copy's preset

A run is a folder, out/{task}-{attn}-s{seed}/; every setting that a flag has changed is added to its name. It holds
ckpt.pt (a dict: config, model, step, args, and what resuming needs), log.jsonl (a JSON object a line, up to the step of
the checkpoint) and eval.json. What loads, measures and prints tables is in eval.py.
"""

import argparse
import json
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict, fields

import torch

from data import Text
from eval import NOT_SETTINGS, load_checkpoint, make_record, measure, open_task, pick_device, table
from model import ATTENTIONS, GPT, GPTConfig
from tasks import TASKS

# -----------------------------------------------------------------------------
# One preset per scale and task. Every entry is a flag: --lr 1e-3 replaces it. At laptop scale a task has the sizes that
# are its fields' defaults. "middle" is the paper's model and lengths in fewer steps, for a CPU; on text, more steps.

MINI = dict(n_layer=4, n_head=4, n_embd=256, length=50)         # the paper's model for synthetic tasks
PAPER = dict(MINI, symbols=64, batch=128, lr=1e-4, steps=100_000)
BYTES = dict(data="data/wikitext-2-byte", n_layer=4, n_embd=128, examples=131_072)
PRESETS = {
    "laptop": {
        "flipflop": dict(n_layer=2, n_embd=64, embd_std=1.0, beta2=0.98, steps=800),
        "copy": dict(n_layer=2, n_embd=128, beta2=0.9, weight_decay=0.2, steps=9000, examples=2000),
        "induct": dict(n_layer=3, n_embd=128, forget_bias=3.0, beta2=0.98, steps=4000),
        "instruct": dict(n_layer=3, n_head=8, n_embd=128, forget_bias=2.0, dropout=0.0, beta2=0.98, steps=9000),
        "wikitext": dict(BYTES, steps=800, eval_every=100),
    },
    "middle": {
        "flipflop": dict(MINI, length=256, batch=16, lr=1e-3, beta2=0.98, embd_std=1.0, steps=200, examples=1000),
        "copy": dict(MINI, symbols=64, lr=1e-3, beta2=0.95, weight_decay=0.2, steps=9000, examples=1000),
        "wikitext": dict(BYTES, steps=6000, eval_every=500),
    },
    "paper": {
        "flipflop": dict(MINI, length=256, batch=64, lr=1e-4, steps=25_000),
        "copy": PAPER,
        "induct": dict(PAPER, pairs=8),
        "instruct": PAPER,
        "wikitext": dict(data="data/wikitext-103-gpt2", n_layer=8, n_head=8, n_embd=512, batch=64, lr=1e-4,
                         steps=100_000, eval_every=1000, examples=10**9),
    },
}
# A resumed run may change these. Everything else stays as it was started.
CHANGEABLE = ("steps", "examples", "device", "dtype", "compile", "data", "log_every", "eval_every", "save_every")

# -----------------------------------------------------------------------------
# Training


def learning_rate(step, args):
    """Linear warm-up over the first steps, then half a cosine down to zero; step counts from 0."""
    warm = max(1, round(args["warmup"] * args["steps"]))
    if step < warm:
        return args["lr"] * (step + 1) / warm
    return args["lr"] * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, args["steps"] - warm)))


def make_optimizer(model, args):
    """AdamW. Put another one here if you like: train() sets lr in every group, and resumes a run with the same one."""
    # Matrices decay. Vectors and forget gates do not: decay pulls f to log(1/2), and closes gates that should be open.
    decayed, others = [], []
    for name, p in model.named_parameters():
        (decayed if p.dim() > 1 and "forget" not in name else others).append(p)
    groups = [dict(params=decayed, weight_decay=args["weight_decay"]), dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, betas=(0.9, args["beta2"]), fused=True)


def show(text, end=""):
    """On a terminal one line that is written over, anywhere else a line each."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print("\r" + text[:width].ljust(width), end=end, flush=True)
    else:
        print(text, flush=True)


stop_requests = []


def ask_to_stop(signum, frame):
    """Ctrl-C and SIGTERM are heard between two steps; a second one ends the run at once."""
    stop_requests.append(signum)
    signal.signal(signum, signal.SIG_DFL)


def train(args):
    """Train from scratch or go on, then test. Returns what it writes to eval.json, or None if it was stopped."""
    args = dict(args)
    out, resume, overwrite = (args.pop(name) for name in ("out", "resume", "overwrite"))
    ckpt_path, log_path, eval_path = (os.path.join(out, name) for name in ("ckpt.pt", "log.jsonl", "eval.json"))
    if os.path.exists(ckpt_path) and not (resume or overwrite):
        raise FileExistsError(f"{out} already holds a run: --resume goes on with it, --overwrite starts anew")
    device = pick_device(args["device"])
    device_type = torch.device(device).type
    if args["dtype"] == "auto":
        is_native = device_type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        args["dtype"] = "bfloat16" if is_native else "float32"

    # Task, model, optimizer
    task = open_task(args)
    settings = {field.name: args[field.name] for field in fields(GPTConfig) if field.name in args}
    config = GPTConfig(vocab_size=task.vocab_size, **settings)
    torch.manual_seed(args["seed"])
    model = GPT(config).to(device)
    optimizer = make_optimizer(model, args)

    # Where to start. Dropout draws from torch's generators; the data depends on seed and step alone. rows is the log so
    # far, history the loss and the gradient norm of each step since its last row.
    torch.manual_seed(args["seed"])
    generators = [torch] if device_type == "cpu" else [torch, torch.get_device_module(device_type)]
    first, rows, seconds, history = 0, [], 0.0, []
    if resume:
        ckpt = load_checkpoint(out)
        if ckpt["step"] > args["steps"]:
            raise ValueError(f"{out} is at step {ckpt['step']} already: give it more --steps")
        for name, value in ckpt["args"].items():
            if args.get(name) != value and name not in CHANGEABLE:
                raise ValueError(f"{out} was started with {name} {value}; it cannot go on with {args.get(name)}")
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        for generator, state in zip(generators, ckpt["random"]):
            generator.set_rng_state(state)
        first, rows, seconds, history = ckpt["step"], ckpt["log"], ckpt["seconds"], list(ckpt["history"].to(device))

    # Compile the loss alone. If logits were returned, too, the backward pass would allocate a gradient for them.
    def compute_loss(x, y):
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=args["dtype"] == "bfloat16"):
            return model(x, y)[1]

    if args["compile"]:
        compute_loss = torch.compile(compute_loss)

    def save(step):
        """A checkpoint that is whole or not there: a temporary file, the disk, its place. Then the log."""
        with open(ckpt_path + ".tmp", "wb") as file:
            torch.save({"config": asdict(config), "model": model.state_dict(), "step": step, "args": args,
                        "optimizer": optimizer.state_dict(), "random": [g.get_rng_state() for g in generators],
                        "log": rows, "history": torch.stack(history).cpu() if history else torch.empty(0, 2),
                        "seconds": seconds + time.time() - start}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(ckpt_path + ".tmp", ckpt_path)
        with open(log_path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    print(f"{task.name} with {args['attn']}, {args['scale']} scale, seed {args['seed']}: "
          f"{sum(p.numel() for p in model.parameters()):,} parameters, steps {first:,} to {args['steps']:,}, "
          f"{args['batch']} sequences a step, on {device} in {args['dtype']} -> {out}", flush=True)
    os.makedirs(out, exist_ok=True)
    start = saved = time.time()
    save(first)
    if os.path.exists(eval_path):
        os.remove(eval_path)

    done, tokens = first, 0
    for step in range(first, args["steps"]):
        lr = learning_rate(step, args)
        for group in optimizer.param_groups:
            group["lr"] = lr

        x, y = (torch.from_numpy(array) for array in task.batch("train", args["seed"], step, args["batch"]))
        if device_type == "cuda":       # from pinned memory the copy does not wait for the last step to end
            x, y = (tensor.contiguous().pin_memory().to(device, non_blocking=True) for tensor in (x, y))
        x, y = x.to(device), y.to(device)

        # One update: the mean loss over all scored tokens of a batch, in parts
        scored, loss = (y >= 0).sum(), 0.0
        for x_part, y_part in zip(x.chunk(args["accumulate"]), y.chunk(args["accumulate"])):
            part = compute_loss(x_part, y_part) * ((y_part >= 0).sum() / scored)
            part.backward()
            loss = loss + part.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args["grad_clip"] or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        history.append(torch.stack((loss, norm)))
        done, tokens = step + 1, tokens + x.numel()

        # Once in a while: log, validate, save. Only here we wait for the device.
        now, is_stopping = time.time(), bool(stop_requests)
        is_time_to_log = done % args["log_every"] == 0 or done == args["steps"]
        is_time_to_save = now - saved > args["save_every"] or done == args["steps"] or is_stopping
        if is_time_to_log or is_time_to_save:
            mean_loss, mean_norm = torch.stack(history).mean(0).tolist()
            if not math.isfinite(mean_loss + mean_norm):
                raise ValueError(f"loss {mean_loss}, gradient norm {mean_norm} near step {done}: stopped; the last "
                                 f"checkpoint in {out} is from before. Try a lower --lr")
        if is_time_to_log:
            history.clear()
            speed, left = tokens / (now - start), (now - start) / (done - first) * (args["steps"] - done)
            rows.append(dict(step=done, loss=mean_loss, lr=lr, grad_norm=mean_norm, tokens_per_second=round(speed)))
            show(f"step {done}/{args['steps']} ({done / args['steps']:.0%})  loss {mean_loss:.4f}  "
                 f"{speed:,.0f} tokens/s  {int(left) // 60}:{int(left) % 60:02d} left")
        if args["eval_every"] and done % args["eval_every"] == 0:
            found = measure(model, task, *task.validation)
            model.train()
            rows.append(dict(step=done, val_loss=found["loss"], val_right_tokens=found["right tokens"]))
            show(f"step {done}: validation loss {found['loss']:.4f}, {task.metric} {found[task.metric]:.3f}", end="\n")
        if is_time_to_save:
            save(done)
            saved = time.time()
        if is_stopping:
            break

    # The test: every test set of the task, most of them longer than anything in training
    measured = {}
    for split in list(task.splits)[1:]:
        if stop_requests:
            show(f"stopped after step {done} of {out}: the same command with --resume goes on", end="\n")
            return None
        measured[split] = measure(model, task, split, args["examples"])
        show(f"test set {split}: {task.metric} {measured[split][task.metric]:.3f}")
    record = make_record(args, task, measured) | {"torch": torch.__version__, "threads": torch.get_num_threads(),
                                                  "seconds": round(seconds + time.time() - start)}
    with open(eval_path, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
    show(f"trained and tested in {record['seconds']} seconds", end="\n")
    print("\n" + table([record]) + "\n" + table([record], "right_tokens"), end="")
    return record


# -----------------------------------------------------------------------------
# Flags


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def add_fields(group, cls):
    """A flag for each field of a dataclass, except those that have one already or follow from the task."""
    for field in fields(cls):
        how = dict(action=argparse.BooleanOptionalAction) if field.type is bool else dict(type=field.type)
        if field.name not in ("attn", "data", "vocab_size"):
            flag, text = "--" + field.name.replace("_", "-"), field.metadata.get("help", field.name)
            group.add_argument(flag, default=field.default, help=text, **how)


def parse_flags(argv=None):
    """All settings of a run as a dict. A preset replaces defaults, a flag replaces both."""
    parser = argparse.ArgumentParser(
        prog="train.py", usage="python train.py --attn ATTN --task TASK [flags]", description=__doc__,
        formatter_class=HelpFormatter, allow_abbrev=False, add_help=False)
    add = parser.add_argument_group("experiment").add_argument
    add("--attn", choices=ATTENTIONS, default=argparse.SUPPRESS, help="the attention to train, see model.py")
    add("--task", choices=[*TASKS, "wikitext"], default=argparse.SUPPRESS, help="what to train it on, see tasks.py")
    add("--data", default=argparse.SUPPRESS, help="a text that data.py prepared; no --task is needed then")
    add("--scale", choices=PRESETS, default="laptop", help="which preset: laptop takes minutes, middle an hour or two "
        "with the paper's sizes (for text: more steps), paper is for a GPU")
    add("--seed", type=int, default=0, help="of the weights, the data and the dropout")
    add("--examples", type=int, default=500, help="examples in each test set; for a text, tokens of it")
    add("--out", default=argparse.SUPPRESS, help="folder of the run, if not out/{task}-{attn}-s{seed} and the like")
    add("--resume", action="store_true", help="go on with the run in that folder; with other --steps, name it by --out")
    add("--overwrite", action="store_true", help="start anew, even if that folder holds a run")
    add_fields(parser.add_argument_group("model"), GPTConfig)
    add = parser.add_argument_group("optimisation: AdamW, linear warm-up, then cosine decay to zero").add_argument
    add("--steps", type=int, default=10_000, help="updates")
    add("--batch", type=int, default=32, help="sequences per update")
    add("--accumulate", type=int, default=1, help="run each batch in this many parts, to save memory")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--warmup", type=float, default=0.05, help="share of the steps in which the learning rate rises")
    add("--weight-decay", type=float, default=0.01, help="decay of all matrices but the forget gates'")
    add("--beta2", type=float, default=0.999, help="decay of the squared gradients")
    add("--grad-clip", type=float, default=1.0, help="largest norm of the gradient; 0: no limit")
    add = parser.add_argument_group("machine").add_argument
    add("--device", default="auto", help="cpu, cuda, cuda:1 or mps; auto: the best there is")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
        help="auto: bfloat16 autocast on GPUs that have it in hardware (Ampere and newer), else float32")
    add("--compile", action=argparse.BooleanOptionalAction, default=False, help="torch.compile the training step")
    add("--log-every", type=int, default=50, help="steps between lines of the log")
    add("--eval-every", type=int, default=0, help="steps between validations; 0: none")
    add("--save-every", type=float, default=60.0, help="seconds between checkpoints")

    # Now that the task is known: its sizes, its preset, and help with the values of both
    chosen = vars(parser.parse_known_args(argv)[0])
    task = chosen.get("task", "wikitext" if "data" in chosen else None)
    if task in TASKS and "data" in chosen:
        parser.error(f"--data is a text; {task} makes its own sequences. Leave out one of the two")
    if task:
        add_fields(parser.add_argument_group(f"size of {task}"), TASKS.get(task, Text))
        presets = PRESETS[chosen["scale"]]
        parser.set_defaults(task=task, **presets.get(task, presets["copy"]))
    parser.add_argument("-h", "--help", action="help", help="show this, with the values of the preset of --task")
    args = vars(parser.parse_args(argv))
    if not ("attn" in args and "task" in args):
        parser.error("--attn and --task are needed, for example: python train.py --attn tra --task copy")
    if min(args[name] for name in ("steps", "batch", "accumulate", "examples", "log_every")) < 1:
        parser.error("--steps, --batch, --accumulate, --examples and --log-every must be at least 1")

    # out/{task}-{attn}-s{seed}, with each setting in between that a flag has changed
    parts = [task if task in TASKS else os.path.basename(os.path.normpath(args["data"])), args["attn"]]
    parts += [args["scale"]] if args["scale"] != "laptop" else []
    for name, value in args.items():
        if value != parser.get_default(name) and name not in NOT_SETTINGS:
            text = f"no-{name}" if value is False else f"{name}{value}"
            parts.append(text.replace("_", "-"))
    return {"out": os.path.join("out", "-".join([*parts, f"s{args['seed']}"]))} | args


if __name__ == "__main__":
    try:
        args = parse_flags()
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, ask_to_stop)
        train(args)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
