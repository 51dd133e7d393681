"""
The fused kernel against tra_plain in float64, in Triton's interpreter on a CPU; and it must compile for three GPUs.

    pytest extras/test_kernel.py
    python -m extras.test_kernel            # registers and spills of every kernel
"""

import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
if __name__ != "__main__":
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported before its interpreter was asked for", allow_module_level=True)
    # Triton reads this when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton", reason="the fused kernel needs Triton: pip install triton")

import triton

from extras import kernel
from extras.test_fast import (ABLATIONS, CASES, assert_agrees, assert_dropout_is_the_same_in_both_passes, make_inputs,
                              output_and_gradients)
from model import tra_plain

# Rows that keep nothing have log(0), and the random numbers of dropout overflow by design.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch):
    """The interpreter's time goes by blocks, so let float32 have the large ones too. Few rows at a time in backward."""
    monkeypatch.setattr(kernel, "block_sizes", lambda dtype, width: (64, 32))
    monkeypatch.setattr(kernel, "COUNTS_PER_KEY", 2)


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_equals_the_plain_form(case):
    # Logits in the thousands keep three decimals in float32.
    assert_agrees(kernel.tra_fused, CASES[case], tolerance=2e-3 if "norm 30" in case else 1e-5)


@pytest.mark.parametrize("ablation", ABLATIONS[1:])
def test_ablations(ablation):
    assert_agrees(kernel.tra_fused, make_inputs(75, 100), *ablation)


def test_small_blocks_and_head_widths_that_are_no_power_of_two(monkeypatch):
    assert_agrees(kernel.tra_fused, make_inputs(50, 70, D=20))
    monkeypatch.setattr(kernel, "block_sizes", lambda dtype, width: (16, 16))
    assert_agrees(kernel.tra_fused, make_inputs(30, 40, D=3))
    with pytest.raises(ValueError, match="128"):
        kernel.tra_fused(*make_inputs(4, 4, D=130))


def test_early_exit_does_not_read_what_is_forgotten():
    q, k, v, f = make_inputs(300, 300, gate=-3.0)
    want = tra_plain(q, k, v, f)
    v[:, :, :64] = torch.nan
    got, dq, *_ = output_and_gradients(kernel.tra_fused, (q, k, v, f))
    assert (got[:, :, 256:] - want[:, :, 256:]).abs().max() <= 1e-5
    assert dq[:, :, 256:].isfinite().all()


def test_float16_and_the_mixed_dtypes_of_autocast():
    q, k, v, f = make_inputs(100, 130, D=32)
    # Scores must not change their sign when q and k take the dtype of v.
    q, k = q.half().float(), k.half().float()
    got = assert_agrees(kernel.tra_fused, (q, k, v.half(), f), tolerance=3e-3)
    assert [x.dtype for x in got] == [torch.float16, torch.float32, torch.float32, torch.float16, torch.float32]


def test_dropout():
    inputs = make_inputs(60, 64, D=64, gate=-0.1)
    assert_dropout_is_the_same_in_both_passes(kernel.tra_fused, inputs, True, True)


def test_memory_is_linear_in_the_length(monkeypatch):
    monkeypatch.undo()
    sizes = []

    class Launch:
        def __getitem__(self, grid):
            return lambda *args, **options: sizes.extend(x.numel() for x in args if isinstance(x, torch.Tensor))

    for name in ("forward_kernel", "backward_q_kernel", "backward_k_kernel"):
        monkeypatch.setattr(kernel, name, Launch())
    for T in (4096, 65536):
        sizes.clear()
        output_and_gradients(kernel.tra_fused, make_inputs(T, T))
        # Two heads. Nothing else is as large as the table of counts.
        assert max(sizes) == 2 * 64 * T


def test_check_passes_without_gradients_and_draws_no_random_numbers():
    before = torch.get_rng_state()
    with torch.inference_mode():
        kernel.check_against_plain_form(CPU)
    assert torch.equal(before, torch.get_rng_state())


def scale_gradient(x):
    return x + 0.01 * (x - x.detach())


@pytest.mark.parametrize("wrong", [
    lambda q, k, v, f: 1.001 * tra_plain(q, k, v, f),
    lambda q, k, v, f: torch.nan * tra_plain(q, k, v, f),
    lambda q, k, v, f: tra_plain(q + 1e-3, k, v, f),
    lambda q, k, v, f: tra_plain(scale_gradient(q), k, v, f),
    lambda q, k, v, f: tra_plain(q, scale_gradient(k), v, f),
    lambda q, k, v, f: tra_plain(q, k, scale_gradient(v), f),
    lambda q, k, v, f: tra_plain(q, k, v, scale_gradient(f))])
def test_check_raises_when_the_kernel_is_wrong(monkeypatch, wrong):
    monkeypatch.setattr(kernel, "tra_fused", wrong)
    with pytest.raises(RuntimeError, match="is off by"):
        kernel.check_against_plain_form(CPU)


# -----------------------------------------------------------------------------
# Compiling without a GPU


def compile_for(function, capability, dtype, dropout_p):
    """Registers, and bytes that spill from them in each thread, from the binary for a GPU."""
    BM, BN = kernel.block_sizes({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], 64)
    constants = {"P": dropout_p, "D": 64, "BM": BM, "BN": BN}
    types = dict.fromkeys(("Q", "K", "V", "OUT", "DOUT", "DQ"), f"*{dtype}") | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("seed", "T", "S", "part", "rows"), "i32") | {"LOW": "*i32", "scale": "fp32"}
    types |= {"sparse": "u1", "contextual": "u1"}
    signature = {name: types.get(name, "*fp32") for name in function.arg_names}
    # Pointers and lengths are multiples of 16 at every launch, and Triton makes use of it.
    attributes = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(function.arg_names)
                  if signature[name][0] == "*" or name in ("T", "S", "part", "rows")}
    source = triton.compiler.ASTSource(function, signature, constants, attributes)
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    binary = triton.compile(source, target=target, options={"maxnreg": kernel.REGISTERS}).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage).groups()
    return int(registers), int(stack) + int(local)


def test_every_kernel_compiles_for_three_gpus_without_spilling():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "extras.test_kernel"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(" 0 bytes spilled") == 36, run.stdout


if __name__ == "__main__":
    names = ("forward_kernel", "backward_q_kernel", "backward_k_kernel")
    for capability, name, dtype, dropout_p in itertools.product((80, 86, 90), names, ("bf16", "fp32"), (0.0, 0.1)):
        registers, spilled = compile_for(getattr(kernel, name), capability, dtype, dropout_p)
        print(f"sm_{capability} {name:17s} {dtype} dropout {dropout_p}: {registers} registers, "
              f"{spilled} bytes spilled", flush=True)
