"""Gradients come from PyTorch's own formulas: the same as on the CPU, whatever moves or shares the tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

nn = torch.nn


def assert_same(got, want) -> None:
    torch.testing.assert_close(got, want, check_device=False, atol=1e-5, rtol=1e-5)


def on_both(run: Callable[[torch.device], object]) -> None:
    """Run it on the device and on the CPU, from the same seed, and compare what it returns."""
    results = []
    for device in ("tpu", "cpu"):
        torch.manual_seed(0)
        results.append(run(torch.device(device)))
    assert_same(*results)


class Tied(nn.Module):
    """A language model of one layer whose output weights are its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


# ---- gradients


def test_backward():
    def run(device):
        x, w, b = (torch.randn(s).to(device).requires_grad_() for s in ((4, 3), (3, 2), (2,)))
        loss = (torch.tanh(x @ w + b).square().mean(0).exp() / (1 + x.abs().sum())).sum()
        loss.backward()
        return loss.detach(), x.grad, w.grad, b.grad

    on_both(run)


def test_views_and_writes():
    def run(device):
        x = torch.randn(3, 4).to(device).requires_grad_()
        y = x * 2
        y[1] = x[0] * x[2]
        y.t()[2].mul_(3)
        z = torch.zeros_like(y)
        z[:, 1:3] = y[:, ::2]
        z.view(-1)[5:].add_(y.flatten()[:7])
        z.pow(2).sum().backward()
        return z.detach(), x.grad

    on_both(run)


def test_gradients_accumulate_and_go():
    x = torch.ones(2, device="tpu", requires_grad=True)
    for n in (1, 2):
        (x * 3).sum().backward()
        assert x.grad.tolist() == [3 * n, 3 * n]
    optimizer = torch.optim.SGD([x], lr=1)
    optimizer.zero_grad(set_to_none=False)
    assert x.grad.tolist() == [0, 0]
    optimizer.zero_grad()
    assert x.grad is None


def test_double_backward():
    def run(device):
        x = torch.randn(4).to(device).requires_grad_()
        (grad,) = torch.autograd.grad((x**3 * x.sin()).sum(), x, create_graph=True)
        (twice,) = torch.autograd.grad(grad.square().sum(), x, create_graph=True)
        twice.sum().backward()
        return grad.detach(), twice.detach(), x.grad

    on_both(run)


def test_gradcheck():
    x = torch.randn(2, 3, dtype=torch.float64).tpu().requires_grad_()
    w = torch.randn(3, 2, dtype=torch.float64).tpu().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: torch.softmax(x @ w, -1).tanh(), (x, w))
    assert torch.autograd.gradgradcheck(lambda x: x.sigmoid(), (x,))


def test_hooks():
    order = []
    x = torch.ones(2, device="tpu", requires_grad=True)
    y = x * 3
    x.register_hook(lambda g: order.append(("leaf", g.tolist())))
    y.register_hook(lambda g: g * 10)
    x.register_post_accumulate_grad_hook(lambda p: order.append(("after", p.grad.tolist())))
    module = nn.Identity()
    module.register_full_backward_hook(lambda m, gi, go: order.append(("module", go[0].device.type)))
    module(y).sum().backward()
    assert order == [("module", "tpu"), ("leaf", [30, 30]), ("after", [30, 30])]


def test_custom_function():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 3 * x**2

    def run(device):
        x = torch.randn(3).to(device).requires_grad_()
        Cube.apply(x).sum().backward()
        return x.grad

    on_both(run)


def test_the_graph_may_cross_devices():
    x = torch.arange(3.0, requires_grad=True)
    y = (x.to("tpu:0") * 2).to("tpu:1") * torch.arange(3.0, device="tpu:1")
    y.cpu().sum().backward()
    assert x.grad.tolist() == [0, 2, 4]
    a, b = (torch.ones(2, device=f"tpu:{i}", requires_grad=True) for i in (0, 1))
    ((a * 2).to("tpu:1") + b).sum().backward()
    assert (a.grad.device, b.grad.device) == (a.device, b.device)
    assert (a.grad.tolist(), b.grad.tolist()) == ([2, 2], [1, 1])


def test_saved_tensors_may_wait_on_the_host():
    x = torch.ones(3, device="tpu", requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = x.exp().sum()
    loss.backward()
    assert_same(x.grad, torch.ones(3).exp())


def test_a_write_to_a_saved_tensor_is_noticed():
    x = torch.ones(2, device="tpu", requires_grad=True)
    y = x * 1
    loss = y.square().sum()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.add_(1)


def test_no_grad_and_inference_mode():
    x = torch.ones(2, device="tpu", requires_grad=True)
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        y = x * 2
    assert y.is_inference()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        (y * x).sum()


def test_backward_from_many_threads():
    results = []

    def run(n: int) -> None:
        for _ in range(5):
            x = torch.full((4,), float(n), device=f"tpu:{n % 2}", requires_grad=True)
            (x**2).sum().backward()
            results.append(x.grad.tolist() == [2.0 * n] * 4)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 20


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in forward mode
def test_functional_transforms():
    def run(device):
        x, v = torch.randn(4).to(device), torch.randn(4).to(device)

        def f(t):
            return (t.sin() * t).sum()

        return (
            torch.func.grad(f)(x),
            torch.func.jvp(f, (x,), (v,))[1],
            torch.func.vmap(torch.func.grad(f))(torch.stack([x, v])),
            torch.func.jacrev(torch.tanh)(x),
        )

    on_both(run)


# ---- checkpoint


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_draws_the_same_numbers_again(reentrant):
    def block(t):
        return nn.functional.dropout(t.tanh() * torch.rand_like(t), 0.5)

    x = torch.randn(8, 8).tpu()
    grads, states = [], []
    for wrap in (lambda t: block(t), lambda t: checkpoint(block, t, use_reentrant=reentrant)):
        torch.manual_seed(4)
        leaf = x.clone().requires_grad_()
        wrap(leaf).sum().backward()
        grads.append(leaf.grad)
        states.append(torch.tpu.get_rng_state())
    assert torch.equal(*grads)
    assert torch.equal(*states)


def test_checkpoint_keeps_autocast():
    linear = nn.Linear(4, 4).tpu()
    seen = []

    def block(t):
        seen.append(torch.is_autocast_enabled("tpu"))
        return linear(t)

    with torch.autocast("tpu"):
        loss = checkpoint(block, torch.ones(2, 4, device="tpu"), use_reentrant=False).float().sum()
    loss.backward()
    assert seen == [True, True]
    assert linear.weight.grad.dtype == torch.float32


# ---- modules that move


def test_ties_survive_a_move():
    model = Tied()
    parameters = list(model.parameters())
    for device in ("tpu", "tpu:1", "cpu", "tpu"):
        assert model.to(device) is model
        assert list(map(id, model.parameters())) == list(map(id, parameters))
        assert model.head.weight is model.embedding.weight
        assert model.head.weight.device == torch.empty(0, device=device).device
        assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()


def test_gradients_and_their_hooks_survive_a_move():
    linear = nn.Linear(2, 2)
    seen = []
    linear.weight.register_hook(lambda g: seen.append(g.device.type))
    linear(torch.ones(1, 2)).sum().backward()
    want = linear.weight.grad.clone()
    linear.to("tpu")
    assert linear.weight.grad.is_tpu
    assert_same(linear.weight.grad, want)
    linear(torch.ones(1, 2, device="tpu")).sum().backward()
    assert_same(linear.weight.grad, want * 2)
    assert seen == ["cpu", "tpu"]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.AdamW(p, lr=0.05),
        lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False),
        lambda p: torch.optim.RMSprop(p, lr=0.02),
    ],
    ids=["sgd", "adamw", "adamw single", "rmsprop"],
)
def test_an_optimizer_made_before_the_move_trains_the_module(make):
    def run(device):
        model = Tied()
        optimizer = make(model.parameters())
        model.to(device)
        tokens = torch.tensor([1, 4, 2, 6]).to(device)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        return losses, model.head.weight.detach(), model.embedding.weight.detach()

    on_both(run)


def test_to_empty_and_meta():
    with torch.device("meta"):
        model = Tied()
    model.to_empty(device="tpu")
    model.load_state_dict(Tied().state_dict())
    assert model.head.weight.is_tpu
    assert model(torch.tensor([0, 1], device="tpu")).shape == (2, 7)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.BatchNorm1d(3), (4, 3)),
        (lambda: nn.BatchNorm1d(3, momentum=None), (4, 3, 5)),
        (lambda: nn.BatchNorm2d(3, affine=False), (2, 3, 4, 4)),
        (lambda: nn.BatchNorm2d(3, track_running_stats=False), (2, 3, 4, 4)),
    ],
    ids=["1d", "cumulative", "2d without weights", "2d without statistics"],
)
def test_batch_norm_statistics(make, shape):
    def run(device):
        norm = make()
        if norm.affine:
            nn.init.uniform_(norm.weight)
        norm.to(device)
        x = [torch.randn(shape).to(device).requires_grad_() for _ in range(3)]
        outs = [norm(x[0]), norm(x[1] * 3 + 1)]
        norm.eval()
        outs.append(norm(x[2]))
        sum(o.square().sum() for o in outs).backward()
        return (
            [o.detach() for o in outs],
            [t.grad for t in x],
            dict(norm.state_dict()),
            [p.grad for p in norm.parameters()],
        )

    on_both(run)
