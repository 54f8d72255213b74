"""What a bundle says of a library's model makes the library fetch nothing, load no other code, start no program."""

from __future__ import annotations

import socket
import subprocess
import sys
import types

import pytest

from ampdoctor.errors import AmpdoctorError, ReplayError
from ampdoctor.replay.bundles.classes import finding, inert_fields, lora_fields
from ampdoctor.replay.bundles.model import HEADS, ModelBuilder
from ampdoctor.replay.user_files import network_closed

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

HUB = "somebody/kernel"
TINY = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0}
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", "vocab_size": 50, **SIZES}
CLIP = {"model_type": "clip_vision_model", **SIZES, "image_size": 8, "patch_size": 4}


def of(name, attention=None, **fields):
    return {"kind": "transformers", "class": name, "attention": attention, "config": written(fields), "head": None}


def written(value):
    if isinstance(value, dict):
        return {"kind": "dict", "items": [[key, written(one)] for key, one in value.items()]}
    return [written(one) for one in value] if isinstance(value, list) else value


def made_with(module, model, configuration, fields, **kwargs):
    """A model by its constructor, with a configuration inside its arguments."""
    config = f"transformers.models.{module}.configuration_{module}:{configuration}"
    return {
        "kind": "made",
        "made": {
            "class": f"transformers.models.{module}.modeling_{module}:{model}",
            "args": [{"kind": "config", "class": config, "fields": written(fields)}],
            "kwargs": kwargs,
        },
    }


def llava(text, vision):
    return of("LlavaForConditionalGeneration", text_config={**LLAMA, **text}, vision_config={**CLIP, **vision})


SAID = {
    "the manifest's attention": of("GPT2LMHeadModel", HUB, **TINY),
    "flash attention, whose kernel the hub has": of("LlamaForCausalLM", "flash_attention_2", **LLAMA),
    "the library's own key": of("GPT2LMHeadModel", **TINY, _attn_implementation=HUB),
    "a nested configuration": llava({"attn_implementation": HUB, "_attn_implementation": HUB}, {}),
    "experts": of("LlamaForCausalLM", **LLAMA, experts_implementation=HUB, _experts_implementation=HUB),
    "kernels": of("LlamaForCausalLM", **LLAMA, use_kernels=True, kernel_config={"kernel_mapping": {"RMSNorm": HUB}}),
    "remote code": of("GPT2LMHeadModel", **TINY, auto_map={"AutoConfig": f"{HUB}--c.C"}, trust_remote_code=True),
    "a backbone of the hub's": of("DetrForObjectDetection", backbone=HUB, backbone_config=None),
    "timm below": of("DetrForObjectDetection", backbone_config={"model_type": "timm_backbone", "backbone": HUB}),
    "weights of a speaker": of(
        "Wav2Vec2ForCTC", target_lang="eng", adapter_attn_dim=4, hidden_size=16, num_attention_heads=2
    ),
    "a configuration inside arguments": made_with(
        "gpt2", "GPT2LMHeadModel", "GPT2Config", {**TINY, "attn_implementation": HUB, "_attn_implementation": HUB}
    ),
    "an argument of a constructor": made_with(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "adapter_attn_dim": 4},
        target_lang="eng",
    ),
}
REACHES_OUT = ("an argument of a constructor",)
"""What the library fetches by itself: it is refused the network, and the sentence says so."""


@pytest.fixture
def asked(monkeypatch):
    """Returns the list of what was asked of the hub; every way to it is one that the network is behind."""
    import huggingface_hub
    from transformers import modeling_utils
    from transformers.integrations import hub_kernels
    from transformers.utils import hub

    asked = []

    def noting(name):
        def note(*args, **kwargs):
            asked.append((name, args[:3]))
            raise OSError(name)

        return note

    for module, names in (
        (modeling_utils, ("lazy_import_flash_attention",)),
        (hub_kernels, ("load_and_register_attn_kernel", "get_kernel", "get_kernel_hub", "lazy_load_kernel")),
        (huggingface_hub, ("hf_hub_download", "snapshot_download", "list_repo_files", "model_info")),
        (huggingface_hub.HfApi, ("repo_exists", "model_info", "repo_info")),
        (hub, ("hf_hub_download", "cached_files")),
        (subprocess, ("Popen",)),
    ):
        for name in names:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, noting(name))
    monkeypatch.setitem(sys.modules, "kernels", type(sys)("kernels"))
    monkeypatch.setattr(sys.modules["kernels"], "get_kernel", noting("kernels.get_kernel"), raising=False)
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda *_: True, raising=False)
    return asked


@pytest.mark.parametrize("name", [name for name in SAID if name not in REACHES_OUT])
def test_no_model_of_a_strangers_asks_the_hub(asked, name):
    try:
        made = ModelBuilder("b", None, lambda _said: None).model(SAID[name])
    except (AmpdoctorError, ImportError, ValueError, TypeError, AttributeError, RuntimeError):
        made = None  # a stranger's file may be refused: what counts is that nobody was asked
    assert asked == []
    if made is not None:
        parts = [one for one in made.modules() if hasattr(one, "config")]
        assert {part.config._attn_implementation for part in parts} <= {"sdpa", "eager", None}


def test_torchs_own_attention_is_as_it_was(asked):
    notes = []
    made = ModelBuilder("b", None, notes.append).model(of("GPT2LMHeadModel", "eager", **TINY))
    assert made.config._attn_implementation == "eager"
    assert (asked, notes) == ([], [])


@pytest.mark.parametrize("attention", [HUB, "flash_attention_2"])
def test_another_attention_is_named_also_where_there_is_a_gpu(asked, monkeypatch, attention):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    notes = []
    made = ModelBuilder("b", None, notes.append).model(of("GPT2LMHeadModel", attention, **TINY))
    assert made.config._attn_implementation == "sdpa"
    assert [f"attention by {attention!r}" in note for note in notes] == [True]
    assert asked == []


def test_an_architecture_keeps_its_numbers_and_words():
    kept = {
        "conv_kernel": [10, 3],
        "kernel_size": 3,
        "drop_path_rate": 0.1,
        "use_mamba_kernels": False,
        "hidden_act": "gelu",
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "id2label": {0: "yes/no"},
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
        "pad_token_id": 0,
        "tokenizer_class": "X",
        "problem_type": "regression",
        "backbone": "resnet50",
        "use_timm_backbone": True,
    }
    acting = {"use_pretrained_backbone": True, "_name_or_path": "a/b", "checkpoint_path": "/x.pth", "auto_map": {}}
    assert inert_fields({**kept, **acting}) == kept
    deep = {"text_config": {"vision_config": [{**kept, **acting}]}}
    assert inert_fields(deep) == {"text_config": {"vision_config": [kept]}}


def test_an_adapter_names_no_module_and_no_file():
    said = {"r": 2, "target_modules": ["c_attn"], "megatron_core": "os", "megatron_config": {"a": 1}, "eva_config": {}}
    assert lora_fields(said) == {"r": 2, "target_modules": ["c_attn"]}


def test_of_torch_only_layers_may_be_named():
    find = finding(None)
    assert find("torch.nn.modules.linear", "Linear") is not None
    assert find("torch.fx.graph_module", "GraphModule") is None
    assert find("torch.jit._script", "RecursiveScriptModule") is None


def refused(said):
    with pytest.raises(ReplayError, match=r"asks for the network \(huggingface\.co\), and nothing is fetched"):
        ModelBuilder("b", None, lambda _said: None).model(said)


def fetching(_model, asked="huggingface.co"):
    socket.getaddrinfo(asked, 443)


def test_what_a_library_fetches_by_itself_is_refused(monkeypatch):
    monkeypatch.setattr(transformers.Wav2Vec2ForCTC, "load_adapter", lambda *_, **__: fetching(None))
    refused(SAID["an argument of a constructor"])


def test_a_librarys_class_by_the_kind_of_lightning_fetches_nothing(monkeypatch):
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "__init__", fetching)
    named = {"class": "transformers.models.gpt2.modeling_gpt2:GPT2LMHeadModel"}
    refused({"kind": "lightning", **named, "hparams": {"asked": "huggingface.co"}})


def test_a_function_that_gives_a_model_another_forward_fetches_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_library", types.SimpleNamespace(__version__="1", give=fetching))
    monkeypatch.setitem(HEADS, "its head", ("a_library", "give"))
    arguments = {"asked": "huggingface.co"}
    refused({**SAID["the library's own key"], "head": {"name": "its head", "arguments": arguments}})


@pytest.mark.parametrize(
    "act",
    [
        lambda: socket.getaddrinfo("localhost", 80),
        lambda: socket.socket().connect(("127.0.0.1", 9)),
        lambda: subprocess.run(["true"], check=False),
    ],
    ids=["name", "connection", "program"],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_network_is_closed_inside_and_open_again_after(act):
    with network_closed() as asked, pytest.raises(ConnectionError, match="is closed while"):
        act()
    assert len(asked) == 1
    with network_closed() as inner:
        pass
    assert inner == []
    subprocess.run(["true"], check=True)
