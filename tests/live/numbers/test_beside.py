"""What a watched loop keeps beside its model in dicts, lists and objects: lost ones are told, healthy ones are not."""

from __future__ import annotations

import pytest

import ampdoctor

LOOP = """\
import copy, torch, weakref
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
with torch.no_grad():
    model[0].bias[3] = -70000.0
{setup}
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(40):
    x, y = torch.randn(4, 6), torch.randn(4, 1)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        {each}
        if step == {at}:
            {once}
"""
NAMED = "for k, p in model.named_parameters()"
DICT = f"shadow = {{k: p.detach().clone() {NAMED}}}"
LIST = "shadow = [p.detach().clone() for p in model.parameters()]"
MIX = "[s.mul_(0.9).add_(p, alpha=0.1) for s, p in zip(shadow, model.parameters())]"
HALF = "[s.copy_(s.half()) for s in {}]"
ANEW = f"shadow = {{k: shadow[k] * 0.9 + p * 0.1 {NAMED}}}"
REGISTERED = f"""class EMA:
    def __init__(self, model, decay):
        self.model, self.decay, self.shadow, self.backup = model, decay, {{}}, {{}}
        self.shadow = {{k: p.data.clone() {NAMED}}}
    def update(self):
        for k, p in self.model.named_parameters():
            self.shadow[k] = ((1.0 - self.decay) * p.data + self.decay * self.shadow[k]).clone()
    def to_half_and_back(self):
        self.shadow = {{k: s.half().float() for k, s in self.shadow.items()}}
class Trainer: pass
trainer = Trainer()
trainer.callbacks = [Trainer()]
trainer.callbacks[0].ema = EMA(model, 0.9)"""
SHADOW_PARAMS = """class ExponentialMovingAverage:
    def __init__(self, parameters):
        parameters = list(parameters)
        self.shadow_params = [p.clone().detach() for p in parameters if p.requires_grad]
        self._params_refs = [weakref.ref(p) for p in parameters]
        self.collected_params = None
    def update(self):
        for s, p in zip(self.shadow_params, self._params_refs):
            s.sub_(0.1 * (s - p()))
ema = ExponentialMovingAverage(model.parameters())"""
IN_A_MODULE = """class Lit(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model
        self.averages = {k: p.detach().clone() for k, p in model.named_parameters()}
    def forward(self, x): return self.net(x)
lit = Lit()"""
OF_SHADOW = """
    def update():
        for k, p in model.named_parameters():
            shadow[k] = 0.9 * shadow[k] + 0.1 * (p.half() if half else p)
    return update"""
CLOSURE = f"""def averaged(model, half):
    shadow = {{k: p.detach().clone() {NAMED}}}{OF_SHADOW}
update = averaged(model, HALF)"""
SLOTS = f"""class EMA:
    __slots__ = ('_kept', 'unbound')
    def __init__(self, shadow): self._kept = shadow
    def update(self, half):
        for k, p in model.named_parameters():
            self._kept[k] = 0.9 * self._kept[k] + 0.1 * (p.half() if half else p)
ema = EMA({DICT[9:]})"""
PARTIAL = f"""import functools
def up(shadow, half):
    for k, p in model.named_parameters():
        shadow[k] = 0.9 * shadow[k] + 0.1 * (p.half() if half else p)
update = functools.partial(up, {DICT[9:]})"""
QUEUE = "import collections\nlast = collections.deque([copy.deepcopy(model)], maxlen=2)"
FLAT = "flat = nn.utils.parameters_to_vector(model.parameters()).detach()"
LOST = [
    (DICT, ANEW, "shadow = {k: s.half().float() for k, s in shadow.items()}", "AMP114", "shadow.0.bias"),
    (LIST, MIX, HALF.format("shadow"), "AMP114", "shadow[1]"),
    (
        REGISTERED,
        "trainer.callbacks[0].ema.update()",
        "trainer.callbacks[0].ema.to_half_and_back()",
        "AMP114",
        "trainer.callbacks[0].ema.shadow.0.bias",
    ),
    # Inf - Inf: the cast does not show any more
    (SHADOW_PARAMS, "ema.update()", HALF.format("ema.shadow_params"), "AMP101", "ema.shadow_params[1]"),
    (IN_A_MODULE, "pass", HALF.format("lit.averages.values()"), "AMP114", "lit.averages.0.bias"),
    (FLAT, f"flat = 0.9 * flat + 0.1 * {FLAT[7:]}", "flat = flat.half().float()", "AMP101", "flat"),
    (CLOSURE.replace("HALF", "True"), "if step > 16: update()", "pass", "AMP114", "update.shadow.0.bias"),
    (SLOTS, "if step > 16: ema.update(True)", "pass", "AMP114", "ema._kept.0.bias"),
    (PARTIAL, "if step > 16: update(True)", "pass", "AMP114", "update[0].0.bias"),
    (QUEUE, "pass", "last[0].half(); last[0].float()", "AMP114", "last[0].0.bias"),
]
HEALTHY = [
    (DICT, ANEW, "old = {k: s.half().float() for k, s in shadow.items()}"),
    (SHADOW_PARAMS, "ema.update()", "ema.collected_params = [p.clone() for p in model.parameters()]"),
    (CLOSURE.replace("HALF", "False"), "if step > 16: update()", "pass"),
    (LIST, MIX, "lost = [torch.full_like(s, float('nan')) for s in shadow]"),
    ("best = [torch.full((8,), float('inf'))]", "best[0] = torch.minimum(best[0], model[0].bias)", "pass"),
    ("kept = {'mask': torch.zeros(8)}", "pass", "kept['mask'] = torch.where(torch.arange(8) > 3, float('-inf'), 0.0)"),
    ("scores = torch.zeros(8)", "scores = torch.zeros(8)", "scores = torch.full((8,), float('inf'))"),
    # scores of weights: -inf where one is pruned, and not where a weight is beyond fp16
    (DICT, "pass", f"shadow = {{k: p.abs().masked_fill(p.abs() < 0.2, float('-inf')) {NAMED}}}"),
    ("losses = []", "losses.append(loss.detach() * float('inf'))", "pass"),
]


def watched(text, folder):
    """The report of a watch over a script of this text; None if it has found nothing."""
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    code = compile(text, str(script), "exec")
    with ampdoctor.watch(folder=folder / "kept", every=10, tell=lambda _: None) as watch:
        exec(code, {"__name__": "trained"})
    return watch.report


@pytest.mark.parametrize(("kept", "name"), [(one[:4], one[4]) for one in LOST])
def test_a_copy_of_the_weights_that_is_lost_is_named(kept, name, tmp_path):
    setup, each, once, code = kept
    report = watched(LOOP.format(setup=setup, each=each, at=17, once=once), tmp_path)
    (finding,) = report.findings
    assert (finding.code, finding.where.tensor, finding.where.step) == (code, name, 20)
    assert finding.evidence["finite_after"] == 16


@pytest.mark.parametrize(("setup", "each", "once"), HEALTHY)
def test_what_harms_nothing_is_not_told(setup, each, once, tmp_path):
    assert watched(LOOP.format(setup=setup, each=each, at=19, once=once), tmp_path) is None


KEPT_GRADIENTS = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=6)
kept = {}
for step in range(40):
    x, y = torch.randn(4, 6), torch.randn(4, 1)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), y, reduction="sum")
    scaler.scale(loss).backward()
    BEFORE
    scaler.step(optimizer)
    scaler.update()
    AFTER
"""
KEEP = "kept.update({k: p.grad.clone() for k, p in model.named_parameters()})"


@pytest.mark.parametrize("place", ["BEFORE", "AFTER"])
def test_gradients_that_a_loop_keeps_of_a_step_that_is_skipped_are_finite_again(place, tmp_path):
    text = KEPT_GRADIENTS.replace(place, KEEP).replace("BEFORE", "pass").replace("AFTER", "pass")
    told = []
    for phase in (1, 4):  # the step that is looked at is skipped, or the one before
        shifted = text.replace("2.0**12", f"2.0**{10 + phase}")
        (tmp_path / str(phase)).mkdir()
        told.append(watched(shifted, tmp_path / str(phase)))
    assert told == [None, None]
