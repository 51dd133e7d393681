"""Tests of extras/, on a CPU in a minute:  python -m pytest extras"""

import json
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
from extras import bench, plot
from model import ATTENTIONS, GPT, GPTConfig, TRA

# -----------------------------------------------------------------------------
# Pictures


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of tiny runs: copy with two seeds of tra, one of tra without its threshold, and one of rope."""
    folder = tmp_path_factory.mktemp("out")
    sizes = "--task copy --length 3 --symbols 4 --n-layer 1 --n-head 2 --n-embd 8 --batch 4 --steps 4 --log-every 1"
    for name, flags in {"a": "--attn tra", "b": "--attn tra --seed 1", "c": "--attn tra --no-sparse",
                        "d": "--attn rope --eval-every 2"}.items():
        argv = [*sizes.split(), *flags.split(), "--examples", "8", "--device", "cpu", "--out", str(folder / name)]
        train.train(train.parse_flags(argv))
    return folder


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "book.txt").write_text("".join(f"line {i} costs ${i}$\n" for i in range(400)))
    data.prepare(str(folder / "book.txt"), "byte", str(folder / "book"))
    sizes = "--window 16 --n-layer 1 --n-head 2 --n-embd 8 --batch 2 --steps 1 --examples 200 --device cpu"
    train.train(train.parse_flags(["--attn", "tra", "--data", str(folder / "book"), *sizes.split(),
                                    "--out", str(folder / "run")]))
    return str(folder / "run")


def draw(tmp_path, *argv):
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    figure = plot.main([*map(str, argv), "--device", "cpu", "--out", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    return figure


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_results_draw_the_numbers_of_the_table(runs, tmp_path):
    figure = draw(tmp_path, "results", runs)
    assert legend(figure) == ["TRA", "TRA no-sparse", "RoPE"]
    line = next(line for line in figure.axes[0].lines if line.get_label() == "TRA")
    results = [json.loads((runs / name / "eval.json").read_text())["results"] for name in "ab"]
    assert line.get_xdata().tolist() == [3, 4, 6, 9, 12, 18]
    expected = [50 * (results[0][split] + results[1][split]) for split in results[0]]
    np.testing.assert_allclose(line.get_ydata(), expected)
    colours = [line.get_color() for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    assert len(set(colours)) == 3


def test_results_choose_attentions_and_tasks_from_a_file_of_records(tmp_path):
    path, common = tmp_path / "runs.jsonl", dict(seed=0, scale="laptop", examples=9, settings={})
    kinds = [("flipflop", "exact match", dict(length=4), dict(iid=1.0, dense=0.5)),
             ("instruct", "exact match", dict(length=4), {"copy-1x": 1.0, "copy-2x": 0.1, "last-1x": 0.3}),
             ("book", "perplexity", dict(window=8), {"8": 4.0, "16": 30.0})]
    with open(path, "w") as file:
        for task, metric, sizes, results in kinds:
            for attn in ("fox", "rope", "tra"):
                record = dict(common, task=task, attn=attn, metric=metric, sizes=sizes, results=results)
                file.write(json.dumps(record) + "\n")
    figure = draw(tmp_path, "results", path, "--attn", "tra,rope", "--task", "book,flipflop,instruct")
    assert [ax.get_title() for ax in figure.axes] == [f"{name}, laptop scale" for name in
                                                     ("book", "flipflop", "instruct copy", "instruct last")]
    assert legend(figure) == ["TRA", "RoPE"]
    assert figure.axes[0].lines[0].get_ydata().tolist() == [4, 30] and figure.axes[0].get_yscale() == "log"
    assert [text.get_text() for text in figure.axes[1].get_xticklabels()] == ["iid", "dense"]
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.main(["results", str(path), "--task", "copy", "--out", str(tmp_path / "x.png")])


def test_losses_draw_the_log(runs, tmp_path):
    figure = draw(tmp_path, "losses", runs)
    assert legend(figure) == ["TRA", "TRA no-sparse", "RoPE"]
    lines = figure.axes[0].lines
    assert len(lines) == 5                              # four runs, and the validation of one
    steps, losses = plot.read_log(runs / "a", "loss")
    assert steps == [1, 2, 3, 4]
    assert lines[0].get_ydata().tolist() == losses
    assert [line.get_linestyle() for line in lines].count("--") == 1


def test_position_draws_the_mean_loss_by_position(text_run, tmp_path):
    figure = draw(tmp_path, "position", text_run, "--windows", "32", "--examples", "100")
    model, task = evaluation.load(text_run, "cpu")
    losses = [loss for *_, batch in evaluation.predictions(model, task, "32", 100) for loss in batch]
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
    found = plot.attention_weights(model, idx)
    for (layer, x), (weights, n) in zip(plot.layers_of(model, idx), found, strict=True):
        _, _, v = layer.heads(x)
        torch.testing.assert_close(layer.proj((weights @ v)[0].transpose(0, 1).flatten(1)), layer(x)[0])
        assert (weights.triu(1) == 0).all()
        assert (n is not None) == (attn in ("tra", "mine"))
        if n is not None:
            kept = weights > 0
            for h, i, j in kept.nonzero().tolist():
                assert n[h, i, j] == kept[h, i, j:i + 1].sum()


def test_attention_is_gray_exactly_where_a_weight_is_zero(runs, tmp_path):
    figure = draw(tmp_path, "attention", runs / "a", "--example", "<bos> a b <sep> a")
    model, task = evaluation.load(runs / "a", "cpu")
    weights, _ = plot.attention_weights(model, torch.tensor([task.encode("<bos> a b <sep> a")]))[0]
    for head in range(2):
        coloured, gray = (image.get_array() for image in figure.axes[head].images)
        is_zero = (weights[head] == 0).numpy()
        assert (np.isfinite(gray.filled(np.nan)) == (is_zero & np.tri(5, dtype=bool))).all()
        assert (np.isfinite(coloured.filled(np.nan)) == ~is_zero).all()
        assert len(figure.axes[head].texts) == (~is_zero).sum()         # the distances
    with pytest.raises(ValueError, match="128 tokens"):
        draw(tmp_path, "attention", runs / "a", "--example", "a " * 129)


def test_a_dollar_is_a_token_like_others(text_run, tmp_path):
    figure = draw(tmp_path, "attention", text_run, "--example", "$1$ \n")
    labels = figure.axes[0].get_yticklabels()
    assert [text.get_text() for text in labels] == ["$", "1", "$", "\u2423", "\\n"]
    assert not any(text.get_parse_math() for text in labels)


@pytest.mark.parametrize("attn", ["tra", "fox"])
def test_gates_are_those_of_loops(attn):
    torch.manual_seed(0)
    model = GPT(GPTConfig(attn=attn, vocab_size=9, n_layer=2, n_head=2, n_embd=16)).eval()
    idx = torch.randint(9, (2, 300))
    rows = iter(plot.measure_gates(model, idx))
    for layer, (attention, x) in enumerate(plot.layers_of(model, idx), start=1):
        q, k, _ = attention.heads(x)
        for head in range(2):
            row = next(rows)
            assert (row["layer"], row["head"]) == (layer, head + 1)
            gates = attention.forget(x)[:, head].flatten().tolist()
            np.testing.assert_allclose(row["forget"], np.quantile(gates, [0.1, 0.5, 0.9]), rtol=1e-4)
            if attn == "tra":
                count = sum(int((q[b, head, i] @ k[b, head, :i + 1].T > 0).sum()) for b in range(2) for i in range(300))
                assert row["positive"] == pytest.approx(count / (2 * 300 * 301 / 2))
                assert 0 <= row["skipped"] < 1
            else:
                assert "positive" not in row
    assert next(rows, None) is None


def test_skipped_share_counts_blocks():
    reach = torch.tensor([[[0, 1, 1, 0]]])              # of 1, 2, 3 and 4 blocks, 1, 2, 2 and 1 were met
    assert plot.skipped_share(reach).tolist() == pytest.approx([1 - 6 / 10])


def test_gates_are_printed_for_runs_that_have_them(runs, capsys):
    plot.main(["gates", str(runs), "--device", "cpu"])
    printed = capsys.readouterr().out
    assert [f"{runs / name}, reading" in printed for name in "abcd"] == [True, True, True, False]
    with pytest.raises(ValueError, match="forget gates"):
        plot.main(["gates", str(runs / "d"), "--device", "cpu"])


def test_without_matplotlib_one_line_says_so(runs):
    code = ("import sys, runpy; sys.modules['matplotlib'] = None; sys.argv = ['plot', 'results', sys.argv[1]]; "
            "runpy.run_module('extras.plot', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code, str(runs)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr == "error: pictures need matplotlib: pip install matplotlib\n"


# -----------------------------------------------------------------------------
# Speed


def test_bench_prints_every_attention_and_writes_json(tmp_path, capsys):
    path = tmp_path / "bench.json"
    bench.main(f"--windows 16,32 --batch 1 --tokens 2 --device cpu --json {path}".split())
    printed, rows = capsys.readouterr().out, json.loads(path.read_text())["rows"]
    assert printed.startswith("cpu, torch ")
    for attn in ATTENTIONS:
        assert f"| {attn} " in printed and f"| {attn}, no cache " in printed
        assert [row["window"] for row in rows if (row["what"], row["name"]) == ("training step", attn)] == [16, 32]
    assert {row["what"] for row in rows} == {"training step", "attention, forward", "attention, forward and backward",
                                             "generation"}
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in rows)
    figure = draw(tmp_path, "speed", path)
    assert [ax.get_title() for ax in figure.axes] == list(dict.fromkeys(row["what"] for row in rows))[:3]
    assert {kind.__name__ for kind in ATTENTIONS.values()} | {"sdpa", "tra_plain"} <= set(legend(figure))


def test_bench_of_a_run_measures_its_perplexity(text_run, capsys, tmp_path):
    path = tmp_path / "bench.json"
    bench.main([text_run, "--windows", "32,64", "--device", "cpu", "--json", str(path)])
    model, task = evaluation.load(text_run, "cpu")
    for row in json.loads(path.read_text())["rows"]:
        found = evaluation.measure(model, task, str(row["window"]), 129)["perplexity"]
        assert row["name"] == "tra, seed 0" and row["perplexity"] == pytest.approx(found)


def test_what_does_not_fit_says_so_and_the_rest_goes_on():
    def too_much():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    rows = bench.side_by_side("x", 8, 1, {"big": too_much, "small": lambda: torch.ones(9)}, "cpu", rounds=2)
    assert "| out of memory |" in bench.table(rows)
    assert rows[1]["seconds"] > 0 and rows[1]["ratio"] is None


def test_peak_memory_counts_what_is_held_at_the_same_time():
    def one_after_the_other():
        for _ in range(4):
            torch.empty(1 << 20, dtype=torch.uint8)

    def together():
        return [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(4)]

    assert bench.peak_memory(one_after_the_other, "cpu") == pytest.approx(1 << 20, rel=0.01)
    assert bench.peak_memory(together, "cpu") == pytest.approx(4 << 20, rel=0.01)
