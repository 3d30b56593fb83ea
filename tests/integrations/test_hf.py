"""Hugging Face libraries on the device, as their users call them; tiny models with random weights, against the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch_tpu.integrations.hf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries themselves


@pytest.fixture(scope="module", autouse=True)
def enabled():
    torch_tpu.integrations.hf.enable()


@pytest.fixture(autouse=True)
def nothing_is_left_of_other_trainings(monkeypatch):
    from accelerate.state import AcceleratorState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in [n for n in os.environ if n.startswith("ACCELERATE_DYNAMO")]:
        monkeypatch.delenv(name)
    torch._dynamo.reset()


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=127,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


IDS = torch.tensor([[5, 17, 99, 4, 31], [60, 8, 8, 42, 3]])


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    llama().save_pretrained(path)
    return path


def test_from_pretrained_with_a_device_map(saved):
    model = transformers.AutoModelForCausalLM.from_pretrained(saved, device_map="tpu")
    assert {p.device.type for p in model.parameters()} == {"tpu"}
    with torch.no_grad():
        torch.testing.assert_close(model(IDS.to("tpu")).logits.cpu(), llama()(IDS).logits)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "cache_implementation": "static"},
        {"num_beams": 2, "do_sample": False},
    ],
    ids=["greedy", "static cache", "beams"],
)
def test_generate_gives_the_tokens_of_the_cpu(options):
    model = llama()
    cpu = {k: v for k, v in options.items() if k != "cache_implementation"}  # its own compiler would take long
    want = model.generate(IDS, max_new_tokens=6, **cpu)
    got = model.to("tpu").generate(IDS.to("tpu"), max_new_tokens=6, **options)
    assert got.tolist() == want.tolist()


def test_continuous_batching(saved):
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    settings = {
        "generation_config": transformers.GenerationConfig(
            max_new_tokens=4, do_sample=False, eos_token_id=127, pad_token_id=0
        ),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32),
    }
    tokens = {}
    for device in ("cpu", "tpu"):
        model = transformers.LlamaForCausalLM.from_pretrained(saved, attn_implementation="sdpa").to(device)
        batch = model.generate_batch([[5, 6, 7], [8, 9]], **settings)
        tokens[device] = [r.generated_tokens for r in batch.values()]
    assert tokens["tpu"] == tokens["cpu"]


def test_sampling_depends_on_the_seed_alone():
    model = llama().to("tpu")
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(model.generate(IDS.to("tpu"), max_new_tokens=6, do_sample=True, top_k=20, top_p=0.9).tolist())
    assert runs[0] == runs[1] != runs[2]


def test_save_and_load_of_device_tensors_with_tied_weights(tmp_path):
    from safetensors.torch import load_file, load_model, save_file, save_model

    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).to("tpu")
    save_model(model, str(tmp_path / "model"))
    other = transformers.GPT2LMHeadModel(config).to("tpu")
    load_model(other, str(tmp_path / "model"))
    assert other.lm_head.weight is other.transformer.wte.weight
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    save_file({"a": torch.arange(3, device="tpu")}, tmp_path / "a")
    for device in ("tpu", "tpu:1", torch.device("tpu:0"), 0):
        loaded = load_file(tmp_path / "a", device=device)["a"]
        assert loaded.device == torch.device("tpu", 1 if device == "tpu:1" else 0)
        assert loaded.tolist() == [0, 1, 2]
    assert load_file(tmp_path / "a")["a"].device.type == "cpu"


# ---- accelerate and what stands on it


def rows(n=8):
    g = torch.Generator().manual_seed(0)
    return [{"input_ids": (t := torch.randint(3, 100, (6,), generator=g)), "labels": t} for _ in range(n)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bf16": True, "gradient_accumulation_steps": 2, "gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "tpu"},
    ],
    ids=["plain", "bf16", "compiled"],
)
def test_trainer(options, tmp_path):
    fixed = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no", "seed": 0}
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=2, learning_rate=1e-2, **fixed, **options
    )
    assert args.device == torch.device("tpu:0")
    trainer = transformers.Trainer(model=llama().train(), args=args, train_dataset=rows())
    before = llama().model.embed_tokens.weight
    result = trainer.train()
    assert trainer.model.device.type == "tpu"
    assert 3 < result.training_loss < 7  # log(128) is 4.85
    assert not torch.equal(trainer.model.get_input_embeddings().weight.cpu(), before)


def test_accelerator(tmp_path):
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator()
    assert accelerator.device == torch.device("tpu:0")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randint(0, 2, (16,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
    for x, y in loader:
        assert x.device.type == "tpu"
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(tmp_path))
    want = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    accelerator.load_state(str(tmp_path))
    assert torch.equal(model[0].weight, want)


def test_lora(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(llama().to("tpu"), config)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2)
    for _ in range(2):
        model(input_ids=IDS.to("tpu"), labels=IDS.to("tpu")).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(llama().to("tpu"), tmp_path, torch_device="tpu")
    with torch.no_grad():
        want = model.eval()(IDS.to("tpu")).logits
        torch.testing.assert_close(again(IDS.to("tpu")).logits, want)
        torch.testing.assert_close(again.merge_and_unload()(IDS.to("tpu")).logits, want, rtol=1e-4, atol=1e-5)


def test_datasets_in_torch_format():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]]})
    data.set_format("torch", device="tpu")
    assert data[0]["x"].device.type == "tpu"
    assert data[:]["x"].tolist() == [[1, 2], [3, 4]]


# ---- diffusers


def test_diffusion_pipeline_gives_the_images_of_the_cpu():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    pipeline = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())
    pipeline.set_progress_bar_config(disable=True)

    def images() -> np.ndarray:
        return pipeline(num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np").images

    want = images()
    pipeline.to("tpu")
    np.testing.assert_allclose(images(), want, atol=1e-4)  # two passes through a float32 network


def test_transformer_of_stable_diffusion_3_compiled():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    ).eval()
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()

    def denoised(call, device: str) -> torch.Tensor:
        scheduler.set_timesteps(4, device=device)
        x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).to(device)
        text, pooled = torch.ones(1, 3, 16, device=device), torch.ones(1, 16, device=device)
        with torch.no_grad():
            for t in scheduler.timesteps:
                noise = call(x, text, pooled, t.expand(1), return_dict=False)[0]
                x = scheduler.step(noise, t, x, return_dict=False)[0]
        return x.cpu()

    want = denoised(model, "cpu")
    compiled = torch.compile(model.to("tpu"), backend="tpu", fullgraph=True)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):  # one graph for all steps
        torch.testing.assert_close(denoised(compiled, "tpu"), want, rtol=1e-4, atol=1e-5)


# ---- enable() itself


def test_enable_comes_too_late(monkeypatch):
    from accelerate.state import PartialState

    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    assert PartialState().device.type == "cpu"
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE")
    with pytest.raises(RuntimeError, match=r"chosen the device cpu[\s\S]*Fix: call"):
        torch_tpu.integrations.hf._accelerate()
