"""TRA in blocks against its plain form, on cases that test_kernel.py uses, too; and which form is taken when."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from extras import fast
from model import cope_attention, tra_attention, tra_plain

torch.set_num_threads(1)


def make_inputs(T, S, D=16, gate=None):
    """q, k, v and log_forget for two heads, with one gate for all queries or some for each."""
    generator = torch.Generator().manual_seed(T + S)
    # Numbers that float16 holds, so that no score changes its sign there.
    q, k, v = (torch.randn(1, 2, n, D, generator=generator).half().float() for n in (T, S, S))
    f = F.logsigmoid(torch.randn(1, 2, T, generator=generator)) if gate is None else torch.full((1, 2, T), gate)
    return [q, k, v, f]


def make_cases():
    """Inputs that a faster form might get wrong, by name."""
    cases = {}
    for T, S, gate in ((128, 128, None), (100, 100, -5.0), (37, 150, None), (70, 133, -0.1), (1, 1, None)):
        q, k, v, f = make_inputs(T, S, gate=gate)
        # Of whole numbers, many scores are exactly 0.
        cases[f"{T} queries, {S} keys, gate {gate}"] = [q.round(), k.round(), v, f]

    # Two sequences, the second with the heads of the first in the other order.
    cases["two sequences"] = [torch.cat((x, x.flip(1))) for x in make_inputs(37, 70)]

    # A form may stop early by a bound on the scores that are left. The longest keys, which set it, are the oldest here,
    # and in a width of 2 some point where a query points: their scores come near the bound.
    for gate, norm in ((0.0, 0.01), (-1e-6, 30), (-0.5, 30), (-30.0, 0.01), (-30.0, 1), (-1e4, 30)):
        q, k, v, f = make_inputs(3, 200, D=2, gate=gate)
        cases[f"gate {gate}, norm {norm}"] = [norm * q, norm * k * torch.linspace(2, 0.1, 200)[:, None], v, f]

    # All scores are 4, which is the bound. After 64 keys it says that the rest may weigh 1.3 times eps of float32, and
    # the rest alone has values.
    q, k, v, f = make_inputs(1, 96, gate=-0.3)
    v = 1e9 * (torch.arange(96) < 32).float()[:, None].expand_as(v)
    cases["the rest weighs just more than eps"] = [torch.ones_like(q), torch.ones_like(k), v, f]

    # Most queries are done at once, but the last three search to the very start. The first of them finds key 0, the
    # second no key, as none is positive in component 2, and the scores of the third are all 0. In the other head half
    # of the gates forget nothing.
    q, k, v, f = make_inputs(143, 143, gate=-25.0)
    k[..., 2:] = -k[..., 2:].abs() - 0.25
    k[:, :, 0, 3] = 0.5
    q[:, :, 140:] = 0
    q[:, :, 140, 3] = 2.0
    q[:, :, 141, 2] = 2.0
    f[:, 1, ::2] = 0
    cases["rows that keep nothing"] = [q, k, v, f]
    return cases


CASES = make_cases()


def output_and_gradients(attention, inputs, *settings):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attention(*leaves, *settings)
    dout = torch.randint(-1, 2, out.shape, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out))]


def assert_agrees(attention, inputs, *settings, tolerance=1e-5):
    """Compare with the plain form in float64, and return the output and the four gradients."""
    got = output_and_gradients(attention, inputs, *settings)
    want = output_and_gradients(tra_plain, [x.double() for x in inputs], *settings)
    for name, x, y in zip(("output", "dq", "dk", "dv", "df"), got, want):
        error = ((x - y).abs().max() / y.abs().max().clamp(min=1)).item()
        assert error <= tolerance, f"{name} is off by {error:.1e}"
    assert torch.equal((got[0] == 0).all(-1), (want[0] == 0).all(-1))       # rows that keep nothing are exactly 0
    return got


def assert_dropout_agrees(attention, inputs, monkeypatch):
    """With the identity for v the output is the weights, which shows what is dropped. tra_plain then drops the same."""
    q, k, v, f = inputs
    identity = torch.eye(k.size(2), dtype=v.dtype).expand(*k.shape[:3], -1)
    torch.manual_seed(5)
    weights, dropped = tra_plain(q, k, identity, f), attention(q, k, identity, f, True, True, 0.3)      # (B, H, T, S)
    mask = (dropped != 0).double() / 0.7
    assert abs(mask[weights > 1e-9].mean() - 1) < 0.06
    monkeypatch.setattr(F, "dropout", lambda weights, p: weights * mask)
    torch.manual_seed(5)
    out, *_ = assert_agrees(attention, inputs, True, True, 0.3)
    assert not torch.equal(out, attention(*inputs, True, True, 0.3))        # another mask each time


@pytest.mark.parametrize("ablation", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("case", CASES)
def test_blocks_equal_the_plain_form(monkeypatch, case, ablation):
    monkeypatch.setattr(fast, "BLOCK", 4)           # so that there are many
    assert_agrees(fast.tra_blocked, [x.double() for x in CASES[case]], *ablation, tolerance=1e-9)


def test_blocks_in_float32_and_under_autocast(monkeypatch):
    """Half precision in and out, float32 inside, also in a backward pass within the autocast."""
    monkeypatch.setattr(fast, "BLOCK", 32)
    inputs = make_inputs(400, 400)
    assert_agrees(tra_attention, inputs)
    assert_agrees(fast.tra_blocked, CASES["the rest weighs just more than eps"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = assert_agrees(tra_attention, [x.bfloat16() for x in inputs], tolerance=0.02)
    assert {x.dtype for x in got} == {torch.bfloat16}


def test_dropout_in_blocks(monkeypatch):
    monkeypatch.setattr(fast, "BLOCK", 4)
    assert_dropout_agrees(fast.tra_blocked, [x.double() for x in make_inputs(45, 64)], monkeypatch)


def test_no_tensor_grows_with_the_square_of_the_length():
    """TRA forward and backward, CoPE forward, each with two heads."""
    q, k, v, f = make_inputs(1024, 1024)
    with torch.profiler.profile(profile_memory=True) as profile:
        output_and_gradients(tra_attention, (q, k, v, f), True, True, 0.1)
        cope_attention(q, k, v, torch.randn(16, 16))
    largest = max(event.self_cpu_memory_usage for event in profile.events())        # in bytes
    assert largest <= 2 * 1024 * 1024 * 4 / 2


# -----------------------------------------------------------------------------
# Which form is taken


@pytest.mark.parametrize("device, longest_plain", [("cpu", 127), ("mps", 127), ("cuda", 1023)])
def test_only_long_sequences_take_another_form(monkeypatch, device, longest_plain):
    monkeypatch.setattr("model.tra_plain", lambda *args: ("plain", *args[4:]))
    monkeypatch.setattr(fast, "tra_for_long_sequences", lambda device: lambda *args: (f"for {device}", *args[4:]))
    for T, form in ((longest_plain, "plain"), (longest_plain + 1, f"for {device}")):
        q = SimpleNamespace(size=lambda dim: T, is_cuda=device == "cuda", device=device)
        assert tra_attention(q, None, None, None, False, True, 0.1) == (form, False, True, 0.1)


# The choice is remembered for each device, so every case has one of its own.
@pytest.mark.parametrize("device, capability, error, form", [
    ("cpu", None, None, "tra_blocked"), ("mps", None, None, "tra_blocked"), ("cuda:1", (7, 5), None, "tra_blocked"),
    ("cuda:2", (8, 0), None, "tra_fused"), ("cuda:3", (8, 0), RuntimeError("off by 1"), "tra_blocked")])
def test_the_kernel_is_taken_if_it_agrees_else_blocks_with_one_warning(
        monkeypatch, recwarn, device, capability, error, form):
    kernel = SimpleNamespace(check_against_plain_form=Mock(side_effect=error), tra_fused=Mock(__name__="tra_fused"))
    monkeypatch.setitem(sys.modules, "extras.kernel", kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for _ in range(2):
        assert fast.tra_for_long_sequences(torch.device(device)).__name__ == form
    assert kernel.check_against_plain_form.call_count == (1 if capability == (8, 0) else 0)
    assert ["off by 1" in str(warning.message) for warning in recwarn] == ([True] if error else [])
