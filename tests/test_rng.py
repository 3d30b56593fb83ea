"""Random state: a seed and an offset a device, 16 bytes, the same numbers from the same state wherever it is set."""

from __future__ import annotations

import pickle

import pytest
import torch


def rand(device: str = "tpu", generator: torch.Generator | None = None) -> torch.Tensor:
    return torch.rand(5, device=device, generator=generator).cpu()


def state(seed: int, offset: int = 0) -> torch.Tensor:
    return torch.tensor(list(seed.to_bytes(8, "little") + offset.to_bytes(8, "little")), dtype=torch.uint8)


def test_torch_manual_seed_seeds_every_device():
    torch.manual_seed(5)
    first = rand(), rand("tpu:1")
    torch.manual_seed(5)
    second = rand(), rand("tpu:1")
    assert torch.equal(first[0], first[1])
    assert all(map(torch.equal, first, second))
    assert not torch.equal(rand(), first[0])


def test_seed_of_the_current_device_only():
    torch.manual_seed(1)
    other = torch.tpu.get_rng_state(1)
    torch.tpu.manual_seed(9)
    assert torch.equal(torch.tpu.get_rng_state(), state(9))
    assert torch.equal(torch.tpu.get_rng_state("tpu:1"), other)
    assert torch.tpu.initial_seed() == 9
    with torch.tpu.device(1):
        assert torch.tpu.initial_seed() == 1


def test_manual_seed_all():
    torch.tpu.manual_seed_all(11)
    assert all(torch.equal(s, state(11)) for s in torch.tpu.get_rng_state_all())
    torch.manual_seed(-1)
    assert torch.tpu.initial_seed() == torch.initial_seed() == 2**64 - 1
    with pytest.raises(ValueError, match="Overflow"):
        torch.tpu.manual_seed_all(2**64)


def test_fresh_seeds_differ():
    torch.tpu.manual_seed_all(1)
    torch.tpu.seed()
    first = torch.tpu.initial_seed()
    assert first != 1
    torch.tpu.seed_all()
    assert torch.tpu.initial_seed() != first
    assert len({g.initial_seed() for g in torch.tpu.default_generators}) == 1


def test_the_state_is_seed_and_offset():
    torch.tpu.manual_seed(0x1234567890)
    assert torch.equal(torch.tpu.get_rng_state(), state(0x1234567890))
    torch.rand(3, device="tpu")
    assert torch.equal(torch.tpu.get_rng_state(), state(0x1234567890, 4))  # a multiple of four numbers
    torch.rand(8, device="tpu")
    assert torch.equal(torch.tpu.get_rng_state(), state(0x1234567890, 12))


def test_a_state_set_again_gives_the_same_numbers():
    torch.rand(7, device="tpu")
    before = torch.tpu.get_rng_state()
    want = rand()
    torch.tpu.set_rng_state(before)
    assert torch.equal(rand(), want)
    torch.tpu.set_rng_state(before, "tpu:1")
    assert torch.equal(rand("tpu:1"), want)
    torch.tpu.set_rng_state_all([before, before])
    assert torch.equal(rand(), rand("tpu:1"))


def test_a_wrong_state_is_refused():
    with pytest.raises(RuntimeError, match="RNG state must have 16 bytes, but got 5"):
        torch.tpu.set_rng_state(torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(TypeError, match="ByteTensor"):
        torch.tpu.set_rng_state(torch.zeros(16))
    with pytest.raises(ValueError, match="shorter"):
        torch.tpu.set_rng_state_all([state(1)])


def test_generator():
    g = torch.Generator("tpu")
    assert g.device == torch.device("tpu:0")
    assert torch.Generator("tpu:1").device == torch.device("tpu:1")
    assert g.initial_seed() == torch.Generator().initial_seed()
    default = torch.tpu.get_rng_state()
    assert torch.equal(rand(generator=g.manual_seed(3)), rand(generator=torch.Generator("tpu").manual_seed(3)))
    assert torch.equal(torch.tpu.get_rng_state(), default)
    assert g.get_offset() == 8
    g.set_offset(4)
    assert torch.equal(g.get_state(), state(3, 4))


def test_generator_copies_are_their_own():
    g = torch.Generator("tpu").manual_seed(3)
    rand(generator=g)
    copies = [g.clone_state(), pickle.loads(pickle.dumps(g)), torch.Generator("tpu").set_state(g.get_state())]
    want = rand(generator=g)
    for copy in copies:
        assert copy.device == g.device
        assert torch.equal(rand(generator=copy), want)


def test_default_generators():
    generators = torch.tpu.default_generators
    assert len(generators) == 2
    assert [g.device.index for g in generators] == [0, 1]
    generators[1].manual_seed(77)
    assert torch.equal(torch.tpu.get_rng_state(1), state(77))
    with pytest.raises(RuntimeError, match="tpu:2 does not exist"):
        generators[2]


def test_fork_rng_restores():
    with torch.random.fork_rng(devices=[0, 1], device_type="tpu"):
        inside = rand(), rand("tpu:1"), torch.rand(2)
    assert all(map(torch.equal, inside, (rand(), rand("tpu:1"), torch.rand(2))))


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: torch.randn(6, device="tpu", generator=g),
        lambda g: torch.randint(0, 1000, (6,), device="tpu", generator=g),
        lambda g: torch.randperm(50, device="tpu", generator=g),
        lambda g: torch.empty(6, device="tpu").normal_(generator=g),
        lambda g: torch.empty(6, device="tpu").exponential_(generator=g),
        lambda g: torch.bernoulli(torch.full((64,), 0.5, device="tpu"), generator=g),
        lambda g: torch.multinomial(torch.ones(50, device="tpu"), 6, generator=g),
    ],
    ids=["randn", "randint", "randperm", "normal_", "exponential_", "bernoulli", "multinomial"],
)
def test_each_op_follows_its_generator(draw):
    g = torch.Generator("tpu").manual_seed(21)
    first, second = draw(g), draw(g)
    assert not torch.equal(first, second)
    assert torch.equal(draw(g.manual_seed(21)), first)


def test_numbers_are_uniform_enough():
    x = torch.rand(100_000, device="tpu").cpu()
    assert 0 <= x.min() < x.max() < 1
    torch.testing.assert_close(x.mean().item(), 0.5, atol=0.005, rtol=0)
    torch.testing.assert_close(x.var().item(), 1 / 12, atol=0.002, rtol=0)
    assert abs(torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1]) < 0.02


def test_generator_of_another_device():
    with pytest.raises(RuntimeError, match=r"(?s)^\[aten\..*Expected a 'tpu' device.*found 'cpu'.*E206"):
        rand(generator=torch.Generator())
    with pytest.raises(RuntimeError, match=r"(?s)tpu:5 does not exist.*TPU-E202"):
        torch.Generator("tpu:5")
