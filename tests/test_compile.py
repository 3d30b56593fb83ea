"""torch.compile(backend="tpu"): against eager on the device and on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_tpu.errors as errors
from torch_tpu.runtime import extension

# float32 programs are fused differently from single ops; products and sums differ in their last bits.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


# Of torch's own code, on the way through dynamo.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def compiled(fn, **kwargs):
    return torch.compile(fn, backend="tpu", fullgraph=True, **kwargs)


def tensor(*shape: int, **kwargs) -> torch.Tensor:
    return torch.randn(*shape, **kwargs)


def same(fn, *args: torch.Tensor, **kwargs) -> None:
    """``fn`` compiled on the device gives what it gives on the CPU."""
    want = fn(*[a.clone() for a in args])
    got = compiled(fn, **kwargs)(*[a.to("tpu") for a in args])
    torch.testing.assert_close(_cpu(got), want, **TOLERANCE)


def _cpu(x):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), x)


# ---- inference


def test_is_listed() -> None:
    assert "tpu" in torch._dynamo.list_backends()


def test_one_program_one_launch() -> None:
    fn = compiled(lambda x, y: (torch.relu(x @ y).sum(0) + 1.5) * x.mean())
    x, y = tensor(4, 5).to("tpu"), tensor(5, 6).to("tpu")
    before = extension.cache_stats()["misses"]
    fn(x, y)
    assert extension.cache_stats()["misses"] == before + 1
    hits = extension.cache_stats()["hits"]
    fn(x, y)
    assert extension.cache_stats()["hits"] == hits + 1
    assert extension.cache_stats()["misses"] == before + 1


def test_inference() -> None:
    same(lambda x, y: torch.relu(x @ y).sum(0) + 1.5, tensor(4, 5), tensor(5, 6))


def test_inference_mode() -> None:
    with torch.inference_mode():
        same(lambda x: torch.softmax(x, -1), tensor(4, 5))


def test_views_as_inputs() -> None:
    def fn(a, b, c):
        return a + b.sum(0) * c

    base = tensor(6, 8)
    on_device = base.to("tpu")
    views = [lambda t: t[1:4, ::2], lambda t: t.t()[:4, :4].t()[:, :4], lambda t: t[:3, 4:]]
    want = fn(*[v(base) for v in views])
    got = compiled(fn)(*[v(on_device) for v in views])
    torch.testing.assert_close(got.cpu(), want, **TOLERANCE)


def test_a_new_start_compiles_nothing() -> None:
    fn = compiled(lambda x: x * 2)
    base = tensor(6, 8).to("tpu")
    fn(base[1:3])
    before = extension.cache_stats()["misses"]
    torch.testing.assert_close(fn(base[2:4]).cpu(), base.cpu()[2:4] * 2)
    assert extension.cache_stats()["misses"] <= before + 0


def test_result_strides() -> None:
    x = tensor(3, 4, 5).to("tpu")
    got = compiled(lambda x: (x.permute(2, 0, 1) + 1, x.t() if x.dim() == 2 else x.exp()))(x)
    want = x.cpu().permute(2, 0, 1) + 1
    assert got[0].stride() == want.stride()
    torch.testing.assert_close(got[0].cpu(), want)


def test_outputs_that_alias_inputs() -> None:
    def fn(x):
        return x.view(-1), x, x[1:], (x + 1)

    x = tensor(3, 4).to("tpu")
    got = compiled(fn)(x)
    assert got[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert got[1] is x
    got[0].mul_(2)
    torch.testing.assert_close(got[2].cpu(), x.cpu()[1:])


def test_outputs_that_alias_each_other() -> None:
    def fn(x):
        y = x * 2
        return y, y.view(-1), y[1:]

    a, b, c = compiled(fn)(tensor(3, 4).to("tpu"))
    a.zero_()
    assert not b.cpu().any()
    assert not c.cpu().any()


def test_the_same_value_twice() -> None:
    a, b = compiled(lambda x: (x + 1, x + 1))(tensor(3).to("tpu"))
    a.zero_()
    assert b.cpu().any()


def test_scalars_and_none() -> None:
    same(lambda x, y: (x * y, None, 3, x.shape[0]), tensor(3, 4), torch.tensor(2.0))


def test_cpu_scalar_tensor() -> None:
    x = tensor(3).to("tpu")
    torch.testing.assert_close(compiled(lambda x, s: x * s)(x, torch.tensor(2.5)).cpu(), x.cpu() * 2.5)


def test_dtypes() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.int32, torch.complex64, torch.bool):
        x = tensor(4, 5).to(dtype)
        y = compiled(lambda t: torch.stack([t, t.flip(0)]))(x.to("tpu"))
        assert torch.equal(y.cpu(), torch.stack([x, x.flip(0)]))


def test_autocast() -> None:
    def fn(x, y):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return x @ y

    x, y = tensor(8, 8), tensor(8, 8)
    got = compiled(fn)(x.to("tpu"), y.to("tpu"))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.cpu(), fn(x, y), rtol=2e-2, atol=2e-2)


# ---- mutation


def test_mutated_input() -> None:
    def fn(x, y):
        x.add_(y)
        return x * 2

    x, y = tensor(4), tensor(4)
    dx = x.to("tpu")
    got = compiled(fn)(dx, y.to("tpu"))
    torch.testing.assert_close(got.cpu(), fn(x, y))
    torch.testing.assert_close(dx.cpu(), x)


def test_mutated_view() -> None:
    def fn(x, y):
        x.mul_(y)

    base, y = tensor(6, 8), tensor(2, 4)
    on_device = base.to("tpu")
    compiled(fn)(on_device[1:5:2, 2:6], y.to("tpu"))
    fn(base[1:5:2, 2:6], y)
    torch.testing.assert_close(on_device.cpu(), base)


def test_mutated_aliases() -> None:
    def fn(a, b):
        a.add_(1)
        return b * 2

    base = tensor(6)
    on_device = base.to("tpu")
    got = compiled(fn)(on_device[:4], on_device[2:])
    torch.testing.assert_close(got.cpu(), fn(base[:4], base[2:]))
    torch.testing.assert_close(on_device.cpu(), base)


def test_a_mutated_input_is_donated() -> None:
    def fn(x):
        x.add_(1)

    step = compiled(fn)
    x = torch.zeros(1 << 20, device="tpu")
    step(x)
    torch.tpu.synchronize()
    torch.tpu.reset_peak_memory_stats()
    before = torch.tpu.memory_allocated()
    step(x)
    torch.tpu.synchronize()
    assert torch.tpu.max_memory_allocated() < before + x.nbytes
    assert x.cpu()[0] == 2


def test_batch_norm_statistics() -> None:
    module = nn.BatchNorm2d(3)
    twin = copy.deepcopy(module).to("tpu")
    x = tensor(2, 3, 4, 4)
    want, got = module(x), compiled(twin)(x.to("tpu"))
    torch.testing.assert_close(got.cpu(), want, **TOLERANCE)
    torch.testing.assert_close(twin.running_mean.cpu(), module.running_mean, **TOLERANCE)
    torch.testing.assert_close(twin.running_var.cpu(), module.running_var, **TOLERANCE)
    assert twin.num_batches_tracked.cpu() == 1


# ---- training


def _train(module: nn.Module, x: torch.Tensor) -> None:
    twin = copy.deepcopy(module).to("tpu")
    dx = x.to("tpu").requires_grad_(x.is_floating_point())
    cx = x.clone().requires_grad_(x.is_floating_point())
    step = compiled(twin)
    for _ in range(2):
        want, got = module(cx), step(dx)
        torch.testing.assert_close(_cpu(got), want.detach(), **TOLERANCE)
        want.square().sum().backward()
        got.square().sum().backward()
    if dx.grad is not None:
        torch.testing.assert_close(dx.grad.cpu(), cx.grad, **TOLERANCE)
    for a, b in zip(twin.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-3, atol=1e-4)


def test_training() -> None:
    _train(nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 3)), tensor(4, 5))


def test_training_convolution() -> None:
    _train(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)), tensor(2, 3, 9, 9))


def test_training_convolution_of_data() -> None:
    """The gradient of the input is not asked for: a result that an op does not give."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh())
    twin = copy.deepcopy(module).to("tpu")
    x = tensor(2, 3, 9, 9)
    module(x).square().sum().backward()
    compiled(twin)(x.to("tpu")).square().sum().backward()
    for a, b in zip(twin.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-3, atol=1e-4)


def test_training_attention() -> None:
    _train(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), tensor(2, 5, 16))


def test_training_embedding() -> None:
    _train(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)), torch.randint(0, 10, (3, 5)))


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (torch.nn.functional.bilinear, ((4, 3), (4, 5), (2, 3, 5))),
        (lambda x: torch.linalg.pinv(x), ((4, 3),)),
        (lambda x: torch.cholesky_solve(x, x.tril()), ((3, 3),)),
        (lambda x: torch.cholesky_solve(x, x.triu(), upper=True), ((3, 3),)),
        (
            lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([2, 2], device=x.device), unsafe=True),
            ((4, 3),),
        ),
    ],
    ids=["bilinear", "pinv", "cholesky_solve", "cholesky_solve of upper", "segment_reduce"],
)
def test_composite_ops_split_nothing(fn, shapes) -> None:
    given = [tensor(*s).to("tpu") for s in shapes]
    before = extension.cache_stats()["misses"]
    got = compiled(fn)(*given)
    assert extension.cache_stats()["misses"] <= before + 2  # the constant of segment_reduce
    torch.testing.assert_close(got.cpu(), fn(*[t.cpu() for t in given]), **TOLERANCE)


def test_retain_graph_is_refused_or_right() -> None:
    x = tensor(4).to("tpu").requires_grad_()
    with torch._functorch.config.patch(donated_buffer=False):
        y = compiled(lambda x: x.sin().exp().sum())(x)
        y.backward(retain_graph=True)
        first = x.grad.clone()
        y.backward()
    torch.testing.assert_close(x.grad.cpu(), 2 * first.cpu())


def test_whole_step_with_func() -> None:
    def loss(params, x):
        return ((x @ params["w"] + params["b"]) ** 2).mean()

    def step(params, x):
        grads = torch.func.grad(loss)(params, x)
        return {k: v - 0.1 * grads[k] for k, v in params.items()}

    params = {"w": tensor(4, 3), "b": tensor(3)}
    x = tensor(5, 4)
    got = compiled(step)({k: v.to("tpu") for k, v in params.items()}, x.to("tpu"))
    torch.testing.assert_close(_cpu(got), step(params, x), **TOLERANCE)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_compiled_optimizer(kind) -> None:
    cpu = nn.Linear(4, 3)
    dev = copy.deepcopy(cpu).to("tpu")
    x = tensor(5, 4)
    opts = [kind(m.parameters(), lr=0.1) for m in (cpu, dev)]
    device_step = torch.compile(opts[1].step, backend="tpu")
    for _ in range(3):
        for module, t, opt, step in ((cpu, x, opts[0], opts[0].step), (dev, x.to("tpu"), opts[1], device_step)):
            opt.zero_grad()
            module(t).square().sum().backward()
            step()
    for a, b in zip(dev.parameters(), cpu.parameters(), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), **TOLERANCE)


def test_custom_function() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 5

    x = tensor(3).to("tpu").requires_grad_()
    compiled(lambda x: Double.apply(x).sum())(x).backward()
    assert torch.equal(x.grad.cpu(), torch.full((3,), 5.0))


# ---- random numbers


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.nn.functional.dropout(x, 0.3),
        lambda x: x + torch.rand_like(x) * torch.randn(x.shape, device=x.device),
        lambda x: torch.bernoulli(torch.full_like(x, 0.4)) + torch.randint(0, 9, x.shape, device=x.device),
        lambda x: torch.empty_like(x).uniform_(-1, 2) + torch.empty_like(x).normal_().exponential_(),
        lambda x: x[torch.randperm(x.shape[0], device=x.device)],
    ],
)
def test_random_as_eager(fn) -> None:
    x = tensor(5, 7).to("tpu")
    run = compiled(fn)
    results = []
    for call in (fn, run):
        torch.tpu.manual_seed(7)
        results.append([call(x).cpu() for _ in range(3)] + [torch.tpu.default_generators[0].get_offset()])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # transforms are fused


def test_random_factories_are_one_program() -> None:
    x = tensor(5, 7).to("tpu")
    run = compiled(
        lambda x: x + torch.rand_like(x) * torch.randn(x.shape, device=x.device) + torch.empty_like(x).zero_()
    )
    before = extension.cache_stats()["misses"]
    run(x)
    assert extension.cache_stats()["misses"] == before + 1


def test_uninitialized_memory_of_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        x = tensor(3).to("tpu")
        got = compiled(lambda x: (torch.empty(2, device=x.device), x.new_empty(2, dtype=torch.int8), x + 1))(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert got[0].isnan().all()
    assert got[1].tolist() == [127, 127]


def test_dropout_backward_uses_its_mask() -> None:
    x = torch.ones(1000, device="tpu", requires_grad=True)
    y = compiled(lambda x: torch.nn.functional.dropout(x, 0.5) * 3)(x)
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), y.detach().cpu())


def test_checkpoint_with_dropout() -> None:
    from torch.utils.checkpoint import checkpoint

    def inner(x):
        return torch.nn.functional.dropout(x.sin(), 0.5) * x

    def fn(x):
        return checkpoint(inner, x, use_reentrant=False).sum()

    x = tensor(64).to("tpu").requires_grad_()
    grads = []
    for call in (fn, compiled(fn)):
        torch.tpu.manual_seed(3)
        x.grad = None
        call(x).backward()
        grads.append(x.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0], **TOLERANCE)


# ---- dynamic shapes


def test_dynamic() -> None:
    fn = compiled(lambda x, y: (x.reshape(-1, 2) @ y).sum(1) / x.shape[0], dynamic=True)
    y = tensor(2, 3)
    for n in (4, 6, 10, 6):
        x = tensor(n, 4)
        want = (x.reshape(-1, 2) @ y).sum(1) / n
        torch.testing.assert_close(fn(x.to("tpu"), y.to("tpu")).cpu(), want, **TOLERANCE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_dynamic_training() -> None:
    fn = compiled(lambda x: (x.exp().cumsum(0) * x.shape[0]).sum(), dynamic=True)
    for n in (3, 5, 8):
        x = tensor(n, 2)
        cx, dx = x.clone().requires_grad_(), x.to("tpu").requires_grad_()
        (cx.exp().cumsum(0) * n).sum().backward()
        fn(dx).backward()
        torch.testing.assert_close(dx.grad.cpu(), cx.grad, **TOLERANCE)


def test_automatic_dynamic() -> None:
    fn = torch.compile(lambda x: torch.cat([x, x[:1] * x.shape[0]]), backend="tpu")
    for n in range(2, 7):
        x = tensor(n, 2)
        torch.testing.assert_close(fn(x.to("tpu")).cpu(), torch.cat([x, x[:1] * n]))


# ---- what has no rule


@torch.library.custom_op("torch_tpu_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, g: g * 2)


@torch.library.custom_op("torch_tpu_tests::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    x.add_(1)


def test_opaque_op_between_programs() -> None:
    x = tensor(4).to("tpu").requires_grad_()
    y = compiled(lambda x: twice(x.sin()).cos() + 1)(x)
    torch.testing.assert_close(y.detach().cpu(), (2 * x.detach().cpu().sin()).cos() + 1, **TOLERANCE)
    y.sum().backward()
    c = x.detach().cpu()
    torch.testing.assert_close(x.grad.cpu(), -2 * (2 * c.sin()).sin() * c.cos(), **TOLERANCE)


def test_programs_come_together_around_an_opaque_op() -> None:
    def fn(x):
        a = twice(x)
        b = (x + 1) * 2
        return twice(b) + a.sin(), b.cos()

    x = tensor(3)
    on_device = x.to("tpu")
    run = compiled(fn)
    on_device * 2  # what `twice` runs
    before = extension.cache_stats()["misses"]
    got = run(on_device)
    assert extension.cache_stats()["misses"] == before + 2  # b and its cosine; the sum
    torch.testing.assert_close(_cpu(got), (2 * (2 * (x + 1)) + (2 * x).sin(), (2 * (x + 1)).cos()), **TOLERANCE)


def test_random_numbers_around_an_opaque_op() -> None:
    def fn(x):
        a = torch.rand_like(x)
        b = twice(x.sin())
        return torch.empty_like(b).exponential_() + a, torch.rand_like(x)

    x = tensor(16).to("tpu")
    results = []
    for call in (fn, compiled(fn)):
        torch.tpu.manual_seed(7)
        results.append(_cpu(call(x)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


def test_checks_of_linear_algebra_run_after_the_program() -> None:
    run = compiled(lambda x: torch.linalg.inv(x).sin() @ x)
    x = tensor(3, 3)
    before = extension.cache_stats()["misses"]
    got = run(x.to("tpu"))
    assert extension.cache_stats()["misses"] <= before + 2  # one is that of the check
    torch.testing.assert_close(got.cpu(), torch.linalg.inv(x).sin() @ x, rtol=1e-3, atol=1e-3)
    with pytest.raises(torch.linalg.LinAlgError):
        run(torch.zeros(3, 3, device="tpu"))


def test_assertions_are_read_after_the_program() -> None:
    run = compiled(lambda x: torch.nn.functional.one_hot(x, 5) * 2)
    assert run(torch.tensor([1, 4], device="tpu")).cpu().tolist() == [[0, 2, 0, 0, 0], [0, 0, 0, 0, 2]]
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        run(torch.tensor([1, 7], device="tpu"))


def test_opaque_op_that_writes() -> None:
    def fn(x):
        y = x * 2
        bump(y)
        bump(x)
        return y + x

    x = tensor(4)
    dx = x.to("tpu")
    got = compiled(fn)(dx)
    torch.testing.assert_close(got.cpu(), (x * 2 + 1) + (x + 1))
    torch.testing.assert_close(dx.cpu(), x + 1)


def test_data_dependent_op() -> None:
    fn = torch.compile(lambda x: x[x > 0].sum() * 2, backend="tpu")
    x = tensor(16)
    torch.testing.assert_close(fn(x.to("tpu")).cpu(), x[x > 0].sum() * 2, **TOLERANCE)


def test_sizes_that_are_data() -> None:
    x, counts = tensor(3, 2), torch.tensor([2, 0, 3])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = compiled(lambda x, counts: x.repeat_interleave(counts, 0) * 2)(x.to("tpu"), counts.to("tpu"))
    torch.testing.assert_close(got.cpu(), x.repeat_interleave(counts, 0) * 2)


def test_other_device_inside() -> None:
    fn = compiled(lambda x: (x * 2).cpu() + torch.tensor([1.0, 2.0, 3.0]))
    x = tensor(3)
    torch.testing.assert_close(fn(x.to("tpu")), x * 2 + torch.tensor([1.0, 2.0, 3.0]))


def test_tensor_constants() -> None:
    held = tensor(3)
    on_device = held.to("tpu")
    x = tensor(3)
    fn = compiled(lambda x: x * on_device + torch.tensor(2.0) + torch.tensor([1.0, 2.0, 3.0], device=x.device))
    torch.testing.assert_close(fn(x.to("tpu")).cpu(), x * held + 2 + torch.tensor([1.0, 2.0, 3.0]))


# ---- errors and options


def test_unknown_option() -> None:
    with pytest.raises(Exception, match="no option 'nonsense'"):
        torch.compile(lambda x: x + 1, backend="tpu", options={"nonsense": 1})(tensor(2).to("tpu"))


def test_modes_are_taken() -> None:
    x = tensor(2).to("tpu")
    torch.compile(lambda x: x + 1, backend="tpu", mode="max-autotune")(x)


def test_error_codes() -> None:
    assert errors.CompileOptionUnknown.code == "TPU-E105"
