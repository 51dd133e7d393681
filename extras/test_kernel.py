"""
The fused kernel against tra_plain in float64, in Triton's interpreter on a CPU; and it must compile for three GPUs.

    TRITON_INTERPRET=0 python -m extras.test_kernel         # registers and spills of every kernel
"""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from extras.test_fast import CASES, assert_agrees, assert_dropout_agrees, make_inputs, output_and_gradients
from model import tra_plain

triton = pytest.importorskip("triton", reason="the fused kernel needs Triton: pip install triton")
from extras import kernel

KERNELS = ("forward_kernel", "backward_q_kernel", "backward_k_kernel")
# Rows that keep nothing have log(0), and the random numbers of dropout overflow by design.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch):
    """The interpreter's time goes by blocks, so let float32 have the large ones too. Few rows at a time in backward."""
    monkeypatch.setattr(kernel, "block_sizes", lambda dtype, width: (64, 32))
    monkeypatch.setattr(kernel, "COUNTS_PER_KEY", 2)


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_equals_the_plain_form(case):
    # Logits in the thousands keep three decimals in float32.
    assert_agrees(kernel.tra_fused, CASES[case], tolerance=2e-3 if "norm 30" in case else 1e-5)


@pytest.mark.parametrize("sparse, contextual, blocks, D", [
    (True, False, (64, 32), 20), (False, True, (16, 16), 3), (False, False, (64, 32), 16)])
def test_ablations_block_sizes_and_widths_that_are_no_power_of_two(monkeypatch, sparse, contextual, blocks, D):
    monkeypatch.setattr(kernel, "block_sizes", lambda dtype, width: blocks)
    assert_agrees(kernel.tra_fused, make_inputs(35, 70, D), sparse, contextual)


def test_early_exit_does_not_read_what_is_forgotten():
    q, k, v, f = make_inputs(100, 300, gate=-3.0)
    v[:, :, :64] = torch.nan
    out, dq, *_ = output_and_gradients(kernel.tra_fused, (q, k, v, f))
    assert out.isfinite().all() and dq.isfinite().all()


def test_float16_and_the_mixed_dtypes_of_autocast():
    q, k, v, f = make_inputs(100, 130, D=32)
    got = assert_agrees(kernel.tra_fused, (q, k, v.half(), f), tolerance=3e-3)
    assert [x.dtype for x in got] == [torch.float16, torch.float32, torch.float32, torch.float16, torch.float32]
    assert_agrees(kernel.tra_fused, make_inputs(4, 70, D=130))          # too wide for the kernel: by blocks


def test_dropout(monkeypatch):
    assert_dropout_agrees(kernel.tra_fused, make_inputs(60, 64, D=64, gate=-0.1), monkeypatch)


def test_memory_is_linear_in_the_length_and_nothing_waits_for_the_gpu(monkeypatch):
    """Tensors on the meta device have no data: a host sync, which asks for it, fails."""
    monkeypatch.undo()
    launched = MagicMock()
    for name in KERNELS:
        monkeypatch.setattr(kernel, name, launched)
    output_and_gradients(kernel.tra_fused, [x.to("meta") for x in make_inputs(65536, 65536)], True, True, 0.1)
    calls = launched.__getitem__.return_value.call_args_list
    # Nothing is larger than the table of counts for two heads.
    assert max(x.numel() for call in calls for x in call.args if isinstance(x, torch.Tensor)) == 2 * 64 * 65536


def test_check_passes_without_gradients_and_draws_no_random_numbers():
    before = torch.get_rng_state()
    with torch.inference_mode():
        # The interpreter gets products in bfloat16 wrong.
        kernel.check_against_plain_form("cpu", half=torch.float16)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("wrong, factor", [(0, 1.01), (1, 1.01), (2, 1.01), (3, 1.01), (4, 1.001), (4, torch.nan)])
def test_check_raises_when_a_gradient_or_the_output_is_wrong(monkeypatch, wrong, factor):
    def attention(*inputs):
        if wrong < 4:
            inputs[wrong].register_hook(lambda gradient: factor * gradient)
        return tra_plain(*inputs) * (factor if wrong == 4 else 1)

    monkeypatch.setattr(kernel, "tra_fused", attention)
    with pytest.raises(RuntimeError, match="is off by"):
        kernel.check_against_plain_form("cpu")


# -----------------------------------------------------------------------------
# Compiling without a GPU


def compile_for(function, capability, dtype, dropout_p):
    """What the binary for a GPU uses. Spilled registers are in STACK and LOCAL; atomics would sum in any order."""
    BM, BN = kernel.block_sizes({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], 64)
    constants = {"P": dropout_p, "D": 64, "BM": BM, "BN": BN}
    lengths = ("T", "S", "part", "rows")
    types = {"LOW": "*i32", "seed": "i32", "scale": "fp32", "sparse": "u1", "contextual": "u1"}
    types |= dict.fromkeys(("Q", "K", "V", "OUT", "DOUT", "DQ"), f"*{dtype}")
    types |= dict.fromkeys(lengths, "i32") | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "*fp32") for name in function.arg_names}
    # Pointers and lengths are multiples of 16 at every launch, and Triton makes use of it.
    attributes = {(n,): [["tt.divisibility", 16]] for n, (name, kind) in enumerate(signature.items())
                  if kind[0] == "*" or name in lengths}
    source = triton.compiler.ASTSource(function, signature, constants, attributes)
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    binary = triton.compile(source, target=target, options={"maxnreg": kernel.REGISTERS})
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [cuobjdump, "--dump-resource-usage", binary.metadata_group[f"{function.__name__}.cubin"]]
    usage = subprocess.run(command, capture_output=True, text=True).stdout
    atomics = re.findall(r"\b(?:atom|red)\.", binary.asm["ptx"])
    return f"{re.search('REG:.*', usage).group()} atomics:{len(atomics)}"


def test_every_kernel_compiles_for_three_gpus_without_spilling():
    run = subprocess.run([sys.executable, "-m", "extras.test_kernel"], capture_output=True, text=True,
                         cwd=Path(__file__).parents[1], env=os.environ | {"TRITON_INTERPRET": "0"})
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"STACK:0 .* LOCAL:0 .* atomics:0\n", run.stdout)) == 36, run.stdout


if __name__ == "__main__":
    for capability, name, *variant in itertools.product((80, 86, 90), KERNELS, ("bf16", "fp32"), (0.0, 0.1)):
        print(f"sm_{capability}", name, *variant, compile_for(getattr(kernel, name), capability, *variant), flush=True)
