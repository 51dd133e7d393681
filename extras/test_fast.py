"""TRA in blocks against its plain form, in output and in every gradient; and which form is taken when."""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
import model as model_module
from extras import fast
from model import cope_attention, tra_attention, tra_plain

ABLATIONS = [(True, True), (True, False), (False, True), (False, False)]        # sparse, contextual
torch.set_num_threads(1)

# -----------------------------------------------------------------------------
# What test_kernel.py uses, too


def make_inputs(T, S, D=16, B=1, gate=None):
    """q, k, v and log_forget for two heads, as TRA's layer makes them; or with one gate for all."""
    generator = torch.Generator().manual_seed(T + S)
    q, k, v = (torch.randn(B, 2, n, D, generator=generator) for n in (T, S, S))
    f = F.logsigmoid(torch.randn(B, 2, T, generator=generator)) if gate is None else torch.full((B, 2, T), gate)
    return [F.rms_norm(q, (D,)), F.rms_norm(k, (D,)), v, f]


def make_exact_inputs(T, gate):
    """q and k of -1, 0, 1 and D 16: scores are multiples of 1/4, many of them 0, and exact in any precision."""
    q, k, v, f = make_inputs(T, T, gate=gate)
    return [q.round().clamp(-1, 1), k.round().clamp(-1, 1), v, f]


def make_cases():
    """Inputs that a faster form might get wrong, by name."""
    cases = {}
    for T, S in ((128, 128), (100, 100), (37, 150), (70, 130), (1, 90), (1, 1)):
        cases[f"{T} queries, {S} keys"] = make_inputs(T, S)
    for gate in (-0.1, -5.0):
        cases[f"scores of 0, gate {gate}"] = make_exact_inputs(100, gate)

    # A form may stop early by a bound on the scores that are left. The longest keys, which set it, are the oldest here,
    # and in a width of 2 some point where a query points: their scores come near the bound.
    for gate, norm in ((0.0, 0.01), (-1e-6, 30), (-0.5, 30), (-30.0, 0.01), (-30.0, 1), (-1e4, 30)):
        q, k, v, f = make_inputs(3, 200, D=2, gate=gate)
        cases[f"gate {gate}, norm {norm}"] = [norm * q, norm * k * torch.linspace(2, 0.1, 200)[:, None], v, f]

    q, k, v, f = make_inputs(40, 70, B=2, gate=0.0)
    f[0, 1] = -20
    f[1, :, ::3] = -3
    cases["gates by sequence, head and query"] = [q, k, v, f]

    # Strong gates: most queries are done at once, but the last three search to the very start. Component 3 is positive
    # in key 0 alone, which the first of them finds. No key is positive in component 2: the second finds none, nor does
    # the third, whose scores are all 0.
    q, k, v, f = make_inputs(143, 143, gate=-25.0)
    k[..., 2:] = -k[..., 2:].abs() - 0.1
    k[:, :, 0, 3] = 0.5
    q[:, :, 140:] = 0
    q[:, :, 140, 3] = 2.0
    q[:, :, 141, 2] = 2.0
    cases["rows that keep nothing"] = [q, k, v, f]
    return cases


CASES = make_cases()


def output_and_gradients(attention, inputs, *settings):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attention(*leaves, *settings)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def assert_agrees(attention, inputs, *settings, plain=tra_plain, tolerance=1e-5):
    """Compare with the plain form in float64, and return the output and the four gradients."""
    got = output_and_gradients(attention, inputs, *settings)
    want = output_and_gradients(plain, [x.double() for x in inputs], *settings)
    for name, x, y in zip(("output", "dq", "dk", "dv", "df"), got, want):
        error = ((x - y).abs().max() / y.abs().max().clamp(min=1)).item()
        assert error <= tolerance, f"{name} is off by {error:.1e}"
    assert torch.equal((got[0] == 0).all(-1), (want[0] == 0).all(-1))       # rows that keep nothing are exactly 0
    return got


def assert_dropout_is_the_same_in_both_passes(attention, inputs, *ablation):
    """And it drops the right share. With the identity for v the output is the weights, which shows what was dropped."""
    q, k, v, f = inputs
    identity = torch.eye(k.size(2), dtype=v.dtype).expand(*k.shape[:3], -1)
    torch.manual_seed(5)
    dropped, whole = attention(q, k, identity, f, *ablation, 0.3), tra_plain(q, k, identity, f, *ablation)
    mask, is_kept = (dropped != 0).double() / 0.7, whole > 1e-9
    assert abs((dropped[is_kept] != 0).double().mean() - 0.7) < 0.04

    def plain_with_this_mask(q, k, v, f, *settings):
        return tra_plain(q, k, identity.double(), f, *ablation) * mask @ v

    torch.manual_seed(5)
    got, *_ = assert_agrees(attention, inputs, *ablation, 0.3, plain=plain_with_this_mask)
    assert not torch.equal(got, attention(*inputs, *ablation, 0.3))         # another mask each time


# -----------------------------------------------------------------------------
# Blocks


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that there are many."""
    monkeypatch.setattr(fast, "BLOCK", 4)


@pytest.mark.parametrize("ablation", ABLATIONS)
@pytest.mark.parametrize("case", CASES)
def test_blocks_equal_the_plain_form(case, ablation):
    assert_agrees(fast.tra_blocked, [x.double() for x in CASES[case]], *ablation, tolerance=1e-9)


@pytest.mark.parametrize("gate", [None, -0.2, -5.0])
def test_float32_blocks_of_the_real_size_equal_the_plain_form(monkeypatch, gate):
    monkeypatch.setattr(fast, "BLOCK", 64)
    assert_agrees(fast.tra_blocked, make_exact_inputs(400, gate))


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_dropout_in_blocks(ablation):
    inputs = [x.double() for x in make_inputs(45, 45)]
    assert_dropout_is_the_same_in_both_passes(fast.tra_blocked, inputs, *ablation)


def test_blocks_under_autocast():
    """Half precision in and out, float32 inside, also in a backward pass within the autocast."""
    half = [x.bfloat16() for x in make_inputs(150, 150)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = assert_agrees(tra_attention, half, tolerance=0.02)
    assert {x.dtype for x in got} == {torch.bfloat16}


def test_forgetting_skips_blocks_and_its_absence_none():
    """Each head by itself: the first forgets nothing, the second nearly all."""
    q, k, v, f = make_inputs(160, 160, gate=0.0)
    f[:, 1] = -50
    _, reach = fast.tra_blocked(q, k, v, f, return_reach=True)
    assert reach[0, 0].tolist() == list(range(40)) and reach[0, 1].max() <= 5


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
    q, k, v, f = make_inputs(1024, 1024)
    with LargestTensor() as largest:
        output_and_gradients(tra_attention, (q, k, v, f), True, True, 0.1)
        cope_attention(q[:, :1], k[:, :1], v[:, :1], torch.randn(16, 16))
    assert largest.elements <= 256 * 1024


# -----------------------------------------------------------------------------
# Which form is taken


@pytest.mark.parametrize("device, longest_plain", [("cpu", 127), ("mps", 127), ("cuda", 1023)])
def test_only_long_sequences_take_another_form(monkeypatch, device, longest_plain):
    monkeypatch.setattr(model_module, "tra_plain", lambda *args: ("plain", *args[4:]))
    monkeypatch.setattr(fast, "tra_for_long_sequences", lambda device: lambda *args: (f"for {device}", *args[4:]))
    for T, form in ((longest_plain, "plain"), (longest_plain + 1, f"for {device}")):
        q = SimpleNamespace(size=lambda dim: T, is_cuda=device == "cuda", device=device)
        assert tra_attention(q, None, None, None, False, True, 0.1) == (form, False, True, 0.1)


@pytest.mark.parametrize("device, capability, error, form", [
    ("cpu", None, None, "tra_blocked"), ("mps", None, None, "tra_blocked"), ("cuda", (7, 5), None, "tra_blocked"),
    ("cuda", (8, 0), None, "tra_fused"), ("cuda", (8, 0), RuntimeError("off by 1"), "tra_blocked")])
def test_the_kernel_is_taken_if_it_agrees_else_blocks_with_one_warning(
        monkeypatch, recwarn, device, capability, error, form):
    kernel = SimpleNamespace(check_against_plain_form=Mock(side_effect=error), tra_fused=Mock(__name__="tra_fused"))
    monkeypatch.setitem(sys.modules, "extras.kernel", kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    choices = fast.tra_for_long_sequences.__wrapped__       # it remembers its choice for each device
    choices.cache_clear()
    for _ in range(2):
        assert fast.tra_for_long_sequences(torch.device(device)).__name__ == form
    choices.cache_clear()
    assert kernel.check_against_plain_form.call_count == (1 if capability == (8, 0) else 0)
    assert ["off by 1" in str(warning.message) for warning in recwarn] == ([True] if error else [])
