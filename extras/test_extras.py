"""Tests of plot.py, bench.py and campaign.py, on a CPU in half a minute:  python -m pytest extras/test_extras.py"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import data
import eval as evaluation
import train
from extras import bench, campaign, plot
from model import ATTENTIONS, GPT, GPTConfig, TRA


def train_small(flags, out):
    small = "--n-layer 1 --n-head 2 --n-embd 8 --batch 4 --steps 4 --log-every 1 --examples 200 --device cpu --out"
    train.train(train.parse_flags([*flags.split(), *small.split(), str(out)]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs of copy: two seeds of tra, one of tra without its threshold, and one of rope."""
    folder = tmp_path_factory.mktemp("out")
    for name, flags in {"a": "--attn tra", "b": "--attn tra --seed 1", "c": "--attn tra --no-sparse",
                        "d": "--attn rope --eval-every 2"}.items():
        train_small(f"{flags} --task copy --length 3 --symbols 4", folder / name)
    return folder


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "book.txt").write_text("".join(f"line {i} costs ${i}$\n" for i in range(400)))
    data.prepare(str(folder / "book.txt"), "byte", str(folder / "book"))
    train_small(f"--attn tra --data {folder / 'book'} --window 16", folder / "run")
    return str(folder / "run")


def draw(tmp_path, *argv):
    """The figure, once the picture is there."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    figure = plot.main([*map(str, argv), "--device", "cpu", "--out", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    return figure


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


# -----------------------------------------------------------------------------
# Pictures


def test_runs_that_differ_have_names_and_colours_of_their_own(runs, tmp_path):
    figure = draw(tmp_path, "results", runs)
    assert legend(figure) == ["TRA", "TRA no-sparse", "RoPE"]
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert len({lines[name].get_color() for name in legend(figure)}) == 3
    assert lines["TRA"].get_xdata().tolist() == [3, 4, 6, 9, 12, 18]


def test_results_draw_means_of_chosen_attentions_and_tasks(tmp_path):
    path = tmp_path / "runs.jsonl"
    tests = [("flipflop", "exact match", {"length": 8}, {"iid": 1.0, "dense": 0.2, "iid-4x": 0.5}),
             ("book", "perplexity", {"window": 8}, {"8": 4.0, "16": 300.0}),
             ("book", "perplexity", {"window": 8}, {"8": 2.0})]
    with open(path, "w") as file:
        for attn, seed in (("fox", 0), ("rope", 0), ("tra", 0), ("tra", 1)):
            for task, metric, sizes, results in tests:
                results = {split: value / (1 + seed) for split, value in results.items()}
                record = dict(task=task, attn=attn, seed=seed, scale="laptop", metric=metric, examples=9,
                              settings=sizes, results=results)
                file.write(json.dumps(record) + "\n")
    figure = draw(tmp_path, "results", path, "--attn", "tra,rope", "--task", "book,flipflop")
    assert legend(figure) == ["TRA", "RoPE"]
    # A panel for each kind of test set. Runs of different sizes never share one.
    assert [(ax.get_title(), ax.lines[0].get_xydata().tolist()) for ax in figure.axes] == [
        ("book, laptop scale", [[8, 3], [16, 225]]), ("book, laptop scale", [[8, 1.5]]),
        ("flipflop iid, laptop scale", [[8, 75], [32, 37.5]]), ("flipflop dense, laptop scale", [[8, 15]])]
    shaded = figure.axes[0].collections[0].get_paths()[0].get_extents()
    assert (shaded.ymin, shaded.ymax) == (2, 300)       # from the lowest seed to the highest
    # The logarithmic axis is labelled over its whole range, with plain numbers.
    assert {"5", "10", "100", "200"} <= {text.get_text() for text in figure.axes[0].get_yticklabels()}
    with open(path, "a") as file:                       # a better setting of TRA on the first text
        file.write(json.dumps(dict(record, task="book", metric="perplexity", settings={"window": 8, "lr": 0.1},
                                   results={"8": 1.0, "16": 1.0})) + "\n")
    assert len(legend(draw(tmp_path, "results", path, "--task", "book", "--attn", "tra"))) > 1
    figure = draw(tmp_path, "results", path, "--task", "book", "--attn", "tra", "--best")
    assert legend(figure) == ["TRA"] and figure.axes[0].lines[0].get_xydata().tolist() == [[8, 1], [16, 1]]
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(tmp_path, "results", path, "--task", "copy")


def test_losses_draw_the_log(runs, tmp_path):
    figure = draw(tmp_path, "losses", runs)
    log = [json.loads(line) for line in (runs / "d" / "log.jsonl").read_text().splitlines()]
    by_name = {name: [line for line in figure.axes[0].lines if line.get_label() == name] for name in legend(figure)}
    assert {name: len(lines) for name, lines in by_name.items()} == {"TRA": 4, "TRA no-sparse": 2, "RoPE": 2}
    lines = by_name["RoPE"]
    for line, key, linestyle in zip(lines, ("loss", "val_loss"), ("-", "--"), strict=True):
        assert line.get_linestyle() == linestyle
        assert line.get_xydata().tolist() == [[row["step"], row[key]] for row in log if key in row]


def test_position_draws_the_mean_loss_by_position(text_run, tmp_path):
    figure = draw(tmp_path, "position", text_run, "--split", "32")
    model, task = evaluation.load(text_run, "cpu")
    losses = [loss for *_, batch in evaluation.predictions(model, task, "32", 200) for loss in batch]
    by_position = [[loss[i].item() for loss in losses if len(loss) > i] for i in range(32)]
    expected = [np.mean(sum(by_position[a:b], [])) for a, b in ((0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32))]
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), expected, rtol=1e-5)


class MyTRA(TRA):
    pass


@pytest.mark.parametrize("attn", [*ATTENTIONS, "mine"])
def test_attention_weights_are_those_the_model_uses(attn, monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "mine", MyTRA)
    torch.manual_seed(0)
    model = GPT(GPTConfig(attn=attn, vocab_size=9, n_layer=2, n_head=2, n_embd=16)).eval()
    idx = torch.randint(9, (1, 12))
    for (layer, x), (weights, n) in zip(plot.layers_of(model, idx), plot.attention_weights(model, idx), strict=True):
        _, _, v = layer.heads(x)
        torch.testing.assert_close(layer.proj((weights @ v)[0].transpose(0, 1).flatten(1)), layer(x)[0])
        assert (n is not None) == (attn in ("tra", "mine"))
        if n is not None:
            for h, i, j in weights.nonzero().tolist():
                assert n[h, i, j] == (weights[h, i, j:i + 1] > 0).sum()


def test_attention_is_gray_exactly_where_a_weight_is_zero(text_run, tmp_path):
    example = "line 1 cost $1$\n"
    figure = draw(tmp_path, "attention", text_run, "--example", example)
    model, task = evaluation.load(text_run, "cpu")
    weights, _ = plot.attention_weights(model, torch.tensor([task.encode(example)]))[0]
    for ax, is_zero in zip(figure.axes, (weights == 0).numpy()):
        coloured, gray = (np.isfinite(image.get_array().filled(np.nan)) for image in ax.images)
        assert (coloured == ~is_zero).all()
        assert (gray == (is_zero & np.tri(16, dtype=bool))).all()
        assert len(ax.texts) == (~is_zero).sum()        # the distances
    labels = figure.axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == [*"line\u24231\u2423cost\u2423$1$", "\\n"]
    assert not any(label.get_parse_math() for label in labels)          # $1$ is no formula


@pytest.mark.parametrize("attn", ["tra", "mine", "fox"])
def test_gates_are_those_of_loops(attn, monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "mine", MyTRA)
    torch.manual_seed(0)
    layer = ATTENTIONS[attn](GPTConfig(attn=attn, n_head=2, n_embd=16))
    x = torch.randn(2, 40, 16)
    q, k, _ = layer.heads(x)
    columns = plot.measure_gates(layer, x)
    for head in range(2):
        low, median, high, *shares = (column[head].item() for column in columns.values())
        gates = layer.forget(x)[:, head].flatten().tolist()
        np.testing.assert_allclose([low, median, high], np.quantile(gates, [0.1, 0.5, 0.9]), rtol=1e-4)
        positive = [q[b, head, i] @ k[b, head, j] > 0 for b in range(2) for i in range(40) for j in range(i + 1)]
        assert shares == ([] if attn == "fox" else pytest.approx([100 * np.mean(positive), 0]))


def test_skipped_share_counts_blocks():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 256, 16)             # 4 blocks of 64 tokens: 1 + 2 + 3 + 4 pairs of blocks
    assert plot.skipped_share(q, k, v, torch.zeros(1, 2, 256)).tolist() == [0, 0]
    # The first query of a block has at most one key there, and must look into the block before. Then all are done.
    forget_at_once = torch.full((1, 2, 256), -1e4)
    assert plot.skipped_share(q, k, v, forget_at_once).tolist() == pytest.approx([1 - (1 + 2 + 2 + 2) / 10] * 2)


def test_gates_are_printed_for_runs_that_have_them(runs, text_run, capsys):
    plot.main(["gates", str(runs), text_run, "--device", "cpu"])
    printed = capsys.readouterr().out
    for name in "abc":
        assert f"{runs / name}, reading 100 x 8 tokens of 1x:" in printed
    assert f"{runs / 'd'}: rope has no forget gates" in printed
    assert f"{text_run}, reading 1 x 256 tokens of 256:" in printed


def test_without_matplotlib_one_line_says_so(runs):
    code = ("import sys, runpy; sys.modules['matplotlib'] = None; sys.argv = ['plot', 'results', sys.argv[1]]; "
            "runpy.run_module('extras.plot', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code, str(runs)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr == "error: pictures need matplotlib: pip install matplotlib\n"


# -----------------------------------------------------------------------------
# Speed


def test_bench_measures_every_attention_and_plot_draws_it(tmp_path, capsys):
    path = tmp_path / "bench.json"
    bench.main(f"--windows 16,32 --batch 1 --tokens 2 --device cpu --json {path}".split())
    printed, rows = capsys.readouterr().out, json.loads(path.read_text())["rows"]
    assert printed.startswith("cpu, torch ")
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in rows)
    assert rows[0]["ratio"] == 1 and {row["name"] for row in rows if "skipped" in row} == {"tra", "tra blocked"}
    names = {row["name"] for row in rows}
    for attn in ATTENTIONS:
        assert {attn, f"{attn}, cache", f"{attn}, no cache"} <= names
    figure = draw(tmp_path, "speed", path)
    assert [ax.get_title() for ax in figure.axes] == list(dict.fromkeys(row["what"] for row in rows))[:3]
    rope = next(line for line in figure.axes[0].lines if line.get_label() == "RoPE")
    expected = [[row["window"], 1000 * row["seconds"]] for row in rows if row["name"] == "rope"]
    assert rope.get_xydata().tolist() == expected


def test_bench_of_a_run_measures_its_perplexity(text_run, tmp_path):
    path = tmp_path / "bench.json"
    bench.main([text_run, "--windows", "32,64", "--device", "cpu", "--json", str(path)])
    model, task = evaluation.load(text_run, "cpu")
    for row, window in zip(json.loads(path.read_text())["rows"], (32, 64), strict=True):
        found = evaluation.measure(model, task, str(window), 129)["perplexity"]
        assert row["name"] == "tra, seed 0" and row["perplexity"] == pytest.approx(found)


def test_what_does_not_fit_says_so_and_the_rest_goes_on():
    def too_much():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    contestants = {"big": too_much, "small": lambda: torch.ones(9)}
    rows = bench.time_side_by_side("x", 8, 1, contestants, torch.device("cpu"))
    assert "| CUDA out of memory" in bench.table(rows) and rows[1]["seconds"] > 0


def test_peak_memory_counts_what_is_held_at_the_same_time():
    def hold_two_megabytes_then_one():
        two = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(2)]
        del two
        torch.empty(1 << 20, dtype=torch.uint8)

    found = bench.peak_memory(hold_two_megabytes_then_one, torch.device("cpu"))
    assert found == pytest.approx(2 << 20, rel=0.01)


# -----------------------------------------------------------------------------
# The campaign


def test_campaign_trains_what_is_missing_resumes_what_was_interrupted_and_keeps_records(tmp_path, monkeypatch, capsys):
    for name in ("model.py", "tasks.py", "data.py", "train.py", "eval.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    flags = "--attn tra --task copy --length 3 --symbols 4 --n-embd 8 --examples 4 --device cpu --steps"
    interrupted = campaign.folder_of("copy", flags + " 2 --seed 0")
    train.train(train.parse_flags([*flags.split(), "1", "--out", interrupted]))
    monkeypatch.setattr(campaign, "EXPERIMENTS", [("copy", [flags + " 2"], range(2)), ("later", [flags + " 3"], [0])])
    campaign.main(["--train", "--jobs", "2", "--only", "copy"])
    records = campaign.read_records()
    assert [record["threads"] for record in records] == [1, 1] and {record["seed"] for record in records} == {0, 1}
    assert all(evaluation.load_checkpoint(campaign.folder_of("copy", r["flags"]))["step"] == 2 for r in records)
    capsys.readouterr()
    campaign.main([])
    assert capsys.readouterr().out.startswith("2 runs are kept in results/runs.jsonl, 1 are missing\nlater: ")
