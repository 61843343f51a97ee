"""The Triton row kernels without a GPU: correct under the interpreter, and compiled for three GPU generations without register spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_worker import CASES, compare

from rlx.kernels.logprob import choose_backend, logprob
from rlx.kernels.reference import logprob_reference
from rlx.kernels.toolchain import OF_SERVER, check_triton

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
WORKER = Path(__file__).parent / "triton_worker.py"
POINTERS = {
    "x_ptr": "*fp32", "maximum_ptr": "*fp32", "total_ptr": "*fp32", "weighted_ptr": "*fp32", "target_ptr": "*fp32", "labels_ptr": "*i64",
    "inverse_temperature_ptr": "*fp32", "mean_ptr": "*fp32", "c_ptr": "*fp32", "out_ptr": "*bf16",
}  # fmt: skip
NUMBERS = {"num_columns": "i32", "scale": "fp32", "softcap": "fp32"}
OPTIONAL = {"bias_ptr": "*bf16", "weights_ptr": "*bf16", "shrink_ptr": "*fp32", "e_ptr": "*fp32"}


def test_interpreted_kernels_are_within_1e_5_of_float64_on_odd_shapes():
    done = subprocess.run([sys.executable, str(WORKER)], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    assert len(differences) == len(CASES) + 2
    assert {case: difference for case, difference in differences if not difference <= 1e-5} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_kernels_on_a_device_are_within_1e_5_of_float64(case):
    try:
        assert compare(*case, device="cuda") <= 1e-5
    finally:
        torch.set_default_device(None)


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_bfloat16_on_a_device_is_good_to_its_own_rounding(frozen, with_bias):
    """Default tiles: two along the tokens, five along the vocabulary. Not run yet, because no device was available."""
    n, d, v = 8192 + 100, 256, 20_000
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    hidden, head, bias = (t.bfloat16() for t in (normal(n, d), 1.4 * d**-0.5 * normal(v, d), 0.5 * normal(v)))
    labels = torch.randint(0, v, (n,), generator=generator, device="cuda")
    temperature = torch.rand(n, generator=generator, device="cuda") + 0.5
    weights = normal(2, n)
    assert choose_backend("auto", hidden.device, hidden.dtype, v) == "triton"
    results = []
    for function, dtype in ((logprob, torch.bfloat16), (logprob_reference, torch.float64)):
        learned = [t.to(dtype).requires_grad_(i == 0 or not frozen) for i, t in enumerate((hidden, head, bias))]
        logp, entropy = function(
            *learned[:2], labels, temperature.to(torch.promote_types(dtype, torch.float32)), bias=learned[2] if with_bias else None
        )
        loss = (weights[0] * logp).sum() if frozen else (weights[0] * logp + 0.3 * weights[1] * entropy).sum()
        gradients = torch.autograd.grad(loss, learned[: 1 if frozen else 3 if with_bias else 2])
        results.append([logp.detach().double(), entropy.detach().double(), *(g.double() for g in gradients)])
        del logp, entropy, loss, gradients
    (logp, entropy, *gradients), (true_logp, true_entropy, *true_gradients) = results
    assert (logp - true_logp).abs().max() <= 1e-5
    assert (entropy - true_entropy).abs().max() <= 1e-5
    for found, wanted in zip(gradients, true_gradients, strict=True):
        assert (found - wanted).norm() / wanted.norm() <= 3e-3


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("options", [False, True], ids=["plain", "all options"])
def test_kernels_compile_without_spills(capability, options, tmp_path, monkeypatch):
    from triton import knobs

    from rlx.kernels import rows_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    flags = {"HAS_BIAS": options, "HAS_SOFTCAP": options, "HAS_WEIGHTS": options, "HAS_E": options, "BLOCK": rows_triton.BLOCK}
    values = POINTERS | NUMBERS | (OPTIONAL if options else dict.fromkeys(OPTIONAL)) | flags
    for kernel in (rows_triton.absorb_kernel, rows_triton.gradient_kernel):
        path = tmp_path / f"{kernel.__name__}.cubin"
        path.write_bytes(compile_kernel(kernel, values, capability, rows_triton.NUM_WARPS))
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "STACK:0 " in usage, usage
        assert "LOCAL:0 " in usage, usage


def compile_kernel(kernel: Any, values: dict[str, Any], capability: int, num_warps: int) -> bytes:
    """The compiled kernel's machine code. `values` has a type for each run-time argument and a value for each constant."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    own = {name: values[name] for name in kernel.arg_names}
    source = ASTSource(
        fn=kernel,
        signature={name: value if isinstance(value, str) else "constexpr" for name, value in own.items()},
        constexprs={(i,): value for i, value in enumerate(own.values()) if not isinstance(value, str)},
        attrs={(i,): [["tt.divisibility", 16]] for i, value in enumerate(own.values()) if isinstance(value, str) and value[0] == "*"},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps}).asm["cubin"]


def build_a_module(folder: Path) -> None:
    """Call Triton's own function that builds its C parts, with an empty cache."""
    from triton import knobs
    from triton.runtime.build import compile_module_from_src

    source = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "small", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_small(void) { return PyModule_Create(&module); }
"""
    with knobs.cache.scope():
        knobs.cache.dir = str(folder)
        compile_module_from_src(source, "small")


def test_a_machine_that_can_build_what_triton_needs_passes(tmp_path):
    check_triton(lambda: build_a_module(tmp_path))


def test_a_missing_compiler_and_missing_headers_are_named_with_what_to_do(tmp_path, monkeypatch):
    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message + r".*model\.logprob_backend=torch"):
            check_triton(lambda: build_a_module(tmp_path))

    with monkeypatch.context() as changed:
        changed.setenv("CC", "/nowhere/cc")
        refused("CC is `/nowhere/cc`, but there is no such program")
        changed.delenv("CC")
        changed.setenv("PATH", str(tmp_path))
        refused("neither gcc nor clang is on PATH; install one")
    with monkeypatch.context() as changed:
        changed.setattr("sysconfig.get_paths", lambda **_: {"include": str(tmp_path)})
        refused(f"it needs Python's headers, but there is no {tmp_path}/Python.h; install them")
    with pytest.raises(ValueError, match="RuntimeError: the driver is too old"):
        check_triton(fails_by_the_driver)
    with pytest.raises(ValueError, match=r"the driver is too old; vLLM needs it$"):
        check_triton(fails_by_the_driver, OF_SERVER)


def fails_by_the_driver() -> None:
    raise RuntimeError("the driver is too old")


@pytest.mark.gpu
def test_a_small_kernel_is_compiled_and_launched_on_a_device():
    check_triton()
