from __future__ import annotations

import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad_norm_

from ampdoctor.hooks.callbacks import on_clip


def parameters():
    made = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    made[0].grad, made[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    return made


def test_the_norm_is_heard_however_it_was_imported_and_the_clipping_is_the_same():
    watched, bare = parameters(), parameters()
    heard = []
    with on_clip(heard.append) as hears:
        before = clip_grad_norm_((p for p in watched), 1.0)
    assert hears
    expected = clip_grad_norm_(bare, 1.0)
    (clip,) = heard
    assert clip.total is before
    assert torch.equal(before, expected)
    assert (clip.max_norm, clip.norm_type) == (1.0, 2.0)
    assert clip.gradients == {id(p.grad) for p in watched if p.grad is not None}
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(watched[:2], bare[:2], strict=True))


def test_another_norm_says_so_and_a_norm_of_ones_own_is_of_an_unknown_type():
    made, heard = parameters(), []
    with on_clip(heard.append):
        clip_grad_norm_(made, 1.0, norm_type=float("inf"))
        utils.clip_grads_with_norm_(iter(made), 2.0, torch.tensor(5.0))
        utils.clip_grads_with_norm_(made[0], torch.tensor(2.0), utils.get_total_norm([made[0].grad]))
        clip_grad_norm_(parameters()[2], 1.0)  # it has no gradient
    assert [clip.norm_type for clip in heard] == [float("inf"), None, 2.0]
    assert [len(clip.gradients) for clip in heard] == [2, 2, 1]
