"""Sparse COO tensors and jagged nested tensors on the device, against the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def coo(dtype=torch.float32, dense=()):
    """4 x 5 with repeated places, out of order."""
    indices = torch.tensor([[3, 0, 1, 3, 0], [4, 2, 0, 4, 2]])
    values = torch.arange(1, 5 * (2 if dense else 1) + 1).reshape(5, *dense).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (4, 5, *dense))


def same(got, want):
    assert got.device.type == "tpu"
    assert got.layout == want.layout
    got = got.cpu()
    if want.layout == torch.sparse_coo:
        assert got.is_coalesced() == want.is_coalesced()
        torch.testing.assert_close(got._indices(), want._indices())
        torch.testing.assert_close(got._values(), want._values())
        assert got.shape == want.shape
    else:
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("dense", [(), (2,)])
def test_to_the_device_coalesced_and_dense(dtype, dense):
    x = coo(dtype, dense)
    same(x.to("tpu"), x)
    same(x.to("tpu").coalesce(), x.coalesce())
    same(x.to("tpu").to_dense(), x.to_dense())


@pytest.mark.parametrize("dims", [1, 2])
def test_from_dense(dims):
    x = torch.tensor([[0.0, 1, 0], [2, 0, 3], [0, 0, 0]])
    same(x.to("tpu").to_sparse(dims), x.to_sparse(dims))
    same(torch.zeros(2, 3).to("tpu").to_sparse(), torch.zeros(2, 3).to_sparse())


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize(
    "run",
    [
        lambda s, d: s * 2,
        lambda s, d: s / 2,
        lambda s, d: -s,
        lambda s, d: (s * d).to_dense(),
        lambda s, d: (s + s * 3).to_dense(),
        lambda s, d: torch.add(s, s, alpha=2).to_dense(),
        lambda s, d: (s.clone().mul_(3) * s).to_dense(),
        lambda s, d: s.clone().add_(s, alpha=-2).to_dense(),
        lambda s, d: d + s,
        lambda s, d: torch.add(d, s, alpha=3),
        lambda s, d: d.clone().add_(s, alpha=-1),
        lambda s, d: torch.sparse.mm(s, d.t()),
        lambda s, d: s @ d.t(),
        lambda s, d: torch.addmm(torch.ones(4, 4, device=d.device), s, d.t(), beta=0.5, alpha=2),
        lambda s, d: torch.sparse.sum(s),
        lambda s, d: s.sum(),
        lambda s, d: s.sum(1).to_dense(),
        lambda s, d: s.t().to_dense(),
        lambda s, d: d.sparse_mask(s.coalesce()),
        lambda s, d: s.clone().zero_().to_dense(),
        lambda s, d: s.double(),
    ],
)
def test_ops(run, coalesced):
    s, d = coo(), torch.arange(20.0).reshape(4, 5)
    s = s.coalesce() if coalesced else s
    same(run(s.to("tpu"), d.to("tpu")), run(s, d))


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda s: s + torch.ones(4, 5, device="tpu"), "dense \\+ sparse"),
        (lambda s: s + s.t(), "sizes of self and other"),
        (lambda s: s * torch.ones(4, device="tpu"), "sizes of self and other"),
        (lambda s: torch.mm(s, s.to_dense()), "cannot be multiplied"),
        (lambda s: s / s, "zero-dim dense"),
    ],
)
def test_what_cannot_be_done_says_so(run, text):
    with pytest.raises(RuntimeError, match=text):
        run(coo().to("tpu"))


def test_printing_reads_indices_and_values():
    assert "values=tensor([1., 2., 3., 4., 5.])" in repr(coo().to("tpu")).replace("\n", "")
    assert "device='tpu:0', size=(4, 5), nnz=5" in repr(coo().to("tpu"))


def test_gradients_through_sparse_tensors():
    grads = []
    for device in ("cpu", "tpu"):
        x = torch.tensor([[0.0, 1, 0], [2, 0, 3]], device=device, requires_grad=True)
        y = torch.arange(6.0, device=device).reshape(3, 2).requires_grad_()
        (torch.sparse.mm(x.to_sparse(), y).square().sum() + x.to_sparse().sum()).backward()
        grads.append([g.to_dense().cpu() if g.is_sparse else g.cpu() for g in (x.grad, y.grad)])
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.SparseAdam(p, 0.1)])
def test_sparse_gradients_of_an_embedding_train(make):
    torch.manual_seed(0)
    weight = torch.randn(7, 3)
    results = []
    for device in ("cpu", "tpu"):
        layer = nn.Embedding.from_pretrained(weight.clone(), freeze=False, sparse=True).to(device)
        optimizer = make(layer.parameters())
        for step in range(3):
            optimizer.zero_grad()
            index = torch.tensor([[1, 4, 1], [step, 2, 6]], device=device)
            (layer(index) ** 2).sum().backward()
            assert layer.weight.grad.is_sparse
            optimizer.step()
        results.append(layer.weight.detach().cpu())
    torch.testing.assert_close(results[1], results[0])


# ---- jagged


def jagged(device, *, grad=False):
    g = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 8, generator=g).to(device) for n in (2, 5, 1)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, device=device, requires_grad=grad)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: (x * 2 + x).values(),
        lambda x: functional.linear(x, torch.ones(4, 8, device=x.device)).values(),
        lambda x: functional.layer_norm(x, (8,)).values(),
        lambda x: functional.softmax(x, -1).values(),
        lambda x: x.to_padded_tensor(-1.0),
        lambda x: x.sum(-1).values(),
        lambda x: torch.stack([part.sum() for part in x.unbind()]),
        lambda x: functional.gelu(x).mean(-1).values(),
    ],
)
def test_jagged(run):
    torch.testing.assert_close(run(jagged("tpu")).cpu(), run(jagged("cpu")))


def test_jagged_gradients():
    grads = []
    for device in ("cpu", "tpu"):
        x = jagged(device, grad=True)
        functional.gelu(functional.layer_norm(x, (8,))).to_padded_tensor(0.0).square().sum().backward()
        grads.append(x.grad.values().cpu())
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grouped_mm_with_gradients(dtype):
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(6, 16, generator=g), torch.randn(3, 16, 8, generator=g)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)  # the second group is empty
    groups = [(0, 2), (2, 2), (2, 6)]
    x, w = (t.to(dtype).to("tpu").requires_grad_() for t in (a, b))
    out = functional.grouped_mm(x, w, offs=ends.to("tpu"))
    out.square().sum().backward()
    x64, w64 = (t.to(dtype).double().requires_grad_() for t in (a, b))
    want = torch.cat([x64[i:j] @ w64[n] for n, (i, j) in enumerate(groups)])
    want.square().sum().backward()
    assert out.dtype == dtype
    # Inputs, results and their gradients are rounded to dtype once each.
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 32 * torch.finfo(dtype).eps}
    for got, exact in ((out, want), (x.grad, x64.grad), (w.grad, w64.grad)):
        torch.testing.assert_close(got.cpu().double(), exact, **tolerance)
