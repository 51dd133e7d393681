"""TRA in blocks against its plain form, in output and in every gradient. Blocks are small, so that there are many."""

import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
import model as model_module
from extras import fast
from model import GPT, GPTConfig, cope_attention, tra_attention, tra_plain

ABLATIONS = [(True, True), (True, False), (False, True), (False, False)]
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(fast, "BLOCK", 8)


def inputs(T, S, D=4, gate=None, dtype=torch.float64):
    """q, k, v and log_forget as TRA's layer makes them, for two heads of two sequences; or with one gate for all."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, D, generator=g, dtype=torch.float64) for n in (T, S, S))
    f = F.logsigmoid(torch.randn(2, 2, T, generator=g, dtype=torch.float64))
    f = f if gate is None else torch.full_like(f, gate)
    return [x.to(dtype).requires_grad_() for x in (F.rms_norm(q, (D,)), F.rms_norm(k, (D,)), v, f)]


def assert_agrees(got, leaves, want, leaves_of_want=None, **tolerance):
    """The same output and the same four gradients."""
    torch.testing.assert_close(got.to(want.dtype), want, **tolerance)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    gradients = (torch.autograd.grad(out, of, weight.to(out.dtype))
                 for out, of in ((got, leaves), (want, leaves_of_want or leaves)))
    for name, a, b in zip("qkvf", *gradients):
        torch.testing.assert_close(a.to(b.dtype), b, **tolerance, msg=lambda text: f"gradient of {name}: {text}")


@pytest.mark.parametrize("T, S", [(40, 40), (37, 37), (21, 50), (9, 64), (1, 30), (1, 1)])
@pytest.mark.parametrize("ablation", ABLATIONS)
def test_blocks_equal_the_plain_form(ablation, T, S):
    leaves = inputs(T, S)
    assert_agrees(fast.tra_blocked(*leaves, *ablation), leaves, tra_plain(*leaves, *ablation))


@pytest.mark.parametrize("norm", [0.01, 1, 30])
@pytest.mark.parametrize("gates", [[0.0], [-1e-6], [-30.0], [-1e4], [0.0, -20.0]])
def test_blocks_equal_the_plain_form_for_extreme_gates_and_norms(gates, norm):
    """The bound comes from the norms of q and k, so that it holds whether they are normalised or not."""
    q, k, v, _ = (x.detach() for x in inputs(43, 61))
    older_are_longer = torch.linspace(2, 0.1, 61, dtype=k.dtype)[:, None]
    f = torch.tensor(gates * 43, dtype=k.dtype)[:43].repeat(2, 2, 1)        # the last has two gates in turn
    leaves = [x.requires_grad_() for x in (norm * q, norm * k * older_are_longer, v, f)]
    for ablation in ABLATIONS:
        assert_agrees(fast.tra_blocked(*leaves, *ablation), leaves, tra_plain(*leaves, *ablation))


@pytest.mark.parametrize("contextual", [True, False])
def test_blocks_walk_on_to_the_only_kept_key_and_give_zero_without_one(contextual):
    """Strong gates everywhere: most queries are done at once, but 28 to 30 have to search to the very start."""
    leaves = q, k, v, f = inputs(40, 40, gate=-25.0)
    with torch.no_grad():
        k[..., 2:] = -k[..., 2:].abs() - 0.1
        k[:, :, 0, 3] = 0.5
        q[:, :, 28:31] = 0.0
        q[:, :, 28, 3] = 2.0                                # keeps key 0 only
        q[:, :, 29, 2] = 2.0                                # keeps nothing; nor does query 30, whose scores are all 0
    out, reach = fast.tra_blocked(*leaves, True, contextual, return_reach=True)
    assert_agrees(out, leaves, tra_plain(*leaves, True, contextual))
    torch.testing.assert_close(out[:, :, 28], v[:, :, 0])
    assert not out[:, :, 29:31].any()
    assert (reach[..., 3] == 3).all() and (reach < torch.arange(5)).any()


@pytest.mark.parametrize("gate", [None, -0.2, -5.0])
def test_float32_blocks_of_the_real_size_match_float64_of_the_plain_form(monkeypatch, gate):
    """q and k of -1, 0, 1 and D 16: scores are multiples of 1/4, many of them 0, and exact in any precision."""
    monkeypatch.setattr(fast, "BLOCK", 64)
    q, k, v, f = inputs(400, 400, D=16, gate=gate)
    q, k = torch.randint(-1, 2, (2, 2, 2, 400, 16), generator=torch.Generator().manual_seed(0))
    single, double = ([x.detach().to(dtype).requires_grad_() for x in (q, k, v, f)]
                      for dtype in (torch.float32, torch.float64))
    assert_agrees(fast.tra_blocked(*single), single, tra_plain(*double), double, rtol=1e-4, atol=1e-4)


def test_forgetting_skips_blocks_and_its_absence_none():
    """Each head by itself: the first forgets nothing, the second nearly all."""
    q, k, v, f = (x.detach() for x in inputs(160, 160))
    f[:, 0], f[:, 1] = 0.0, -50.0
    _, reach = fast.tra_blocked(q, k, v, f, return_reach=True)
    assert torch.equal(reach[:, 0], torch.arange(20).expand(2, 20)) and reach[:, 1].max() <= 3


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


def test_no_tensor_grows_with_the_square_of_the_length():
    """At 1,024 tokens T x S would be a million; TRA forward and backward, CoPE forward."""
    q, k, v, f = inputs(1024, 1024, dtype=torch.float32)
    with LargestTensor() as largest:
        tra_attention(q, k, v, f, dropout_p=0.1).sum().backward()
        cope_attention(q.detach()[:1, :1], k.detach()[:1, :1], v.detach()[:1, :1], torch.randn(4, 16))
    assert largest.elements <= 256 * 1024


@pytest.mark.parametrize("ablation", [(True, True), (False, False)])
def test_dropout_in_blocks_is_the_same_in_both_passes(ablation):
    """With v = identity the output is the weights, which shows what was dropped."""
    leaves = q, k, v, f = inputs(45, 45)
    identity = torch.eye(45, dtype=q.dtype).expand(2, 2, 45, 45)

    def with_dropout(v):
        torch.manual_seed(5)
        return fast.tra_blocked(q, k, v, f, *ablation, dropout_p=0.3)

    whole = tra_plain(q, k, identity, f, *ablation)
    is_kept = whole.detach() > 1e-9
    mask = (with_dropout(identity) != 0) & is_kept
    assert 0.65 < mask.sum() / is_kept.sum() < 0.75
    assert_agrees(with_dropout(v), leaves, (whole * mask / 0.7) @ v, rtol=1e-6, atol=1e-6)
    other_mask = fast.tra_blocked(q, k, v, f, *ablation, dropout_p=0.3)
    assert not torch.equal(other_mask, with_dropout(v))


def test_blocks_under_autocast():
    """Half precision in and out, float32 inside, also in a backward pass within the autocast."""
    half = inputs(150, 150, D=16, dtype=torch.bfloat16)
    single = [x.detach().float().requires_grad_() for x in half]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tra_attention(*half)
        assert_agrees(out, half, tra_plain(*single), single, atol=0.03, rtol=0.02)
    assert out.dtype == torch.bfloat16


def test_cached_logits_in_blocks_equal_full_logits_of_the_plain_form(monkeypatch):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=11, n_layer=2, n_head=2, n_embd=16)).double().eval()
    idx, cache = torch.randint(0, 11, (2, 400)), [{} for _ in model.blocks]
    with torch.no_grad():
        parts = [model(part, cache=cache)[0] for part in idx.split([150, 1, 49, 200], dim=1)]
        monkeypatch.setattr(model_module, "tra_attention", tra_plain)
        torch.testing.assert_close(torch.cat(parts, dim=1), model(idx)[0])


@pytest.mark.parametrize("device, longest_plain", [("cpu", 127), ("mps", 127), ("cuda", 1023)])
def test_only_long_sequences_take_another_form(monkeypatch, device, longest_plain):
    monkeypatch.setattr(model_module, "tra_plain", lambda *args: "plain")
    monkeypatch.setattr(fast, "tra_for_long_sequences", lambda device: lambda *args: f"for {device}")
    forms = []
    for T in (longest_plain, longest_plain + 1):
        q = types.SimpleNamespace(size=lambda dim: T, is_cuda=device == "cuda", device=device)
        forms.append(tra_attention(q, None, None, None))
    assert forms == ["plain", f"for {device}"]


@pytest.mark.parametrize("device, capability, error, form", [
    ("cpu", None, None, "tra_blocked"), ("mps", None, None, "tra_blocked"), ("cuda", (7, 5), None, "tra_blocked"),
    ("cuda", (8, 0), None, "tra_fused"), ("cuda", (8, 0), RuntimeError("off by 1"), "tra_blocked")])
def test_the_kernel_is_taken_if_it_agrees_else_blocks_with_one_warning(
        monkeypatch, recwarn, device, capability, error, form):
    checks = []

    def check_against_plain_form(device):
        checks.append(device)
        if error:
            raise error

    kernel = types.SimpleNamespace(tra_fused=types.SimpleNamespace(__name__="tra_fused"),
                                   check_against_plain_form=check_against_plain_form)
    monkeypatch.setitem(sys.modules, "extras.kernel", kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cache = fast.tra_for_long_sequences.__wrapped__
    cache.cache_clear()
    for _ in range(2):
        assert fast.tra_for_long_sequences(torch.device(device)).__name__ == form
    assert len(checks) == (1 if capability == (8, 0) else 0)
    assert ["off by 1" in str(warning.message) for warning in recwarn] == ([True] if error else [])
    cache.cache_clear()
