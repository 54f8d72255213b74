"""The whole way: a run that fails is diagnosed, its report is saved, and with one line the user's own loop trains."""

from __future__ import annotations

import pytest
import torch

import ampdoctor
from ampdoctor.reports.json_report import render_json
from fixtures.corpus import runs

CORPUS = "fixtures/corpus/runs.py:make_run"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def report_of(factory, path, **arguments):
    """What the command line saves; this machine trains under the CPU's own autocast, so the replay does too."""
    report = ampdoctor.bisect_nan(ampdoctor.ReplayRequest(factory=factory, arguments=arguments, policy="native"))
    path.write_text(render_json(report))
    return str(path)


def trains(model, batches, loss_of, *, optimizer, scaler, region):
    """A plain AMP loop over at least five steps; are loss, gradients and weights always finite?"""
    fine, step = True, 0
    while step < 5:
        for batch in batches():
            step += 1
            optimizer.zero_grad(set_to_none=True)
            with region():
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            gradients = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
            scaler.step(optimizer)
            scaler.update()
            fine &= all(bool(t.isfinite().all()) for t in (loss, *gradients, *model.parameters()))
    return fine


def from_the_corpus(case, report=None):
    module = runs.load_case(case)
    amp = module.AMP
    torch.manual_seed(0)
    model = module.make_model()
    optimizer = getattr(module, "make_optimizer", runs._default_optimizer)(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=amp["init_scale"], enabled=amp["scaler"])
    handle = report and ampdoctor.apply(model, report, optimizer=optimizer, scaler=scaler)
    try:
        return trains(
            model,
            module.make_batches,
            module.loss_fn,
            optimizer=optimizer,
            scaler=scaler,
            region=lambda: torch.autocast("cpu", dtype=DTYPES[amp["dtype"]], enabled=amp["autocast"]),
        )
    finally:
        if handle:
            handle.remove()  # another format holds for the whole process


QUICK = ("cosine_similarity_zero_half", "adam_eps_half_embedding")
"""Cures with every `make test`; the others with the slow tests, among them one of a transformer."""
MODULES = [case for case in runs.case_ids() if "fp32_modules" in runs.label(case)["fixed_by"]]
SLOW = dict.fromkeys([case for case in MODULES if case not in QUICK] + ["clip_logit_scale_overflow"])


@pytest.mark.parametrize("case", [*(pytest.param(case, marks=pytest.mark.slow) for case in SLOW), *QUICK])
def test_a_run_of_the_corpus(case, tmp_path):
    report = report_of(CORPUS, tmp_path / "report.json", case=case)
    assert not from_the_corpus(case)
    assert from_the_corpus(case, report)
