"""Higher-order ops inside the programs of torch.compile(backend="tpu"), and torch's transforms around and inside."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as map_op
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from torch_tpu.runtime import extension

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

# Of torch's own code, on the way through dynamo.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """A constant of flex attention's definition is copied eagerly while that is traced for the first time."""
    compiled(lambda q: flex_attention(q, q, q))(torch.ones(1, 1, 2, 2, device="tpu"))


def compiled(fn, **kwargs):
    return torch.compile(fn, backend="tpu", fullgraph=True, **kwargs)


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def _to(device: str, x):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to(device), x)


def _programs() -> int:
    return extension.cache_stats()["misses"]


def infers(fn, *args, programs: int = 1, reference=None, **kwargs) -> None:
    """``fn`` gives on the device what ``reference`` gives on the CPU, in so many programs."""
    want = (reference or fn)(*args)
    run, on_device = compiled(fn, **kwargs), _to("tpu", args)
    before = _programs()
    got = run(*on_device)
    assert _programs() == before + programs
    torch.testing.assert_close(_to("cpu", got), want, **TOLERANCE)


def trains(fn, *args, programs: tuple[int, int] = (1, 1), reference=None, **kwargs) -> None:
    """Results and gradients are those of ``reference`` on the CPU, in so many programs forward and backward."""
    found = []
    for device, call in (("cpu", reference or fn), ("tpu", compiled(fn, **kwargs))):
        given = _to(device, args)
        tensors = [t for t in given if isinstance(t, torch.Tensor) and t.is_floating_point()]
        for t in tensors:
            t.requires_grad_()
        counts = [_programs()]
        out = call(*given)
        counts.append(_programs())
        leaves = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
        grads = [torch.ones_like(t) * (i + 1) for i, t in enumerate(leaves)]
        counts.append(_programs())
        torch.autograd.backward(leaves, grads)
        counts.append(_programs())
        if device == "tpu":
            assert (counts[1] - counts[0], counts[3] - counts[2]) == programs
        found.append(_to("cpu", (out, [t.grad for t in tensors])))
    torch.testing.assert_close(found[1], found[0], **TOLERANCE)


# ---- control flow


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cond(sign) -> None:
    def fn(x, w):
        return torch.cond(x.sum() > 0, lambda x: x.sin() * w, lambda x: x.cos() + w, (x * 2,)) * 3

    infers(fn, torch.full((3,), sign), tensor(3))
    trains(fn, torch.full((3,), sign), tensor(3))


def test_cond_takes_the_other_branch_in_the_same_program() -> None:
    fn = compiled(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)))
    fn(torch.ones(3, device="tpu"))
    x = torch.full((3,), -1.0, device="tpu")
    before = _programs()
    assert fn(x).cpu().tolist() == [-2.0] * 3
    assert _programs() == before


def test_cond_of_a_size() -> None:
    def fn(x):
        return torch.cond(x.shape[0] > 4, lambda x: x + 1, lambda x: x - 1, (x,))

    run = compiled(fn, dynamic=True)
    for n in (3, 7):
        x = tensor(n, 2)
        torch.testing.assert_close(run(x.to("tpu")).cpu(), fn(x))


def test_nested_cond() -> None:
    def inner(x):
        return torch.cond(x[0] > 1, lambda x: x * 2, lambda x: x * 3, (x,))

    def fn(x):
        return torch.cond(x.sum() > 0, inner, lambda x: -x, (x,))

    for start in ([2.0, 1.0], [0.5, 1.0], [-1.0, 0.0]):
        torch._dynamo.reset()
        infers(fn, torch.tensor(start))
    trains(fn, torch.tensor([2.0, 1.0]))


def test_cond_with_several_results() -> None:
    def fn(x, n):
        return torch.cond(
            x.sum() > 0, lambda x, n: (x.clone(), n + 1, x > 0), lambda x, n: (-x, n - 1, x < 0), (x + 1, n)
        )

    infers(fn, tensor(3), torch.tensor([1, 2]))


def test_cond_with_double_inside() -> None:
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: x.double().exp().float(), lambda x: x.cos(), (x,))

    infers(fn, tensor(3).abs())


def test_cond_with_a_constant() -> None:
    infers(lambda x: torch.cond(x.sum() > 0, lambda x: x * torch.tensor(2.0), lambda x: x + 1, (x,)), tensor(3).abs())
    infers(lambda x: torch.cond(x.sum() > 0, lambda x: x * torch.tensor(3.0), lambda x: x + 1, (x,)), tensor(3).abs())


def test_while_loop() -> None:
    def fn(x, w):
        i = torch.zeros((), dtype=torch.int64, device=x.device)
        return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x * w), (i, x))

    infers(fn, tensor(3), tensor(3))


def test_while_loop_with_a_number() -> None:
    def fn(x, w):
        return while_loop(lambda i, x: 2 * i < 9, lambda i, x: (i + 1, x * w + i), (0, x))[1]

    infers(fn, tensor(3), tensor(3))
    infers(fn, torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([2, 3, 4], dtype=torch.int32))


def test_while_loop_until_data_says_so() -> None:
    def fn(x):
        return while_loop(lambda x: x.abs().max() > 1, lambda x: (x / 2,), (x,))

    infers(fn, tensor(3) * 100)


def test_while_loop_training() -> None:
    def fn(x, w):
        i = torch.zeros((), dtype=torch.int64, device=x.device)
        return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x * w), (i, x))[1]

    x, w = (t.to("tpu").requires_grad_() for t in (torch.full((3,), 2.0), torch.full((3,), 0.5)))
    y = compiled(fn)(x, w)
    y.sum().backward()
    assert y.tolist() == [2 / 32] * 3
    assert x.grad.tolist() == [1 / 32] * 3
    assert w.grad.tolist() == [5 * 2 / 16] * 3


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(reverse) -> None:
    w = tensor(3)

    def fn(i, x, w):
        return scan(lambda c, x: (c * x + w, {"s": c + x.sum(), "n": (x > 0).sum()}), i, x, dim=1, reverse=reverse)

    infers(fn, tensor(3), tensor(3, 4), w)


def test_scan_training() -> None:
    def fn(i, x, w):
        return scan(lambda c, x: (c * x + w, c + x.sum()), i, x)

    trains(fn, tensor(3), tensor(4, 3), tensor(3))


def test_cond_inside_scan() -> None:
    def step(c, x):
        return torch.cond(c.sum() > 0, lambda c, x: c + x, lambda c, x: c - x, (c, x)), c.clone()

    infers(lambda i, x: scan(step, i, x), tensor(3), tensor(5, 3))


def test_map() -> None:
    def fn(x, w):
        return map_op(lambda x, w: (x @ w).sin(), x, w)

    infers(fn, tensor(4, 3), tensor(3, 2))
    trains(fn, tensor(4, 3), tensor(3, 2))


def test_associative_scan() -> None:
    def fn(x, w):
        return associative_scan(lambda a, b: a * b + w, x, 0, combine_mode="generic")

    infers(fn, tensor(5, 3), tensor(3))


def test_associative_scan_training() -> None:
    def fn(x):
        return associative_scan(lambda a, b: a * b, x, 0)

    x = tensor(5, 3)
    trains(fn, x, reference=lambda x: x.cumprod(0))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.cond(x.sum() > 0, lambda x: (x * x.shape[0]).sin(), lambda x: x.cos(), (x,)),
        lambda x: scan(lambda c, x: (c * x, c + x), x[0], x),
        lambda x: map_op(lambda row: row.softmax(0), x),
        torch.compiler.nested_compile_region(lambda x: (x * x.shape[0]).mean(0)),
    ],
    ids=["cond", "scan", "map", "region"],
)
def test_dynamic_shapes(fn) -> None:
    run = compiled(fn, dynamic=True)
    for n in (3, 6, 5, 40):
        x = tensor(n, 3)
        torch.testing.assert_close(_to("cpu", run(x.to("tpu"))), fn(x), **TOLERANCE)


def test_eager_calls() -> None:
    x = tensor(3)
    for t in (x, x.to("tpu")):
        got = torch.cond(t.sum() > 0, lambda x: x + 1, lambda x: x - 1, (t,))
        torch.testing.assert_close(got.cpu(), x + 1 if x.sum() > 0 else x - 1)
        (got,) = while_loop(lambda x: x.abs().max() > 1, lambda x: (x / 2,), (t * 100,))
        assert got.abs().max() <= 1


# ---- what stays between programs


def _reason(caplog, fn, *args) -> str:
    with caplog.at_level(logging.INFO, "torch_tpu"):
        got = compiled(fn)(*_to("tpu", args))
    torch.testing.assert_close(_to("cpu", got), fn(*args), **TOLERANCE)
    return "\n".join(r.getMessage() for r in caplog.records if r.name == "torch_tpu")


@torch.library.custom_op("torch_tpu_tests::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@thrice.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_op_without_a_rule(caplog) -> None:
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: thrice(x), lambda x: x - 1, (x,)) * 2

    assert "no program can contain torch_tpu_tests.thrice.default" in _reason(caplog, fn, torch.ones(3))


def test_random_numbers_inside(caplog) -> None:
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: torch.rand_like(x) * 0, lambda x: x * 1, (x,)) + x

    assert "draws numbers" in _reason(caplog, fn, torch.ones(3))


def test_a_carried_number_that_is_read(caplog) -> None:
    def fn(x):
        n, x = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (0, x))
        return x + n

    assert "a result that is a number is read" in _reason(caplog, fn, torch.ones(3))


# ---- regions and wrappers


def test_nested_compile_region() -> None:
    @torch.compiler.nested_compile_region
    def layer(x, w):
        return torch.relu(x @ w).sin()

    def fn(x, w):
        return layer(layer(x, w), w)

    infers(fn, tensor(4, 3), tensor(3, 3))
    trains(fn, tensor(4, 3), tensor(3, 3))


def test_checkpoint() -> None:
    def fn(x, w):
        return checkpoint(lambda x: (x @ w).sin().exp(), x, use_reentrant=False) * 2

    trains(fn, tensor(4, 3), tensor(3, 3))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.exp() * factor

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.exp() * ctx.factor, None


def test_custom_function() -> None:
    trains(lambda x: Scaled.apply(x, 3.0).sin(), tensor(4, 3))


# ---- flex attention


def _attention(q, k, v, score, mask):
    """Of q (B, H, L, E), k and v (B, Hkv, S, E): written out."""
    heads = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(heads, 1) for t in (k, v))
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    b, h, i, j = (
        torch.arange(n, device=q.device).reshape([-1 if d == at else 1 for d in range(4)]) for at, n in enumerate(shape)
    )
    scores = score(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, b, h, i, j)
    scores = scores.masked_fill(~mask(b, h, i, j).expand(shape), -torch.inf)
    return scores.softmax(-1) @ v


def _causal(b, h, i, j):
    return i >= j


def _window(b, h, i, j):
    return (i >= j) & (i - j < 40 + h)


def _blocks(mask, device: str, heads: int = 2, size: int = 128):
    return create_block_mask(mask, 2, heads, size, size, device=device)


@pytest.mark.parametrize("mask", [_causal, _window])
def test_flex_attention(mask) -> None:
    given = [tensor(2, 2, 128, 16) for _ in range(3)]
    block_mask = _blocks(mask, "tpu")
    trains(
        lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask),
        *given,
        reference=lambda q, k, v: _attention(q, k, v, lambda s, *_: s, mask),
    )


def test_flex_attention_score_mod_with_captured_tensors() -> None:
    given = [tensor(2, 2, 128, 16) for _ in range(3)]
    slopes, table = tensor(2), tensor(128, 128)
    block_mask = _blocks(_causal, "tpu")

    def scored(slopes, table):
        return lambda s, b, h, i, j: torch.tanh(s + slopes[h] * (i - j) * 0.1 + table[i, j])

    trains(
        lambda q, k, v, slopes, table: flex_attention(q, k, v, score_mod=scored(slopes, table), block_mask=block_mask),
        *given,
        slopes,
        table,
        reference=lambda q, k, v, slopes, table: _attention(q, k, v, scored(slopes, table), _causal),
    )


def test_flex_attention_grouped_queries() -> None:
    trains(
        lambda q, k, v: flex_attention(q, k, v, enable_gqa=True),
        tensor(2, 4, 64, 16),
        tensor(2, 2, 64, 16),
        tensor(2, 2, 64, 16),
        reference=lambda q, k, v: _attention(q, k, v, lambda s, *_: s, lambda b, h, i, j: j >= 0),
    )


def test_flex_attention_document_mask_and_log_sum() -> None:
    q, k, v = (tensor(2, 2, 128, 16) for _ in range(3))
    document = torch.arange(128) // 50
    on_device = document.to("tpu")
    block_mask = _blocks(lambda b, h, i, j: on_device[i] == on_device[j], "tpu")
    got, aux = compiled(
        lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask, return_aux=AuxRequest(lse=True))
    )(*(t.to("tpu") for t in (q, k, v)))
    want = _attention(q, k, v, lambda s, *_: s, lambda b, h, i, j: document[i] == document[j])
    scores = (q @ k.transpose(-2, -1) / 4).masked_fill(document[:, None] != document, -torch.inf)
    torch.testing.assert_close(got.cpu(), want, **TOLERANCE)
    torch.testing.assert_close(aux.lse.cpu(), scores.logsumexp(-1), **TOLERANCE)


def test_flex_attention_half_precision_and_strides() -> None:
    q, k, v = (tensor(2, 64, 2, 16).bfloat16() for _ in range(3))
    fn = compiled(lambda *x: flex_attention(*(t.transpose(1, 2) for t in x)))
    got = fn(*(t.to("tpu") for t in (q, k, v)))
    want = _attention(*(t.transpose(1, 2).float() for t in (q, k, v)), lambda s, *_: s, lambda b, h, i, j: j >= 0)
    assert got.dtype == torch.bfloat16
    assert got.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(got.float().cpu(), want, rtol=2e-2, atol=2e-2)


def test_flex_attention_of_dynamic_lengths() -> None:
    run = compiled(lambda q: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j)), dynamic=True)
    for n in (16, 48, 33):
        q = tensor(2, 2, n, 8)
        want = _attention(q, q, q, lambda s, b, h, i, j: s + (i - j), lambda b, h, i, j: j >= 0)
        torch.testing.assert_close(run(q.to("tpu")).cpu(), want, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_called_eagerly() -> None:
    given = [tensor(2, 2, 64, 16) for _ in range(3)]
    got = flex_attention(*(t.to("tpu") for t in given), score_mod=lambda s, b, h, i, j: s + (i - j))
    want = _attention(*given, lambda s, b, h, i, j: s + (i - j), lambda b, h, i, j: j >= 0)
    torch.testing.assert_close(got.cpu(), want, **TOLERANCE)


# ---- transforms


def _loss(w, x):
    return ((x @ w).tanh() ** 2).sum()


@pytest.mark.parametrize(
    "transform",
    [
        lambda w, x: torch.func.grad(_loss)(w, x),
        lambda w, x: torch.func.vmap(torch.func.grad(_loss), (None, 0))(w, x),
        lambda w, x: torch.func.jacrev(lambda w: (x @ w).tanh())(w),
        lambda w, x: torch.func.jacfwd(lambda w: (x @ w).tanh())(w),
        lambda w, x: torch.func.hessian(_loss)(w, x),
        lambda w, x: torch.func.jvp(lambda w: (x @ w).tanh(), (w,), (torch.ones_like(w),)),
        lambda w, x: torch.func.vjp(lambda w: (x @ w).tanh(), w)[1](torch.ones(5, device=w.device)),
        lambda w, x: torch.func.vmap(torch.func.vmap(lambda a, b: a * b, (None, 0)), (0, None))(w, w),
    ],
    ids=["grad", "per-sample-grad", "jacrev", "jacfwd", "hessian", "jvp", "vjp", "vmap of vmap"],
)
def test_transforms(transform) -> None:
    infers(transform, tensor(3), tensor(5, 3))


def test_vmap_of_cond() -> None:
    def one(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    infers(lambda x: torch.func.vmap(one)(x), tensor(6, 3))


# ---- autograd around programs


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_autograd() -> None:
    x, w = tensor(4, 3), tensor(3, 2)
    found = []
    for device in ("cpu", "tpu"):
        a, b = (t.detach().to(device).requires_grad_() for t in (x.clone(), w.clone()))

        def step(a, b):
            loss = ((a @ b).sin() ** 2).sum()
            loss.backward()
            return loss

        if device == "tpu":
            with torch._dynamo.config.patch(compiled_autograd=True):
                loss = torch.compile(step, backend="tpu")(a, b)
        else:
            loss = step(a, b)
        found.append(_to("cpu", (loss, a.grad, b.grad)))
    torch.testing.assert_close(found[1], found[0], **TOLERANCE)


def test_autocast_region() -> None:
    def fn(x, w):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = x @ w
        return y.float().sum(0), y

    x, w = tensor(4, 8), tensor(8, 8)
    got = compiled(fn)(x.to("tpu"), w.to("tpu"))
    want = fn(x, w)
    assert got[1].dtype == torch.bfloat16
    torch.testing.assert_close(_to("cpu", got), want, rtol=2e-2, atol=5e-2)


def test_cond_inside_autocast() -> None:
    def fn(x, w):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return torch.cond(x.sum() > 0, lambda x: x @ w, lambda x: x @ w.t(), (x,))

    x, w = tensor(8, 8), tensor(8, 8)
    got = compiled(fn)(x.to("tpu"), w.to("tpu"))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float().cpu(), x @ w if x.sum() > 0 else x @ w.t(), rtol=5e-2, atol=1e-1)


def test_generator() -> None:
    def fn(x):
        for scale in (y for y in (1.0, 2.0, 3.0)):
            x = x * scale + sum(i for i in range(3))
        return x

    infers(fn, tensor(3))


def test_hooks() -> None:
    def fn(x):
        y = x.sin()
        y.register_hook(lambda g: g * 2)
        return y.exp()

    trains(fn, tensor(3))
    torch._dynamo.reset()
    module = torch.nn.Linear(3, 2)
    module.register_forward_hook(lambda m, args, out: out * 2)
    module.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    x = tensor(4, 3)
    want = module(x)
    got = compiled(module.to("tpu"))(x.to("tpu"))
    torch.testing.assert_close(got.detach().cpu(), want.detach(), **TOLERANCE)


def test_saved_tensors_hooks_and_full_backward_hook() -> None:
    module = torch.nn.Linear(3, 2).to("tpu")
    seen = []
    module.register_full_backward_hook(lambda m, given, got: seen.append(got[0].shape))
    run = torch.compile(module, backend="tpu")
    run(tensor(4, 3).to("tpu").requires_grad_()).sum().backward()
    assert seen == [(4, 2)]
    assert module.weight.grad is not None
