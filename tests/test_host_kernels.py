"""Products of the CPU plugin that run on PyTorch's kernels, or as a loop; and that nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch

import torch_tpu.lowering.rules  # noqa: F401  (fills the rule table)
from torch_tpu.ir.builder import Builder
from torch_tpu.ir.types import TensorType
from torch_tpu.lowering import host
from torch_tpu.lowering.driver import lower_node
from torch_tpu.lowering.registry import GlobalState

aten = torch.ops.aten
CALL = "torch_tpu_product"


def text_of(op, shapes, dtype=torch.float32, rest=(), **state: bool) -> str:
    """StableHLO of ``op`` on tensors of ``shapes`` and the ``rest`` of its arguments."""
    b = Builder()
    args = [*(b.arg(TensorType(s, dtype)) for s in shapes), *rest]
    result = op(*(torch.empty(s, dtype=dtype, device="meta") for s in shapes), *rest)
    outs = lower_node(b, op, [TensorType.of(result)], args, {}, state=GlobalState(**state))
    return b.module("product", [o for o in outs if o is not None])


LARGE = (512, 256), (256, 128)


def test_large_products_are_calls():
    assert CALL in text_of(aten.mm.default, LARGE, host_kernels=True)
    assert CALL in text_of(aten.addmm.default, ((128,), *LARGE), host_kernels=True)
    assert CALL in text_of(aten.mm.default, LARGE, torch.float64, host_kernels=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float16])
def test_other_dtypes_are_not(dtype):
    assert CALL not in text_of(aten.mm.default, LARGE, dtype, host_kernels=True)


def test_small_products_are_not():
    assert CALL not in text_of(aten.mm.default, ((64, 32), (32, 16)), host_kernels=True)
    tiny = text_of(aten.mm.default, ((8, 8), (8, 8)), host_kernels=True)
    assert "dot_general" not in tiny
    assert CALL not in tiny


def test_portable_programs_have_neither():
    assert "dot_general" in text_of(aten.mm.default, LARGE)
    assert "dot_general" in text_of(aten.mm.default, ((8, 8), (8, 8)))


# At least host._MIN_FLOPS each.
SHAPES: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(200, 300), (300, 100)]),
    "transposed": (lambda x, y: x.t() @ y.t(), [(300, 200), (100, 300)]),
    "bias": (torch.nn.functional.linear, [(200, 300), (100, 300), (100,)]),
    "bias of one row": (torch.addmm, [(1, 100), (200, 300), (300, 100)]),
    "bias of one element": (torch.addmm, [(1, 1), (200, 300), (300, 100)]),
    "scaled": (lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), [(100,), (200, 300), (300, 100)]),
    "bmm": (torch.bmm, [(4, 120, 100), (4, 100, 110)]),
    "batched bias": (torch.baddbmm, [(4, 1, 110), (4, 120, 100), (4, 100, 110)]),
    "several dims": (lambda x, y: torch.einsum("bhqd,bkhd->bhqk", x, y), [(2, 3, 90, 100), (2, 95, 3, 100)]),
    "contracted pair": (lambda x, y: torch.tensordot(x, y, dims=2), [(100, 20, 30), (20, 30, 90)]),
    "sum of products": (torch.addbmm, [(120, 110), (4, 120, 100), (4, 100, 110)]),
    "window": (lambda x, y: x[10:, ::2] @ y, [(210, 600), (300, 100)]),
    "vector": (torch.mv, [(2100, 2000), (2000,)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_calls_compute_what_the_cpu_does(name, dtype):
    fn, shapes = SHAPES[name]
    gen = torch.Generator().manual_seed(0)
    args = [torch.randn(s, generator=gen).to(dtype) for s in shapes]
    # The kernels are the same, but XLA may hand them other strides: sums of up to 2000 terms in another order.
    rtol, atol = {torch.float32: (1e-5, 1e-4), torch.float64: (1e-12, 1e-11), torch.bfloat16: (2e-2, 0.5)}[dtype]
    with mock.patch.object(
        host, "_least_flops", return_value=dict.fromkeys((torch.float32, torch.float64, torch.bfloat16), 0)
    ):
        actual = fn(*(a.to("tpu") for a in args)).cpu()
    torch.testing.assert_close(actual, fn(*args), rtol=rtol, atol=atol)


def test_nan_and_inf_pass():
    x = torch.eye(300)
    x[3, 3], x[4, 4] = torch.nan, torch.inf
    y = torch.ones(300, 300)
    torch.testing.assert_close((x.to("tpu") @ y.to("tpu")).cpu(), x @ y, equal_nan=True, rtol=0, atol=0)


def test_gradients_through_a_call():
    x, w = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)), torch.ones(100, 300)
    grads = []
    for device in ("cpu", "tpu"):
        leaves = [t.to(device).detach().requires_grad_() for t in (x, w)]
        torch.nn.functional.linear(*leaves).square().sum().backward()
        grads.append([t.grad.cpu() for t in leaves])
    for actual, expected in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)  # sums of 200 terms of up to 1e3


def test_the_setting_turns_them_off(run_program, tmp_path):
    program = "import torch; x = torch.ones(300, 300, device='tpu'); print((x @ x)[0, 0].item())"
    for value in ("0", "1"):
        folder = tmp_path / value
        out = run_program(program, TORCH_TPU_HOST_KERNELS=value, TORCH_TPU_DUMP_DIR=str(folder), TORCH_TPU_CACHE="0")
        assert out.strip() == "300.0"
        assert (CALL in "".join(p.read_text() for p in folder.glob("*.mlir"))) == (value == "1")


DEPTHWISE = [  # weight, input, stride, padding, dilation
    ((4, 1, 3), (2, 4, 9), [1], [1], [1]),
    ((4, 1, 3, 2), (2, 4, 9, 7), [1, 1], [1, 0], [1, 1]),
    ((8, 1, 3, 3), (2, 4, 9, 7), [2, 1], [1, 1], [1, 2]),
    ((4, 1, 2, 2), (1, 4, 6, 6), [3, 2], [0, 1], [2, 1]),
    ((6, 1, 2, 3, 1), (2, 3, 4, 5, 3), [1, 2, 1], [0, 1, 0], [1, 1, 1]),
]


@pytest.mark.parametrize(("weight", "shape", "stride", "padding", "dilation"), DEPTHWISE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_depthwise_convolutions_and_their_gradients(weight, shape, stride, padding, dilation, dtype):
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=g).to(dtype) for s in (shape, weight))

    def run(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = x.requires_grad_(), w.requires_grad_()
        n = len(stride)
        y = torch.ops.aten.convolution(x, w, None, stride, padding, dilation, False, [0] * n, shape[1])
        return y, *torch.autograd.grad(y.square().sum(), (x, w))

    got, want = run(x.to("tpu"), w.to("tpu")), run(x.double(), w.double())
    # Results and gradients are sums of some tens of products, rounded to dtype; y is rounded before its gradient.
    eps = torch.finfo(dtype).eps
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=16 * eps, atol=64 * eps * max(b.abs().max().item(), 1))


def test_depthwise_convolutions_are_sums_of_slices_here():
    shapes, rest = ((2, 4, 9, 7), (4, 1, 3, 3)), (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 4)
    texts = [text_of(aten.convolution.default, shapes, rest=rest, host_kernels=here) for here in (True, False)]
    assert ["stablehlo.convolution" in text for text in texts] == [False, True]
