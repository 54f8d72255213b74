"""The training scripts of `fixtures/loops`: what each does, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from ampdoctor.workflows.requests import ReplayRequest

LOOPS = Path(__file__).parents[2] / "fixtures" / "loops"
POLICIES = ("cuda", "native")


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What is wrong with a sick run, found by hand in the bare script."""

    arguments: tuple[str, ...]  # that make the script sick
    policies: tuple[str, ...] = POLICIES  # under the CPU's own some run in fp32
    found: Mapping[str, object]  # code, step, module, op and line of the finding; what does not matter is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script; `silent` is what makes it sick in a way that stays finite, where there is such an argument."""

    name: str  # of its file, without `.py`
    sick: Truth
    silent: Truth | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return LOOPS / f"{self.name}.py"


SCRIPTS = (
    Script(
        name="nanogpt",
        sick=Truth(
            arguments=("--learning_rate=3.0",),
            policies=("cuda",),
            found={
                "code": "AMP201",
                "step": 5,
                "module": "transformer.h.0.attn",
                "op": "aten.matmul",
                "line": "nanogpt.py:94",
            },
        ),
    ),
    Script(
        name="vision_ema",
        sick=Truth(arguments=("--norm-per-image",), found={"code": "AMP204", "step": 6, "tensor": "0.1.0"}),
    ),
    Script(
        name="gan",
        sick=Truth(
            arguments=("--log-loss", "--lrD", "0.02"),
            found={"code": "AMP202", "step": 4, "module": "", "op": "aten.log", "line": "gan.py:148"},
        ),
    ),
    Script(
        name="ppo",
        sick=Truth(
            arguments=("--bf16", "--learning-rate", "5e-5"),
            found={"code": "AMP501", "step": 0, "module": "actor.2", "op": "aten.add_"},
        ),
    ),
    Script(
        name="diffusion",
        sick=Truth(
            arguments=("--zero_snr",),
            found={"code": "AMP202", "step": 4, "module": "", "op": "aten.div", "line": "diffusion.py:242"},
        ),
        silent=Truth(
            arguments=("--no_scaler", "--train_lr", "1e-6"),
            found={"code": "AMP304", "step": 1, "module": "model.final_conv", "op": "aten.conv2d"},
        ),
    ),
)


def each(*scripts: Script, fast: Collection[str] = ()) -> list[object]:
    """Returns scripts under every policy, as pytest's parameters; `make test` runs the `fast` ones, as CUDA casts."""
    return [
        pytest.param(
            script,
            policy,
            id=f"{script.name}-{policy}",
            marks=() if script.name in fast and policy == "cuda" else pytest.mark.slow,
        )
        for script in scripts
        for policy in POLICIES
    ]


def request_of(script: Script, arguments: tuple[str, ...], policy: str, steps: int | None = None) -> ReplayRequest:
    """Returns a request to replay a script's first steps."""
    return ReplayRequest(factory=str(script.path), script_arguments=arguments, policy=policy, steps=steps)
