"""Tests of plot.py, bench.py and campaign.py, on a CPU in half a minute:  python -m pytest extras/test_extras.py"""

import json
import runpy
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch

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
    for name, flags in zip("abcd", ("tra", "tra --seed 1", "tra --no-sparse", "rope --eval-every 2")):
        train_small(f"--attn {flags} --task copy --length 3 --symbols 4", folder / name)
    return folder


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "book.txt").write_text("".join(f"line {i} costs ${i}$\n" for i in range(400)))
    data.prepare(str(folder / "book.txt"), "byte", str(folder / "book"))
    train_small(f"--attn tra --data {folder / 'book'} --window 16", folder / "run")
    return str(folder / "run")


def make_record(task, attn, seed, results, **settings):
    metric = "perplexity" if "window" in settings else "exact match"
    return dict(task=task, attn=attn, seed=seed, scale="laptop", metric=metric, examples=9, settings=settings,
                results=results)


def draw(tmp_path, *argv):
    """The figure, once the picture is there."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    figure = plot.main([*map(str, argv), "--device", "cpu", "--out", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    return figure


def lines_of(ax):
    """{(label, linestyle): [[x, y], ...]}, of the lines that stand in the legend."""
    return {(line.get_label(), line.get_linestyle()): line.get_xydata().tolist() for line in ax.lines
            if not line.get_label().startswith("_")}


def test_results_draw_means_of_chosen_attentions_and_tasks(tmp_path):
    records = []
    for attn, seed, share in (("fox", 0, 1), ("rope", 0, 1), ("tra", 0, 1), ("tra", 1, 0.5)):
        results = {"iid": share, "dense": 0.2 * share, "iid-4x": 0.5 * share}
        records += [make_record("flipflop", attn, seed, results, length=8),
                    make_record("book", attn, seed, {"8": 4 * share, "16": 300 * share}, window=8)]
    records.append(make_record("book", "tra", 0, {"8": 1.0, "16": 1.0}, window=8, lr=0.1))
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    # A panel for each kind of test set
    figure = draw(tmp_path, "results", path, "--attn", "tra,rope", "--task", "book,flipflop")
    assert [(ax.get_title(), *lines_of(ax).values()) for ax in figure.axes] == [
        ("book, laptop scale", [[8, 3], [16, 225]], [[8, 1], [16, 1]], [[8, 4], [16, 300]]),
        ("flipflop iid, laptop scale", [[8, 75], [32, 37.5]], [[8, 100], [32, 50]]),
        ("flipflop dense, laptop scale", [[8, 15]], [[8, 20]])]
    # From the lowest seed to the highest, on an axis with plain numbers
    shaded = figure.axes[0].collections[0].get_paths()[0].get_extents()
    assert (shaded.ymin, shaded.ymax) == (2, 300)
    assert {"5", "10", "100", "200"} <= {text.get_text() for text in figure.axes[0].get_yticklabels()}
    # Only the better setting of TRA
    figure = draw(tmp_path, "results", path, "--task", "book", "--attn", "tra", "--best")
    assert lines_of(figure.axes[0]) == {("TRA", "-"): [[8, 1], [16, 1]]}
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(tmp_path, "results", path, "--task", "copy")


def test_pictures_of_runs_have_a_line_for_each_setting_and_losses_are_those_of_the_log(runs, tmp_path):
    assert draw(tmp_path, "results", runs).axes[0].lines[0].get_xdata().tolist() == [3, 4, 6, 9, 12, 18]
    figure = draw(tmp_path, "losses", runs)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["TRA", "TRA no-sparse", "RoPE"]
    assert len({line.get_color() for line in figure.axes[0].lines}) == 3
    log = [json.loads(line) for line in (runs / "d" / "log.jsonl").read_text().splitlines()]
    for key, linestyle in (("loss", "-"), ("val_loss", "--")):
        expected = [[row["step"], row[key]] for row in log if key in row]
        assert lines_of(figure.axes[0])["RoPE", linestyle] == expected


def test_position_draws_the_mean_loss_by_position(text_run, tmp_path):
    figure = draw(tmp_path, "position", text_run, "--split", "32")
    model, task = evaluation.load(text_run, "cpu")
    losses = [batch for *_, batch in evaluation.predictions(model, task, "32", 200)]
    ranges = ((0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32))
    expected = [torch.cat([batch[:, first:end].flatten() for batch in losses]).mean() for first, end in ranges]
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), expected, rtol=1e-5)


@pytest.mark.parametrize("attn", [*ATTENTIONS, "a variant of tra"])
def test_attention_weights_and_gates_are_those_the_model_uses(attn, monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "a variant of tra", type("Variant", (TRA,), {}))
    torch.manual_seed(0)
    model = GPT(GPTConfig(attn=attn, vocab_size=9, n_layer=2, n_head=2, n_embd=16)).eval()
    idx = torch.randint(9, (1, 40))
    for (layer, x), (weights, n) in zip(plot.layers_of(model, idx), plot.attention_weights(model, idx), strict=True):
        q, k, v = layer.heads(x)
        torch.testing.assert_close(layer.proj((weights @ v)[0].transpose(0, 1).flatten(1)), layer(x)[0])
        assert (n is not None) == isinstance(layer, TRA)
        if n is not None:
            kept_from_here_on = (weights > 0).flip(-1).cumsum(-1).flip(-1)
            assert torch.equal(n[weights > 0], kept_from_here_on[weights > 0].float())
        if hasattr(layer, "forget"):
            for head, found in enumerate(zip(*plot.measure_gates(layer, x).values())):
                expected = np.quantile(layer.forget(x)[0, head].tolist(), [0.1, 0.5, 0.9]).tolist()
                if isinstance(layer, TRA):
                    positive = [q[0, head, i] @ k[0, head, j] > 0 for i in range(40) for j in range(i + 1)]
                    expected += [100 * np.mean(positive), 0]
                assert [value.item() for value in found] == pytest.approx(expected, rel=1e-4)


def test_attention_is_gray_exactly_where_a_weight_is_zero(text_run, tmp_path):
    example = "line 1 cost $1$\n"
    figure = draw(tmp_path, "attention", text_run, "--example", example)
    model, task = evaluation.load(text_run, "cpu")
    weights, n = next(plot.attention_weights(model, torch.tensor([task.encode(example)])))
    past = np.tri(16, dtype=bool)
    for head, ax in enumerate(figure.axes[:2]):
        shown = ax.images[0].get_array()
        is_gray = (ax.images[0].to_rgba(shown)[..., :3] == 0.75).all(-1)
        assert (~shown.mask == past).all() and (is_gray == (past & (weights[head] == 0).numpy())).all()
        np.testing.assert_array_equal(shown[past & ~is_gray], weights[head][weights[head] > 0])
        assert [text.get_text() for text in ax.texts] == [f"{d:.0f}" for d in n[head][weights[head] > 0]]
    labels = figure.axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == [*"line\u24231\u2423cost\u2423$1$", "\\n"]
    assert not any(label.get_parse_math() for label in labels)          # $1$ is no formula


def test_gates_tell_how_many_key_blocks_each_head_skips():
    """One head forgets nothing. In the other all queries are done after the block of keys before their own."""
    torch.manual_seed(0)
    layer = TRA(GPTConfig(n_head=2, n_embd=32))
    layer.forget.bias.data = torch.tensor([50.0, -3.0])
    skipped = plot.measure_gates(layer, torch.randn(3, 4 * 64, 32))["key blocks skipped, %"]
    assert skipped.tolist() == pytest.approx([0, 100 - 100 * (1 + 2 + 2 + 2) / (1 + 2 + 3 + 4)])


def test_gates_need_no_matplotlib_and_a_picture_asks_for_it(runs, text_run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["plot.py", "gates", str(runs), text_run, "--device", "cpu"])
    runpy.run_path(plot.__file__, run_name="__main__")
    printed = capsys.readouterr().out
    assert f"{runs / 'a'}, reading 1024 x 8 tokens of 1x:\n\n| layer | head | forget f: 10% |" in printed
    assert f"{runs / 'd'}: rope has no forget gates" in printed
    assert f"{text_run}, reading 26 x 16 tokens of 16:" in printed
    sys.argv[1] = "results"
    with pytest.raises(SystemExit, match="^error: pictures need matplotlib: pip install matplotlib$"):
        runpy.run_path(plot.__file__, run_name="__main__")


# -----------------------------------------------------------------------------
# Speed


def test_bench_measures_every_attention_and_plot_draws_it(tmp_path):
    path = tmp_path / "bench.json"
    bench.main(f"--windows 16,32 --batch 1 --tokens 2 --device cpu --json {path}".split())
    rows = json.loads(path.read_text())
    names = [row["name"] for row in rows]
    assert all({attn, f"{attn}, cache", f"{attn}, no cache"} <= set(names) for attn in ATTENTIONS)
    assert all(row["time, ms"] > 0 and row["peak memory, MB"] > 0 for row in rows)
    assert names[0] == "rope" and rows[1]["ratio"] == rows[1]["time, ms"] / rows[0]["time, ms"]
    figure = draw(tmp_path, "speed", path)
    assert [ax.get_title() for ax in figure.axes] == list(dict.fromkeys(row["what"] for row in rows))[:3]
    expected = [[row["window"], row["time, ms"]] for row in rows if row["name"] == "rope"]
    assert lines_of(figure.axes[0])["RoPE", "-"] == expected


def test_bench_of_a_run_measures_its_perplexity(text_run, tmp_path):
    path = tmp_path / "bench.json"
    bench.main([text_run, "--windows", "32,64", "--device", "cpu", "--json", str(path)])
    model, task = evaluation.load(text_run, "cpu")
    for row, window in zip(json.loads(path.read_text()), (32, 64), strict=True):
        found = evaluation.measure(model, task, str(window), 129)["perplexity"]
        assert row["name"] == f"tra {text_run}" and row["perplexity"] == pytest.approx(found)


def test_bench_takes_the_best_round_tells_the_memory_and_goes_on_after_a_failure(monkeypatch):
    def hold_two_megabytes_then_one():
        two = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(2)]
        del two
        torch.empty(1 << 20, dtype=torch.uint8)

    times = iter([5, 3, 4, 8, 7])
    monkeypatch.setattr(bench, "milliseconds_of", lambda run, device: run() or next(times))
    too_much = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"))
    contestants = {"big": too_much, "small": hold_two_megabytes_then_one}
    rows = bench.time_side_by_side("x", 8, 1, contestants, torch.device("cpu"))
    assert "| big: CUDA out of memory" in bench.table(rows)
    assert rows[1]["time, ms"] == 3 and rows[1]["peak memory, MB"] == pytest.approx(2, rel=0.01)


# -----------------------------------------------------------------------------
# The campaign


def test_campaign_trains_what_is_missing_resumes_what_was_interrupted_and_keeps_records(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").symlink_to(train.__file__)
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    flags = "--attn tra --task copy --length 3 --symbols 4 --n-embd 8 --examples 4 --device cpu --steps"
    interrupted = campaign.folder_of("copy", flags + " 2 --seed 0")
    train.train(train.parse_flags([*flags.split(), "1", "--out", interrupted]))
    monkeypatch.setattr(campaign, "EXPERIMENTS", [("copy", [flags + " 2"], range(2)), ("later", [flags + " 3"], [0])])
    campaign.main(["--train", "--jobs", "2", "--only", "copy"])
    records = campaign.kept_records()
    checkpoints = {r["seed"]: evaluation.load_checkpoint(campaign.folder_of("copy", r["flags"])) for r in records}
    logged = {seed: [row["step"] for row in checkpoint["log"]] for seed, checkpoint in checkpoints.items()}
    assert logged == {0: [1, 2], 1: [2]} and [record["threads"] for record in records] == [1, 1]
    campaign.main([])
    assert "\n2 runs are kept in results/runs.jsonl, 1 are missing\nlater: " in capsys.readouterr().out


def test_the_summary_has_each_attention_at_its_best_setting_and_means_over_seeds(monkeypatch):
    monkeypatch.setattr(campaign, "ATTENTIONS", ["tra", "rope", "fox"])
    records = [make_record("wikitext-2", "rope", 0, {"128": 4.0, "4096": 24.0}, window=128, lr=0.1),
               make_record("wikitext-2", "rope", 0, {"128": 5.0, "4096": 20.0}, window=128, lr=0.2),
               make_record("copy", "tra", 0, {"1x": 1.0, "2x": 0.5, "4x": 0.25}, length=4, lr=0.2)]
    for seed, share in enumerate((0.9, 0.8)):
        records += [make_record("copy", "fox", seed, {"1x": 1.0, "2x": 0.5, "4x": 0.0}, length=4, lr=0.1),
                    make_record("copy", "fox", seed, {"1x": 0.5, "2x": share, "4x": share}, length=4, lr=0.2)]
    assert campaign.summary(records) == """\
| task       | test set |   tra |  rope |  fox |  seeds |
| ---------- | -------: | ----: | ----: | ---: | -----: |
| copy       |       1x | 100.0 |       | 50.0 | 1 to 2 |
| copy       |       2x |  50.0 |       | 85.0 | 1 to 2 |
| copy       |       4x |  25.0 |       | 85.0 | 1 to 2 |
| wikitext-2 |      128 |       |  5.00 |      |      1 |
| wikitext-2 |     4096 |       | 20.00 |      |      1 |"""
