"""
Every run behind the tables, one by one: train what is missing, resume what was interrupted, keep the records.

    python -m extras.campaign                   # what is done and what is missing
    python -m extras.campaign --train           # one run after another; Ctrl-C stops, the same command goes on
    python -m extras.campaign --train --jobs 2 --only copy      # two runs at a time, of titles that contain "copy"
    python -m extras.campaign --summary         # the table of the README

Each run has one thread, unless its title says two, so that its result does not depend on the number of cores. A
finished run adds a line to results/runs.jsonl: its eval.json, with the title in the place of the task, its flags and
the version of the code. eval.py and extras.plot read that file.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time

from eval import METRICS, group, markdown, read_records
from model import ATTENTIONS

RECORDS = "results/runs.jsonl"
SUMMARY = {"flipflop": ["iid", "sparse-4x", "dense-4x"], "copy": ["1x", "2x", "4x"], "induct": ["1x", "2x", "4x"],
           "wikitext-2": ["128", "4096"]}
SIX = ["tra", "rope", "cope", "fox", "alibi", "nope"]
PARTS = ["--no-sparse", "--no-contextual", "--no-sparse --no-contextual"]
TEXT = "--data data/wikitext-2-byte"
FOUR, TWO = SIX[:4], SIX[4:]
DECAYS = ["", " --weight-decay 0.01"]
# (title, flags of train.py, seeds), in the order to train them. A title is a table. No preset was chosen on these
# seeds. Runs at another decay or learning rate look for one that suits an attention better than the preset's.
EXPERIMENTS = [
    ("copy", ["--attn tra --task copy"], range(712, 724)),
    ("copy, two threads", ["--attn tra --task copy"], range(712, 716)),
    ("flipflop", [f"--attn {attn} --task flipflop" for attn in SIX], range(500, 504)),
    ("induct", [f"--attn {attn} --task induct" for attn in FOUR], range(500, 504)),
    ("instruct", [f"--attn tra --task instruct{decay}" for decay in ("", " --weight-decay 0.2")], range(500, 504)),
    ("wikitext-2", [f"--attn {attn} {TEXT}" for attn in FOUR], range(500, 502)),
    ("copy", [f"--attn {attn} --task copy{decay}" for attn in FOUR for decay in DECAYS], range(712, 716)),
    ("instruct", [f"--attn {attn} --task instruct" for attn in FOUR], [500]),
    ("induct", [f"--attn {attn} --task induct --weight-decay 0.2" for attn in FOUR], range(500, 504)),
    ("wikitext-2", [f"--attn {attn} {TEXT}" for attn in FOUR], range(502, 504)),
    ("copy", [f"--attn {attn} --task copy{decay}" for attn in TWO for decay in DECAYS], range(712, 716)),
    ("induct", [f"--attn {attn} --task induct" for attn in TWO], range(500, 504)),
    ("copy, parts of TRA", [f"--attn tra --task copy {part}" for part in PARTS], range(712, 716)),
    ("flipflop, parts of TRA", [f"--attn tra --task flipflop {part}" for part in PARTS], range(500, 504)),
    ("wikitext-2", [f"--attn tra {TEXT} --weight-decay 0.2"], range(500, 504)),
    ("instruct", [f"--attn {attn} --task instruct" for attn in SIX], range(500, 504)),
    ("wikitext-2", [f"--attn {attn} {TEXT}" for attn in TWO], range(500, 504)),
    ("induct", [f"--attn {attn} --task induct --weight-decay 0.2" for attn in SIX], range(500, 504)),
    ("wikitext-2", [f"--attn {attn} {TEXT} --weight-decay 0.2" for attn in SIX], range(500, 504)),
    ("instruct", [f"--attn {attn} --task instruct --weight-decay 0.2" for attn in SIX], range(500, 504)),
    ("flipflop", [f"--attn {attn} --task flipflop --lr 0.001" for attn in SIX[1:]], [500]),
    ("copy", [f"--attn {attn} --task copy --lr 0.001" for attn in SIX[1:]], [712]),
    ("induct", [f"--attn {attn} --task induct --lr 0.001" for attn in SIX[1:]], [500]),
    ("flipflop, the paper's sizes", [f"--attn {attn} --task flipflop --scale middle" for attn in FOUR],
     range(500, 504)),
    ("copy, the paper's sizes", [f"--attn {attn} --task copy --scale middle" for attn in FOUR], [712]),
    ("wikitext-2, longer", [f"--attn {attn} {TEXT} --scale middle" for attn in ("tra", "rope", "fox")], [500]),
    ("wikitext-2, GPT-2 tokens", [f"--attn {attn} --data data/wikitext-2-gpt2 --batch 8 --steps 2000"
                                  for attn in ("tra", "rope")], [500]),
]


def kept_records():
    return read_records(RECORDS) if os.path.exists(RECORDS) else []


def missing_runs(only):
    """(title, flags) of every run that has no record."""
    done = [(record["task"], record["flags"]) for record in kept_records()]
    runs = [(title, f"{flags} --seed {seed}") for title, many, seeds in EXPERIMENTS for seed in seeds for flags in many]
    return [run for run in dict.fromkeys(runs) if run not in done and only in run[0]]


def folder_of(title, flags):
    return "out/campaign/" + re.sub("[^a-z0-9.]+", "-", f"{title} {flags}".lower())


def start(title, flags):
    """Train in a process of its own; go on if there is a run already."""
    out = folder_of(title, flags)
    resume = ["--resume"] if os.path.exists(f"{out}/ckpt.pt") else []
    # Two threads that wait for each other actively would take the cores from the other runs.
    env = os.environ | {"OMP_NUM_THREADS": "2" if "two threads" in title else "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "train.py", *flags.split(), "--out", out, *resume]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)


def ask_git(*words):
    return subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()


def keep(title, flags):
    """Append the record of a finished run."""
    [record] = read_records(folder_of(title, flags))
    version = ask_git("rev-parse", "--short", "HEAD") + ("-dirty" if ask_git("status", "--porcelain", "*.py") else "")
    with open(RECORDS, "a", encoding="utf-8") as file:
        file.write(json.dumps(record | {"task": title, "flags": flags, "code": version}) + "\n")
    print(f"{title}: {flags}:", " ".join(f"{value:.3f}" for value in record["results"].values()), flush=True)


def at_best(records):
    """What group() returns, but of each attention only its best setting, by the mean over test sets and seeds."""
    for about, rows in group(records):
        _, _, best_of = METRICS[about["metric"]]
        settings = {}           # attention: {mean: records}
        for found in rows.values():
            mean = statistics.fmean(value for record in found for value in record["results"].values())
            settings.setdefault(found[0]["attn"], {}).setdefault(mean, found)
        yield about, {attn: by_mean[best_of(by_mean)] for attn, by_mean in settings.items()}


def summary(records):
    """One Markdown table: a row per task and test set, a column per attention, each at the best of its settings."""
    cells = [["task", "test set", *ATTENTIONS, "seeds"]]
    tables = {about["task"]: (METRICS[about["metric"]], rows) for about, rows in at_best(records)}
    for task in [task for task in SUMMARY if task in tables]:
        (_, form, _), rows = tables[task]
        fewest, most = (of(map(len, rows.values())) for of in (min, max))
        seeds = str(most) if fewest == most else f"{fewest} to {most}"
        for split in SUMMARY[task]:
            means = {attn: form(statistics.fmean(r["results"][split] for r in found)) for attn, found in rows.items()}
            cells.append([task, split, *(means.get(attn, "") for attn in ATTENTIONS), seeds])
    return "\n".join(markdown(cells))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train what is missing")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--summary", action="store_true", help="print the table of the README instead")
    parser.add_argument("--only", default="", metavar="TEXT", help="titles that contain this text")
    args = parser.parse_args(argv)
    if args.summary:
        return print(summary(kept_records()))
    missing = missing_runs(args.only)
    print(f"{len(kept_records())} runs are kept in {RECORDS}, {len(missing)} are missing", flush=True)
    if not args.train:
        return print("\n".join(f"{title}: {flags}" for title, flags in missing))
    running = {}                # process: (title, flags)
    while missing or running:
        for process in [process for process in running if process.poll() is not None]:
            title, flags = running.pop(process)
            if process.returncode == 0 and os.path.exists(f"{folder_of(title, flags)}/eval.json"):
                keep(title, flags)
            else:
                print(f"{flags} ended early; the same command goes on with it", file=sys.stderr)
        if missing and len(running) < args.jobs:
            run = missing.pop(0)
            running[start(*run)] = run
        else:
            time.sleep(1)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
