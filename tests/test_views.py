"""Views: random chains against the CPU, and one named case for each way a view can lie in its storage.

A case holds on the device what it holds on the CPU, reads included, and raises what the CPU raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_tpu.runtime import extension

View = Callable[[torch.Tensor], torch.Tensor]


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=1e-6, equal_nan=True)


def data(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small numbers; 0 and 1 for bool and uint8, whose bytes are read as each other."""
    g = torch.Generator().manual_seed(seed)
    if dtype in (torch.bool, torch.uint8):
        return torch.randint(0, 2, shape, generator=g).to(dtype)
    if dtype.is_complex:
        return torch.view_as_complex(torch.randint(-9, 9, (*shape, 2), generator=g).to(dtype.to_real()))
    return torch.randint(-9, 9, shape, generator=g).to(dtype)


# ---- random chains


@dataclass
class Step:
    text: str
    view: View

    def __repr__(self) -> str:
        return self.text


REAL = (torch.float32, torch.int32, torch.int64, torch.int16, torch.bfloat16)
BYTES = (torch.uint8, torch.bool, torch.int8)
DTYPES = (torch.float32, torch.int32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64)


def dims_of(draw, x: torch.Tensor, n: int) -> list[int]:
    return draw(st.lists(st.integers(0, x.dim() - 1), min_size=n, max_size=n, unique=True))


def select(draw, x):
    (d,) = dims_of(draw, x, 1)
    i = draw(st.integers(0, x.size(d) - 1))
    return Step(f".select({d}, {i})", lambda t: t.select(d, i))


def slice_(draw, x):
    (d,) = dims_of(draw, x, 1)
    lo = draw(st.integers(0, x.size(d) - 1))
    hi, step = draw(st.integers(lo, x.size(d))), draw(st.integers(1, 3))
    index = (*[slice(None)] * d, slice(lo, hi, step))
    return Step(f"[{index}]", lambda t: t[index])


def transpose(draw, x):
    a, z = dims_of(draw, x, 2)
    return Step(f".transpose({a}, {z})", lambda t: t.transpose(a, z))


def permute(draw, x):
    dims = draw(st.permutations(range(x.dim())))
    return Step(f".permute({dims})", lambda t: t.permute(dims))


def expand(draw, x):
    sizes = [draw(st.integers(1, 3)) if n == 1 else n for n in x.shape]
    sizes = draw(st.sampled_from([[], [2]])) + sizes
    return Step(f".expand({sizes})", lambda t: t.expand(sizes))


def unsqueeze(draw, x):
    d = draw(st.integers(0, x.dim()))
    return Step(f".unsqueeze({d})", lambda t: t.unsqueeze(d))


def flat(draw, x):
    return Step(".view(-1)", lambda t: t.view(-1))


def unflatten(draw, x):
    (d,) = dims_of(draw, x, 1)
    n = draw(st.sampled_from([n for n in range(1, x.size(d) + 1) if x.size(d) % n == 0]))
    return Step(f".unflatten({d}, ({n}, -1))", lambda t: t.unflatten(d, (n, t.size(d) // n)))


def diagonal(draw, x):
    a, z = dims_of(draw, x, 2)
    offset = draw(st.integers(-1, 1))
    return Step(f".diagonal({offset}, {a}, {z})", lambda t: t.diagonal(offset, a, z))


def unfold(draw, x):
    (d,) = dims_of(draw, x, 1)
    size, step = draw(st.integers(1, x.size(d))), draw(st.integers(1, 3))
    return Step(f".unfold({d}, {size}, {step})", lambda t: t.unfold(d, size, step))


def as_strided(draw, x):
    room = x.untyped_storage().nbytes() // x.element_size()
    offset = draw(st.integers(0, room - 1))
    sizes, strides, last = [], [], offset
    for _ in range(draw(st.integers(0, 3))):
        stride = draw(st.integers(0, 7))
        most = 3 if stride == 0 else min(4, 1 + (room - 1 - last) // stride)
        sizes.append(draw(st.integers(1, most)))
        strides.append(stride)
        last += (sizes[-1] - 1) * stride
    return Step(f".as_strided({sizes}, {strides}, {offset})", lambda t: t.as_strided(sizes, strides, offset))


def view_dtype(draw, x):
    to = draw(st.sampled_from(BYTES[:2] if x.dtype in BYTES[:2] else (*REAL, torch.int8)))
    return Step(f".view({to})", lambda t: t.view(to))


def bits(draw, x):
    names = ["conj", "_neg_view"] if x.is_complex() else ["_neg_view"] if x.dtype != torch.bool else ["detach"]
    name = draw(st.sampled_from(names))
    return Step(f".{name}()", lambda t: getattr(t, name)())


def parts(draw, x):
    if x.is_complex():
        name = draw(st.sampled_from(["view_as_real", "real", "imag"]))
        return Step(f".{name}", lambda t: getattr(torch, name)(t))
    return Step(".view_as_complex", torch.view_as_complex)


STEPS = (select, slice_, transpose, permute, expand, unsqueeze, flat, unflatten, diagonal, unfold, as_strided,
         view_dtype, bits, parts)  # fmt: skip
NEED = {transpose: 2, diagonal: 2, select: 1, slice_: 1, unflatten: 1, unfold: 1, permute: 1}


@st.composite
def chains(draw) -> tuple[torch.Tensor, list[Step]]:
    """A base, and steps that the CPU accepts one after another."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    base = data(shape, draw(st.sampled_from(DTYPES)))
    x, steps = base, []
    for kind in draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=4)):
        if x.dim() < NEED.get(kind, 0) or x.numel() == 0:
            continue
        step = kind(draw, x)
        try:
            x = step.view(x)
        except RuntimeError:
            continue
        steps.append(step)
    return base, steps


def apply(base: torch.Tensor, steps: list[Step]) -> torch.Tensor:
    for step in steps:
        base = step.view(base)
    return base


def repeats(x: torch.Tensor) -> bool:
    """Two elements share memory."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    if x.numel() == 0:
        return False
    where = torch.arange(last + 1).as_strided(x.shape, x.stride(), 0)
    return where.unique().numel() != where.numel()


def mul_(v: torch.Tensor, value: torch.Tensor) -> None:
    v.logical_not_() if v.dtype == torch.bool else v.mul_(2 if v.dtype not in BYTES else 1)


def copy_(v: torch.Tensor, value: torch.Tensor) -> None:
    v.copy_(value.to(v.device))


def copy_from_cpu(v: torch.Tensor, value: torch.Tensor) -> None:
    v.copy_(value)


def out(v: torch.Tensor, value: torch.Tensor) -> None:
    value = value.to(v.device)
    torch.bitwise_or(value, value, out=v) if v.dtype in BYTES else torch.add(value, value, out=v)


def fill_(v: torch.Tensor, value: torch.Tensor) -> None:
    v.fill_(1)


def index_put_(v: torch.Tensor, value: torch.Tensor) -> None:
    v[...] = value.to(v.device)


WRITES = (mul_, copy_, copy_from_cpu, out, fill_, index_put_)
CHAIN_SETTINGS = settings(
    max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@CHAIN_SETTINGS
@given(chains())
def test_reads(case):
    base, steps = case
    want, got = apply(base, steps), apply(base.to("tpu"), steps)
    assert (got.shape, got.stride(), got.storage_offset()) == (want.shape, want.stride(), want.storage_offset())
    assert (got.is_conj(), got.is_neg()) == (want.is_conj(), want.is_neg())
    same(got, want.resolve_conj().resolve_neg())
    same(got.clone(memory_format=torch.contiguous_format), want.clone(memory_format=torch.contiguous_format))


def outcome(write: Callable, v: torch.Tensor, value: torch.Tensor) -> str:
    try:
        write(v, value)
    except RuntimeError as e:
        return str(e)
    return ""


@CHAIN_SETTINGS
@given(chains(), st.sampled_from(WRITES), st.integers(0, 3))
def test_writes(case, write, seed):
    base, steps = case
    host, device = base.clone(), base.to("tpu")
    want, got = apply(host, steps), apply(device, steps)
    if write in (mul_, out) and any(s.view is torch.view_as_complex or ".view(torch." in s.text for s in steps):
        write = copy_  # arithmetic on foreign bits: NaN and denormals are not ours to compare
    value = data(tuple(want.shape), want.dtype, seed)
    expected = outcome(write, want, value)
    if not expected and write is not fill_ and repeats(want):
        return  # whoever writes last wins
    assert outcome(write, got, value) == expected
    same(device, host)
    same(got, want.resolve_conj().resolve_neg())


# ---- each kind of plan

BASE = torch.arange(60.0).reshape(3, 4, 5)
PLANS: dict[str, View] = {
    "whole": lambda t: t,
    "row": lambda t: t[1],
    "column": lambda t: t[:, :, 2],
    "window": lambda t: t[1:, 1:3, 2:4],
    "steps": lambda t: t[::2, 1::2, ::3],
    "transposed": lambda t: t.transpose(0, 2),
    "permuted window": lambda t: t.permute(2, 0, 1)[1:4, :, ::2],
    "reshaped": lambda t: t.view(6, 10),
    "reshaped window": lambda t: t.view(6, 10)[2:5, 3:7],
    "flat window": lambda t: t.view(-1)[7:23],
    "flat window with steps": lambda t: t.view(-1)[4:50:4],
    "flat window with a step that divides nothing": lambda t: t.view(-1)[3:50:7],
    "one element": lambda t: t[2, 3, 4],
    "wraps a row": lambda t: t.as_strided((2, 4), (20, 1), 3),
    "box of the same strides": lambda t: t.as_strided((2, 4), (20, 1), 1),
    "diagonal": lambda t: t[0].diagonal(),
    "diagonal of two dims": lambda t: t.diagonal(0, 0, 1),
    "of size one": lambda t: t[1:2, 2:3].squeeze(0),
    "strided at the end": lambda t: t.as_strided((3,), (29,), 1),
    "nothing": lambda t: t[:, 2:2],
    "same width": lambda t: t.view(torch.int32),
    "narrower": lambda t: t.view(torch.int16)[1, :, 2:7],
    "wider": lambda t: t.view(-1).view(torch.int64)[3:9],
}
READ_ONLY: dict[str, View] = {
    "expanded": lambda t: t[:, :1, 2:3].expand(3, 4, 5),
    "overlapping windows": lambda t: t.view(-1).unfold(0, 8, 3),
    "stride nought": lambda t: t.as_strided((2, 3, 4), (0, 7, 0), 11),
}


@pytest.mark.parametrize("name", [*PLANS, *READ_ONLY])
def test_plan_reads(name):
    view = (PLANS | READ_ONLY)[name]
    same(view(BASE.to("tpu")) + 1, view(BASE) + 1)


def add_(v):
    v.add_(1)


def copy_transposed_(v):
    value = torch.arange(v.numel(), dtype=v.dtype).reshape(v.shape[::-1])
    v.copy_(value.permute([*reversed(range(v.dim()))]).to(v.device))


def add_out(v):
    torch.add(v.clone(), 2, out=v)


def masked_fill_(v):
    v.masked_fill_(v > 20, 7)


@pytest.mark.parametrize("write", [add_, copy_transposed_, add_out, masked_fill_], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", PLANS)
def test_plan_writes(name, write):
    host, device = BASE.clone(), BASE.to("tpu")
    write(PLANS[name](host))
    write(PLANS[name](device))
    same(device.view(torch.int32), host.view(torch.int32))


@pytest.mark.parametrize("name", ["expanded", "overlapping windows", "stride nought"])
def test_fill_may_write_an_element_twice(name):
    host, device = BASE.clone(), BASE.to("tpu")
    for t in (host, device):
        READ_ONLY[name](t).fill_(9)
        READ_ONLY[name](t)[1].zero_()
    same(device, host)


# ---- other dtypes


def test_bool_and_uint8_are_the_same_bytes():
    x = torch.tensor([0, 1, 1, 0], dtype=torch.uint8)
    d = x.to("tpu")
    b = d.view(torch.bool)
    assert b.logical_not().tolist() == [True, False, False, True]
    b[1] = False
    assert d.tolist() == [0, 0, 1, 0]
    d[0] = 1
    assert b.tolist() == [True, False, True, False]
    assert (d + 5).tolist() == [6, 5, 6, 5]


def test_a_bool_write_leaves_its_neighbours_bytes_alone():
    d = torch.tensor([7, 200, 3, 9], dtype=torch.uint8).to("tpu")
    d[:2].view(torch.bool).fill_(True)
    assert d.tolist() == [1, 1, 3, 9]


def test_uint8_view_of_bools():
    b = torch.tensor([True, False, True]).to("tpu")
    b.view(torch.uint8).mul_(0)
    assert b.tolist() == [False] * 3
    b.view(torch.uint8)[1:].add_(1)
    assert b.tolist() == [False, True, True]


@pytest.mark.parametrize("to", [torch.int16, torch.int32, torch.float32])
def test_a_rest_of_bytes_survives_a_write_of_wider_elements(to):
    x = torch.arange(11, dtype=torch.uint8)
    host, device = x.clone(), x.to("tpu")
    for t in (host, device):
        t[:8].view(to).copy_(torch.full((8 // to.itemsize,), 3, dtype=to))
        t[4:8].view(to).zero_()
    same(device, host)


def test_complex_parts_write_through():
    x = data((3, 4), torch.complex64)
    host, device = x.clone(), x.to("tpu")
    for t in (host, device):
        t.real[1] = 7
        t[:, 1].imag.mul_(3)
        t.conj()[2].mul_(1j)
        t.conj().imag[0].add_(1)  # a neg view
        torch.view_as_real(t)[:, 3, 1] += 2
    same(device, host)


def test_view_as_complex_of_an_odd_storage():
    x = torch.arange(7.0)
    host, device = x.clone(), x.to("tpu")
    for t in (host, device):
        torch.view_as_complex(t[:6].view(3, 2)).mul_(2j)
    same(device, host)


# ---- several writes at once


def test_a_foreach_op_writes_two_windows_of_one_storage():
    host, device = BASE.clone(), BASE.to("tpu")
    for t in (host, device):
        torch._foreach_mul_([t[0], t[2, :, 1:3], t[1, 2]], 3)
        torch._foreach_copy_(
            [t[:, 0], t[:, 1]], [torch.ones(3, 5, device=t.device), torch.zeros(3, 5, device=t.device)]
        )
    same(device, host)


def test_foreach_ops_are_one_after_another_where_they_overlap():
    host, device = BASE.clone(), BASE.to("tpu")
    for t in (host, device):
        torch._foreach_add_([t, t[1], t[1]], 1)
        a, b = t[0], t[1]
        torch._foreach_add_([a, b], [b, a])
        torch._foreach_mul_([t[:, 1], t[1]], [t[:, 2], t[0]])
    same(device, host)


def test_split_with_sizes_copy_out():
    host, device = BASE.clone(), BASE.to("tpu")
    for t in (host, device):
        into = torch.zeros(60, device=t.device)
        out = [into[3:18].view(3, 1, 5), into[20:50].view(3, 2, 5)]
        torch.split_with_sizes_copy(t[:, :3], [1, 2], dim=1, out=out)
        t.view(-1)[:] = into
    same(device, host)


def test_out_tensors_take_the_size_of_the_result():
    out = torch.empty(0, device="tpu")
    torch.add(BASE.to("tpu"), 1, out=out)
    same(out, BASE + 1)
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.mul(BASE.to("tpu"), 2, out=out[0, 0])


def test_results_of_two_outputs():
    host, device = BASE.clone(), BASE.to("tpu")
    for t in (host, device):
        values, indices = t[2, :, 0], torch.zeros(4, 2, dtype=torch.int64, device=t.device)
        torch.max(t[0], dim=1, out=(values, indices[:, 1]))
        t[1, :, 0] = indices[:, 1]
    same(device, host)


# ---- overlap

OVERLAPS: dict[str, Callable[[torch.Tensor], object]] = {
    "internal": lambda t: t[:, :1].expand(3, 4, 5).add_(1),
    "internal, copy": lambda t: t[0, 0].expand(2, 5).copy_(t[:2, 1]),
    "internal, out": lambda t: torch.neg(t[1], out=t[0, :1].expand(4, 5)),
    "partial": lambda t: t.view(-1)[1:].mul_(t.view(-1)[:-1]),
    "partial, out": lambda t: torch.mul(t.view(-1)[:-1], 2, out=t.view(-1)[1:]),
    "partial, foreach": lambda t: torch._foreach_add_([t[0, :3]], [t[0, 1:]]),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_overlap_raises_as_on_the_cpu(name):
    with pytest.raises(RuntimeError) as want:
        OVERLAPS[name](BASE.clone())
    device = BASE.to("tpu")
    with pytest.raises(RuntimeError) as got:
        OVERLAPS[name](device)
    assert str(got.value) == str(want.value)
    same(device, BASE)


def test_the_tensor_itself_is_no_partial_overlap():
    device = BASE.to("tpu")
    device[1].mul_(device[1])
    torch.add(device[0], device[0], out=device[0])
    same(device[1], BASE[1] * BASE[1])
    same(device[0], BASE[0] * 2)


def test_overlapping_copy():
    host, device = BASE.clone(), BASE.to("tpu")
    for t in (host, device):
        t[0] = t[1]
        t[0].copy_(t[0])
    same(device, host)


# ---- storage


def test_a_view_past_the_storage_is_refused():
    x = torch.ones(4, device="tpu")
    with pytest.raises(RuntimeError, match="out of bounds|reaches element"):
        x.as_strided((3,), (2,), 1)
    assert x.sum().item() == 4


def test_the_buffer_keeps_the_dims_of_the_first_write():
    x = torch.empty(4, 6, device="tpu")
    assert extension.storage_form(x) is None
    x.t().copy_(torch.ones(6, 4))
    assert extension.storage_form(x) == (torch.float32, [4, 6])
    x.view(-1)[5:9] = 0
    assert x.sum().item() == 20
