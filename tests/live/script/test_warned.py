"""A watched script prints the warnings of the bare one: no fewer, none twice, none of ours, and none is raised."""

import re
import subprocess

import pytest

SCRIPT = """
import sys, warnings
import torch
from torch import nn

kind = sys.argv[1].split("+")

def old(x):
    warnings.warn("old", FutureWarning, stacklevel=2)
    return x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        warnings.warn("in the forward", FutureWarning)
        if torch.is_autocast_enabled("cpu"):
            warnings.warn("under autocast")
        return self.layers(old(x))

class Loss(nn.Module):
    def forward(self, x):
        warnings.warn("of the loss")
        return x.square().mean()

torch.manual_seed(0)
model, loss_of = Model(), Loss()
model.layers[0].register_forward_hook(lambda *_: warnings.warn("in a hook", stacklevel=2))
model.layers[2].weight.register_hook(lambda _: warnings.warn("of a gradient", stacklevel=1))
if "global" in kind:
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
if "error" in kind:
    warnings.simplefilter("error")
    warnings.filterwarnings("default", category=FutureWarning)
    warnings.filterwarnings("default", message="in a hook|of the loss|of a gradient|under autocast|the end")
called = torch.compile(model, backend="eager") if "compiled" in kind else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for step in range(6):
    optimizer.zero_grad()
    x = torch.randn(3, 4)
    if step == 2 and "sick" in kind:
        x[0, 0] = float("nan")
    with torch.autocast("cpu", torch.bfloat16, enabled=step > 2):
        output = called(x)
    loss = loss_of(old(output.float()))
    with torch.no_grad():
        model(x)
    if step == 3:
        warnings.filterwarnings("ignore", message="somebody else's")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
warnings.warn("the end")
print(*warnings.filters, sep="\\n")
"""


def warned(process):
    """What Python shows of warnings, and what the script prints; not the report, where there is one.

    Without the line of torch's own that calls a forward: a module with hooks has another one than a module without.
    """
    shown = [line for line in process.stderr.splitlines() if "Warning: " in line]
    return process.returncode, process.stdout, [re.sub("(nn/modules/module.py):[0-9]+", r"\1", line) for line in shown]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sick", ()),
        pytest.param("healthy+compiled+error", (), marks=SLOW),
        pytest.param("sick+compiled+global", ("-W", "once"), marks=SLOW),
        pytest.param("healthy", ("-W", "error"), marks=SLOW),
        pytest.param("sick", ("-W", "error", "-W", "default::FutureWarning", "-W", "always::UserWarning"), marks=SLOW),
    ],
)
def test_the_warnings_are_those_of_the_bare_script(python, tmp_path, kind, options):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run(*command):
        return subprocess.run(
            [python, *options, *command, str(script), kind],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    bare, watched = run(), run("-m", "ampdoctor", "run", "--fail-on", "never", "--health", "health")
    assert "Warning: " in bare.stderr
    assert warned(watched) == warned(bare), watched.stderr
    assert ("AMP204" in watched.stderr) is ("sick" in kind and bare.returncode == 0)
