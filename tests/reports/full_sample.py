"""A report in which every list has something, with a name of choice wherever a name from outside can stand."""

from __future__ import annotations

from dataclasses import replace

from ampdoctor.evidence.checkpoint_stats import TensorRow
from ampdoctor.evidence.json_records import from_plain
from ampdoctor.evidence.location import Source, Where
from ampdoctor.evidence.report import (
    BaselineSection,
    Check,
    Configuration,
    ErrorNote,
    Finding,
    Prescription,
    Report,
    Skipped,
    Suppressed,
)
from ampdoctor.evidence.report_scaler import EmittedSettings, SettingBound
from ampdoctor.evidence.report_scan import TrendFigures, TrendSection
from ampdoctor.evidence.run_facts import PrecisionAdvice, PrecisionRow
from tests.samples import FIXED, SICK

PLAIN = "blocks.0.fc.weight"


def full(name: str = PLAIN) -> Report:
    """Return the report with `name` as the name of everything that others have named."""
    born = Finding(
        code="AMP201",
        name="forward-overflow",
        severity="error",
        message=f"the output of {name} reaches 98304, beyond fp16's 65504",
        cause="forward_overflow",
        where=Where(step=3, phase="forward", module=name, op="aten.linear", nonfinite="inf", source=Source(name, 41)),
        evidence={"layer": name, "inputs": [{"name": name, "amax": 112.25}], name: 1.5},
        help=f"Keep {name} in fp32.",
        prescription=Prescription(
            kind="fp32_modules",
            value=(name,),
            status="verified",
            detail=f"run {name} in fp32",
            alternatives=(Prescription(kind="code", value=name, status="failed", reason=f"{name} differs"),),
        ),
    )
    stored = Finding(
        code="AMP101",
        name="nonfinite-weight",
        severity="warning",
        message=f"{name} holds 3 NaN",
        where=Where(phase="checkpoint", tensor=name, module=name, file=name, nonfinite="nan"),
        evidence={"worst": float("inf"), "unknown": float("nan")},
    )
    noted = replace(stored, code="AMP107", name="saturated-values", severity="note")
    shares = {"flushed": 0.25, "subnormal": 0.125, "overflowed": 0.0}
    return replace(
        SICK,
        command="scan",
        target={"path": name, "location": name, "format": "folder", "files": [{"path": name, "bytes": 5}]},
        run={**SICK.run, "notes": [f"about {name}"]},
        findings=(born, stored, noted),
        checks=(
            Check(name="finite weights", result="ok", headroom={"log2": 7.5}),
            Check(name="finite gradients", result="found"),
            Check(name="loss scaler", result="not_run"),
            Check(name="fp16 range", result=f"the largest is in {name}"),
        ),
        complete=False,
        errors=(ErrorNote(what=name, kind="truncated", message=f"{name} ends early"),),
        skipped=(Skipped(what=name, reason=f"{name} is a Git LFS pointer"),),
        scaler=replace(
            SICK.scaler,
            bound_by=name,
            bounds={"init_scale": SettingBound(value=65536.0, by=f"the largest gradient of {name}")},
            emit=EmittedSettings(framework="torch", language="python", text=f"# {name}\nscale = 1", notes=(name,)),
        ),
        precision=PrecisionAdvice(
            target="v100",
            precision="fp16",
            why=f"{name} fits",
            rows=(PrecisionRow(module=name, type=name, part=name, precision="fp32", reason=f"{name} overflows"),),
            remedies=(f"clip {name}",),
            notes=(f"of {name}",),
        ),
        trend=TrendSection(
            unit="step",
            points=(TrendFigures(name=name, step=1, scale=2.0, loss=0.5),),
            summary=f"{name} is the first sick one",
            first_sick=name,
            last_healthy=name,
            monotone=True,
        ),
        tensors=(
            from_plain(
                TensorRow,
                {
                    **dict.fromkeys(("name", "entry", "module", "group", "file"), name),
                    "role": "weight",
                    "dtype": "float16",
                    "shape": [2, 2],
                    "examined": 4,
                    "counted": 4,
                    "zeros": 0,
                    "nan": 3,
                    "inf": 0,
                    "at_max": 0,
                    "amax": 1.0,
                    "amin": float("nan"),
                    "fp16": shares,
                    "bf16": None,
                },
            ),
        ),
        suppressed=(
            Suppressed(finding=replace(stored, code="AMP108"), by="ignore", reason=f"{name} is known"),
            Suppressed(finding=replace(stored, code="AMP109"), by="baseline", reason=name),
        ),
        configuration=Configuration(file=name),
        baseline=BaselineSection(
            file=name,
            new=3,
            written=False,
            known=1,
            fixed=(replace(FIXED, code="AMP110", module=name, tensor=name, file=name, message=f"{name} was negative"),),
        ),
        profile={**SICK.profile, "sites": [{**SICK.profile["sites"][0], "name": name, "module": name}]},
    )
