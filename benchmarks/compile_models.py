"""Compiled models on "tpu" beside jax.jit, torch eager and Inductor on the CPU, in one run.

    python benchmarks/compile_models.py [--rounds 12] [--cases block train memory]

block: a transformer block (B=1, T=512, D=768, 12 heads), forward, float32 and bfloat16; all sides have the same weights and
their results are compared. train: a step of a GPT-2-small-shaped model (2 layers, T=256, vocabulary 50,257; AdamW), on "tpu"
as one program. memory: the peak of that step on the device, with donation, and without it (each donated array is also held by
somebody else). Sides take turns, a call each; the least counts. Needs the extra ``bench``. One JSON line a case: milliseconds
a side, and the ratios that are meant.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from torch_tpu.compile.train_step import train_step

DIM, HEADS = 768, 12


class Block(nn.Module):
    """A pre-norm transformer block, [B, T, DIM] to the same."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and a feed-forward layer, each added to its input."""
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Token ids [B, T] to the mean loss of the next token."""

    def __init__(self, layers: int = 2, vocabulary: int = 50257, length: int = 256) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, DIM), nn.Embedding(length, DIM)
        self.blocks = nn.Sequential(*[Block(causal=True) for _ in range(layers)])
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss; the output layer is the token embedding."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits = self.norm(self.blocks(x)) @ self.tokens.weight.t()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def jax_block(module: Block, x: torch.Tensor) -> Callable[[], Any]:
    """`jax.jit` of the arithmetic of ``module``, with its weights."""
    kind = jnp.bfloat16 if x.dtype == torch.bfloat16 else jnp.float32
    p = {k: jnp.asarray(v.detach().float().numpy(), kind) for k, v in module.named_parameters()}

    def norm(x: Any, name: str) -> Any:
        wide = x.astype(jnp.float32)
        mean = wide.mean(-1, keepdims=True)
        wide = (wide - mean) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
        return wide.astype(kind) * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x: Any, name: str) -> Any:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    @jax.jit
    def run(x: Any) -> Any:
        b, t, d = x.shape
        q, k, v = linear(norm(x, "norm1"), "qkv").reshape(b, t, 3, HEADS, d // HEADS).transpose(2, 0, 3, 1, 4)
        scores = (q @ k.swapaxes(-1, -2)).astype(jnp.float32) / (d // HEADS) ** 0.5
        y = jax.nn.softmax(scores, -1).astype(kind) @ v
        x = x + linear(y.transpose(0, 2, 1, 3).reshape(b, t, d), "out")
        return x + linear(jax.nn.gelu(linear(norm(x, "norm2"), "up"), approximate=True), "down")

    given = jnp.asarray(x.float().numpy(), kind)
    return lambda: jax.block_until_ready(run(given))


def take_turns(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Least milliseconds of a call of each side."""
    for call in sides.values():
        for _ in range(3):
            call()
    least = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, call in sides.items():
            start = time.perf_counter()
            call()
            least[name] = min(least[name], (time.perf_counter() - start) * 1e3)
    return least


def report(case: str, least: dict[str, float]) -> None:
    """One line of JSON."""
    line: dict[str, Any] = {"case": case, **{k: round(v, 2) for k, v in least.items()}}
    if "jax" in least:
        line["tpu / jax"] = round(least["tpu"] / least["jax"], 3)
    line["tpu / best torch"] = round(least["tpu"] / min(least["eager"], least["inductor"]), 3)
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def block(rounds: int) -> None:
    """Forward of a block."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        module = Block().to(dtype).requires_grad_(False)
        x = torch.randn(1, 512, DIM, dtype=dtype)
        on_device, moved = copy.deepcopy(module).to("tpu"), x.to("tpu")
        compiled, inductor = torch.compile(on_device, backend="tpu"), torch.compile(module, backend="inductor")

        def run(compiled: Any = compiled, moved: torch.Tensor = moved) -> torch.Tensor:
            y: torch.Tensor = compiled(moved)
            torch.tpu.synchronize()
            return y

        sides = {
            "jax": jax_block(module, x),
            "eager": lambda module=module, x=x: module(x),
            "inductor": lambda inductor=inductor, x=x: inductor(x),
            "tpu": run,
        }
        with torch.no_grad():
            near = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
            torch.testing.assert_close(run().cpu(), module(x), **near)
            report(f"block {dtype}", take_turns(sides, rounds))


def train(rounds: int) -> None:
    """A training step: forward, backward, AdamW."""
    torch.manual_seed(0)
    modules = {"eager": Gpt()}
    modules |= {name: copy.deepcopy(modules["eager"]) for name in ("inductor", "tpu")}
    modules["tpu"].to("tpu")
    ids = torch.randint(0, 50257, (1, 256))
    moved = ids.to("tpu")
    optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-4) for name, m in modules.items()}
    compiled = torch.compile(modules["inductor"], backend="inductor")
    update = torch.compile(optimizers["inductor"].step, backend="inductor")
    whole = train_step(modules["tpu"], optimizers["tpu"])

    def eager() -> float:
        loss = modules["eager"](ids)
        loss.backward()
        optimizers["eager"].step()
        optimizers["eager"].zero_grad()
        return float(loss.item())

    def inductor() -> float:
        loss = compiled(ids)
        loss.backward()
        update()
        optimizers["inductor"].zero_grad()
        return float(loss.item())

    def tpu() -> float:
        return float(whole(moved).item())

    report("train step", take_turns({"eager": eager, "inductor": inductor, "tpu": tpu}, rounds))


def memory(rounds: int) -> None:
    """Peak of a training step on the device, MB."""
    torch.manual_seed(0)
    module = Gpt().to("tpu")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    step = train_step(module, optimizer)
    ids = torch.randint(0, 50257, (1, 256)).to("tpu")
    for _ in range(2):
        step(ids)
    found = {}
    for name in ("donated", "not donated"):
        state = [t for s in optimizer.state.values() for t in s.values()] + list(module.parameters())
        held = [] if name == "donated" else [t.detach().clone() for t in state]
        torch.tpu.synchronize()
        torch.tpu.reset_peak_memory_stats()
        step(ids)
        torch.tpu.synchronize()
        found[name] = round(torch.tpu.max_memory_allocated() / 1e6, 1)
        del held
    sys.stdout.write(json.dumps({"case": "memory of a train step", **found}) + "\n")


CASES = {"block": block, "train": train, "memory": memory}


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    for case in args.cases:
        CASES[case](args.rounds)


if __name__ == "__main__":
    main()
