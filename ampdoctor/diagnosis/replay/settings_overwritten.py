"""AMP411: loading the scaler's state overwrites the run's own settings."""

from __future__ import annotations

import math

from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.diagnosis.replay.run_scaler import plain, run_scaler_finding
from ampdoctor.diagnosis.scaler.scaler_finding import FRESH_SCALER
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.run_facts import ResumedScaler

RULE = register(
    "AMP411",
    "settings-overwritten",
    "Loading the scaler's state overwrites the run's own settings",
    worst="warning",
    commands=REPLAYED,
)

LOADED = ("growth_factor", "backoff_factor", "growth_interval")
"""Settings that `load_state_dict` replaces together with the scale and the count of clean steps (torch's GradScaler);
the scale is state, and meant to be replaced."""


def overwritten_finding(scalers: ResumedScaler) -> Finding | None:
    """Settings of the run that are lost when it loads the checkpoint's scaler state (AMP411).

    A warning where the replay's loading replaced what the run asks for. A note where the run handed over a scaler that
    the replay leaves as it is, but which differs from GradScaler's defaults and from the checkpoint: a resumed run that
    loads the state loses that.
    """
    lost: dict[str, dict[str, float]] = {}
    kept = True
    for name in LOADED:
        own, file, now = (getattr(one, name) for one in (scalers.own, scalers.file, scalers.now))
        if _same(own, file):
            continue
        replaced = _same(now, file)
        meant = name in scalers.asked if scalers.asked is not None else own != FRESH_SCALER[name]
        if meant and (replaced or scalers.asked is None):
            lost[name] = {"run": own, "checkpoint": file, "replay": now}
            kept = kept and not replaced
    if not lost:
        return None
    pairs = " and ".join(
        f"{name} {plain(of['run'])} (the checkpoint: {plain(of['checkpoint'])})" for name, of in lost.items()
    )
    ends = (
        "a run that loads the checkpoint's scaler state loses that"
        if kept
        else "loading the checkpoint's scaler state replaces that"
    )
    setters = "; ".join(f"scaler.set_{name}({plain(of['run'])})" for name, of in lost.items())
    return run_scaler_finding(
        RULE,
        "note" if kept else "warning",
        f"the run's scaler asks for {pairs}: {ends}",
        {"settings": lost},
        prescription=Prescription(
            kind="code",
            value=setters,
            status="not_run",
            reason="which of the two is meant, only the run's author knows",
            detail=f"after scaler.load_state_dict(...), if the run's own are meant: {setters}",
        ),
    )


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))
