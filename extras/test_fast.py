"""TRA in blocks against its plain form, in output and in every gradient. Blocks are small, so that there are many."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from extras import fast
from extras.fast import tra_blocked
from model import GPT, GPTConfig, cope_attention, tra_attention, tra_plain

ABLATIONS = [(True, True), (True, False), (False, True), (False, False)]
GATES = {"none": 0.0, "faint": -1e-6, "strong": -30.0, "absurd": -1e4, "not forgetting": 0.2}
torch.set_num_threads(1)


def case(T, S, B=2, H=2, D=4, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, n, D, generator=g, dtype=torch.float64) for n in (T, S, S))
    f = F.logsigmoid(torch.randn(B, H, T, generator=g, dtype=torch.float64))
    return [x.to(dtype) for x in (F.rms_norm(q, (D,)), F.rms_norm(k, (D,)), v, f)]


def exact_case(T, H=2):
    """q and k of -1, 0, 1 with D 16: scores are multiples of 1/4, many of them 0, and exact in any precision."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-1, 2, (1, H, T, 16), generator=g).float() for _ in range(2))
    return q, k, torch.randn(1, H, T, 8, generator=g)


def compare_forms(q, k, v, f, sparse=True, contextual=True):
    """The blocked form's output, after comparing it and all four gradients with the plain form's."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, f)]
    want, got = tra_plain(*leaves, sparse, contextual), tra_blocked(*leaves, sparse, contextual)
    torch.testing.assert_close(got, want)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
    gradients = (torch.autograd.grad(out, leaves, weight) for out in (got, want))
    for name, a, b in zip("qkvf", *gradients):
        assert a.isfinite().all(), name
        torch.testing.assert_close(a, b, msg=lambda text: f"gradient of {name}: {text}")
    return got.detach()


@pytest.fixture
def visits(monkeypatch):
    """A list that receives, for each walk (forward, then backward), the number of blocks that it visits."""
    visits, real = [], fast.walk

    def walk(*args):
        visits.append(0)
        for item in real(*args):
            visits[-1] += len(item[0])
            yield item

    monkeypatch.setattr(fast, "walk", walk)
    return visits


@pytest.mark.parametrize("T, S", [(40, 40), (37, 37), (100, 100), (21, 50), (9, 64), (1, 30), (1, 1)])
@pytest.mark.parametrize("sparse, contextual", ABLATIONS)
def test_blocks_equal_the_plain_form(monkeypatch, sparse, contextual, T, S):
    monkeypatch.setattr(fast, "BLOCK", 8)
    q, k, v, f = case(T, S, H=3)
    compare_forms(q, k, v, f, sparse, contextual)
    compare_forms(q[:1, :1], k[:1, :1], v[:1, :1, :, :1], 4 * f[:1, :1], sparse, contextual)    # narrower values


@pytest.mark.parametrize("scale", [1, 0.01, 30], ids=lambda scale: f"norms times {scale}")
@pytest.mark.parametrize("gate", [*GATES, "by head", "by query"])
def test_blocks_equal_the_plain_form_for_extreme_gates_and_norms(monkeypatch, gate, scale):
    """The bound comes from the norms of q and k, so that it holds whether they are normalised or not."""
    monkeypatch.setattr(fast, "BLOCK", 8)
    q, k, v, f = case(43, 61)
    f = torch.full_like(f, GATES.get(gate, 0.0))
    if gate == "by head":
        f[:, 1] = -20.0
    if gate == "by query":
        f[..., ::3] = -20.0
    older_are_longer = torch.linspace(2, 0.1, 61, dtype=k.dtype)[:, None]
    for sparse, contextual in ABLATIONS:
        compare_forms(scale * q, scale * k * older_are_longer, v, f, sparse, contextual)


def test_blocks_walk_on_to_the_only_kept_key_and_give_zero_without_one(monkeypatch, visits):
    """Strong gates everywhere: most queries are done at once, but 28 to 30 have to search to the very start."""
    monkeypatch.setattr(fast, "BLOCK", 8)
    q, k, v, f = case(40, 40)
    f = torch.full_like(f, -25.0)
    k[..., 2:] = -k[..., 2:].abs() - 0.1
    k[:, :, 0, 3] = 0.5
    q[:, :, 28] = torch.tensor([0.0, 0.0, 0.0, 2.0])        # keeps key 0 only
    q[:, :, 29] = torch.tensor([0.0, 0.0, 2.0, 0.0])        # keeps nothing
    q[:, :, 30] = 0.0                                       # keeps nothing, as 0 is not above 0
    for contextual in (True, False):
        out = compare_forms(q, k, v, f, True, contextual)
        torch.testing.assert_close(out[:, :, 28], v[:, :, 0])
        assert torch.equal(out[:, :, 29:31], torch.zeros_like(out[:, :, 29:31]))
    assert visits[0] < 4 * (1 + 2 + 3 + 4 + 5)              # no other block of queries goes all the way


@pytest.mark.parametrize("gate", [-0.2, -0.5, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_skipped_keys_are_below_the_resolution_of_the_output(visits, dtype, gate):
    """Against the plain form in float64, at 1,000 tokens and blocks of the real size, with scores of exactly 0."""
    tensors = [*exact_case(1000), torch.full((1, 2, 1000), gate)]
    got, want = tra_attention(*[t.to(dtype) for t in tensors]), tra_plain(*[t.double() for t in tensors])
    assert (got - want).abs().max() < 8 * torch.finfo(dtype).eps * tensors[2].abs().max()
    assert visits[0] < 2 * (16 * 17 / 2)                    # of all blocks of two heads


def test_float32_gradients_of_blocks_match_float64_of_the_plain_form():
    tensors = [*exact_case(400), F.logsigmoid(torch.randn(1, 2, 400, generator=torch.Generator().manual_seed(2)))]
    gradients = []
    for form, dtype in ((tra_blocked, torch.float32), (tra_plain, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        gradients.append(torch.autograd.grad(form(*leaves).square().sum(), leaves))
    for a, b in zip(*gradients):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


def test_forgetting_skips_blocks_and_its_absence_none(visits):
    q, k, v = exact_case(1280)
    one_head = 20 * 21 // 2

    def count_visits(*gates, T=1280):
        visits.clear()
        f = torch.tensor(gates).view(1, 2, 1).repeat(1, 1, T)
        leaves = [t.clone().requires_grad_() for t in (q[:, :, -T:], k, v, f)]
        tra_attention(*leaves).sum().backward()
        assert visits[0] == visits[1]                       # backward visits what forward visited
        return visits[0]

    assert count_visits(0.0, 0.0) == 2 * one_head
    assert count_visits(-0.5, -0.5) <= 2 * 20 * 6
    assert count_visits(-50.0, -50.0, T=300) <= 2 * 5 * 3   # 300 queries are padded to 5 blocks
    assert one_head < count_visits(0.0, -50.0) <= one_head + 20 * 3         # each head by itself


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def test_no_tensor_grows_with_the_square_of_the_length():
    """At 2,048 tokens T x S would be 4 million; TRA forward and backward, CoPE forward."""
    q, k, v = (torch.randn(1, 1, 2048, 8, requires_grad=True) for _ in range(3))
    with LargestTensor() as largest:
        tra_attention(q, k, v, torch.zeros(1, 1, 2048, requires_grad=True), dropout_p=0.1).sum().backward()
    assert largest.elements <= 64 * fast.BLOCK ** 2
    with LargestTensor() as largest, torch.no_grad():
        cope_attention(q, k, v, torch.randn(8, 16))
    assert largest.elements <= 256 * 2048


@pytest.mark.parametrize("sparse, contextual", [(True, True), (False, False)])
def test_dropout_in_blocks_is_the_same_in_both_passes(monkeypatch, sparse, contextual):
    """With v = identity the output is the weights, which shows what was dropped."""
    monkeypatch.setattr(fast, "BLOCK", 8)
    leaves = q, k, v, f = [t.requires_grad_() for t in case(45, 45)]
    identity = torch.eye(45, dtype=q.dtype).expand(2, 2, 45, 45)

    def with_dropout(v):
        torch.manual_seed(5)
        return tra_blocked(q, k, v, f, sparse, contextual, dropout_p=0.3)

    whole = tra_plain(q, k, identity, f, sparse, contextual)
    is_kept = whole.detach() > 1e-9
    mask = (with_dropout(identity) != 0) & is_kept
    assert 0.65 < mask.sum() / is_kept.sum() < 0.75
    got, want = with_dropout(v), (whole * mask / 0.7) @ v
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    assert not torch.equal(got, tra_blocked(q, k, v, f, sparse, contextual, dropout_p=0.3))     # other masks
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
    for a, b in zip(torch.autograd.grad(got, leaves, weight), torch.autograd.grad(want, leaves, weight)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_blocks_under_autocast():
    """Half precision in and out, float32 inside, backward too, and also when backward is called within the autocast."""
    leaves = [t.requires_grad_() for t in case(150, 150, dtype=torch.bfloat16, D=16)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tra_attention(*leaves)
        gradients = torch.autograd.grad(out.float().square().sum(), leaves)
    full = [t.detach().float().requires_grad_() for t in leaves]
    want = tra_plain(*full)
    assert out.dtype == torch.bfloat16 and all(g.dtype == torch.bfloat16 for g in gradients)
    torch.testing.assert_close(out.float(), want, atol=0.03, rtol=0.02)
    for a, b in zip(gradients, torch.autograd.grad(want.square().sum(), full)):
        torch.testing.assert_close(a.float(), b, atol=0.02 * b.abs().max().item(), rtol=0.02)


@pytest.mark.parametrize("chunks", [[200], [150, 1, 1, 48], [3, 197]])
def test_cached_logits_in_blocks_equal_full_logits_of_the_plain_form(monkeypatch, visits, chunks):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=11, n_layer=2, n_head=2, n_embd=16)).double().eval()
    idx = torch.randint(0, 11, (2, 200))
    cache = [{} for _ in model.blocks]
    with torch.no_grad():
        parts = torch.cat([model(part, cache=cache)[0] for part in idx.split(chunks, dim=1)], dim=1)
        assert len(visits) == 2 * sum(length >= 128 for length in chunks)           # two layers
        monkeypatch.setattr(fast, "tra_blocked", tra_plain)
        fast.tra_for_long_sequences.__wrapped__.cache_clear()
        torch.testing.assert_close(parts, model(idx)[0])
    fast.tra_for_long_sequences.__wrapped__.cache_clear()
