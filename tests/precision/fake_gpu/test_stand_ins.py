"""torch's functions in the place of flash_attn's."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch

from ampdoctor.errors import ReplayError
from ampdoctor.precision.fake_gpu import fused_attention
from ampdoctor.precision.fake_gpu.emulate import emulate_cuda
from ampdoctor.precision.fake_gpu.missing_libraries import STAND_INS
from ampdoctor.replay.user_code import explained

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and nothing is emulated")
HALF = torch.float16


def operands(queries, keys, heads=4, of_keys=None):
    generator = torch.Generator().manual_seed(0)
    sizes = ((queries, heads), (keys, of_keys or heads), (keys, of_keys or heads))
    return [torch.randn(2, length, count, 8, generator=generator).half() for length, count in sizes]


def reference(q, k, v, *, scale=None, seen=lambda i, j: True):
    """Attention as it is written down, query by query in float64; i and j count from the last query and key."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    times, (queries, keys) = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    for i in range(queries):
        at = [j for j in range(keys) if seen(i - queries, j - keys)]
        for head in range(q.shape[2] if at else 0):
            scores = torch.einsum("bd,bkd->bk", q[:, i, head].double(), k[:, at, head // times].double())
            scores = scores * (scale or q.shape[-1] ** -0.5)
            out[:, i, head] = torch.einsum("bk,bkd->bd", scores.softmax(-1), v[:, at, head // times].double())
    return out


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        ((6, 6), {}, {}),
        ((6, 6), {"causal": True, "softmax_scale": 0.5}, {"scale": 0.5, "seen": lambda i, j: j <= i}),
        ((3, 7), {"causal": True}, {"seen": lambda i, j: j <= i}),  # the last query stands at the last key
        ((7, 3), {"causal": True}, {"seen": lambda i, j: j <= i}),  # the first queries see nothing, and are zero
        ((6, 6, 4, 2), {"causal": True}, {"seen": lambda i, j: j <= i}),
    ],
)
def test_flash_attention_is_attention(shape, options, said):
    q, k, v = operands(*shape)
    found = fused_attention.flash_attn_func(q, k, v, **options)
    assert found.dtype is HALF
    torch.testing.assert_close(found.double(), reference(q, k, v, **said), atol=4e-3, rtol=0)


def test_packed_and_ragged_sequences():
    q, k, v = operands(5, 5)
    whole = fused_attention.flash_attn_func(q, k, v, causal=True)
    qkv = torch.stack((q, k, v), 2)
    assert torch.equal(fused_attention.flash_attn_qkvpacked_func(qkv, causal=True), whole)

    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    packed, indices, begins, longest, used = fused_attention.unpad_input(qkv, mask)
    assert (begins.tolist(), longest, used.tolist()) == ([0, 3, 8], 5, [3, 5])
    found = fused_attention.flash_attn_varlen_qkvpacked_func(packed, begins, longest, causal=True)
    padded = fused_attention.pad_input(found, indices, 2, 5)
    assert torch.equal(padded, whole * mask[..., None, None])


def test_what_flash_attention_refuses_is_refused():
    q, k, v = operands(4, 4)
    with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
        fused_attention.flash_attn_func(q.float(), k.float(), v.float())
    for asked in ({"softcap": 30.0}, {"alibi_slopes": torch.ones(4)}, {"window_size": (2, 2)}):
        with pytest.raises(ReplayError, match=f"has no {next(iter(asked))}"):
            fused_attention.flash_attn_func(q, k, v, **asked)
    fused_attention.flash_attn_func(q, k, v, window_size=(-1, -1), deterministic=True)


def test_the_users_import_finds_them_and_nobody_else_does():
    before = set(sys.modules)
    with emulate_cuda() as emulation:
        import flash_attn
        from flash_attn import flash_attn_func

        assert flash_attn_func is flash_attn.flash_attn_interface.flash_attn_func
        assert importlib.util.find_spec("flash_attn") is None
        code = compile("import flash_attn.bert_padding", "/opt/lib/site-packages/timm/norm.py", "exec")
        with pytest.raises(ModuleNotFoundError):
            exec(code, {"__name__": "timm.norm"})
    assert "flash_attn is not installed: scaled_dot_product_attention stands in for flash_attn_func." in emulation.notes
    assert not {name for name in set(sys.modules) - before if name in STAND_INS}
    with pytest.raises(ModuleNotFoundError):
        import flash_attn


def test_what_is_installed_is_taken(tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("flash_attn_func = 'its own'")
    monkeypatch.syspath_prepend(tmp_path)
    with emulate_cuda() as emulation:
        import flash_attn

        assert flash_attn.flash_attn_func == "its own"
    assert emulation.notes == ()
    del sys.modules["flash_attn"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import bitsandbytes as bnb", "bitsandbytes needs a GPU and is not here: let the code take torch.optim.AdamW"),
        ("from apex import amp", "apex needs a GPU and is not here: let the code take torch.amp"),
        ("from apex.optimizers import FusedAdam", "apex needs a GPU and is not here: let the code take torch.amp"),
        ("import xformers.ops", "xformers needs a GPU"),
        ("raise ImportError('FlashAttention2 is on: the package flash_attn is missing')", "attn_implementation='sdpa'"),
    ],
)
def test_what_nothing_stands_in_for_is_said_in_one_sentence(code, said):
    with emulate_cuda(), pytest.raises(ImportError) as caught:
        exec(compile(code, "/home/user/train.py", "exec"), {"__name__": "train"})
    assert said in explained(caught.value)


def test_another_missing_module_is_not_explained():
    with pytest.raises(ImportError) as caught:
        importlib.import_module("no_such_module")
    assert explained(caught.value) is None
