"""`ampdoctor plan` as people type it."""

from __future__ import annotations

import json

import pytest
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState

from ampdoctor.batching.effects import divisors
from ampdoctor.cli.main import main
from ampdoctor.cli.plan_command import bytes_of
from ampdoctor.errors import UsageError
from ampdoctor.evidence.log_records import LogRecord, RunLine, Stamp, StepLine
from ampdoctor.evidence.log_text import text_of
from ampdoctor.workflows.profile import write_profile
from tests.ranges.known import collected, place, values

THE_CASE = ["--global-batch", "2048", "--gpus", "64x8", "--to-gpus", "16x8"]
DEEPSPEED = {
    "train_batch_size": 2048,
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}


@pytest.fixture
def plan(capsys, check_report):
    """Return a function that runs the command, and returns its code and the section."""

    def run(*arguments):
        code = main(["plan", *map(str, arguments), "--isolated", "--format", "json"])
        return code, check_report(capsys.readouterr().out)["plan"]

    return run


def product(one):
    return one["data_parallel"], one["micro_batch"], one["accumulation"]


def used(section):
    return next(product(one) for one in section["exact"] if one["fits"])


def figures(section):
    return {one["what"]: one["figure"] for one in section["changes"]}


def test_the_case_that_this_began_with(plan):
    code, section = plan(*THE_CASE, "--max-micro-batch", 8)
    assert code == 0
    assert product(section["current"]["plan"]) == (512, 4, 1)
    assert used(section) == (128, 8, 2)
    assert {product(one): one["fits"] for one in section["exact"]} == {
        (128, 16, 1): False,
        (128, 8, 2): True,
        (128, 4, 4): True,
        (128, 2, 8): True,
        (128, 1, 16): True,
    }
    said = figures(section)
    assert said["learning rate"] == said["optimizer steps per epoch"] == "x 1"
    assert said["fp16 activation gradients"] == "4 times smaller"
    assert said["fp16 local weight gradients"] == "2 times smaller to 2.83 times smaller"
    assert said["loss scale"] == "x 2^2 (x 2^1 where weight gradients would overflow)"
    assert said["last partial window"] == "0 of 1 -> up to 1 of 2 micro-batches"
    assert said["BatchNorm statistics"] == "4 -> 8 samples (over all ranks 2048 -> 1024)"
    reduces = [one["figure"] for one in section["changes"] if one["what"] == "reduce in fp16"]
    assert reduces == ["/512 sum -> /128 sum", "sum /512 -> sum /128", "/32 sum /16 -> /16 sum /8"]


def test_tensor_pipeline_and_context_parallel_ranks_see_the_same_samples(plan):
    sizes = ["--tp", 4, "--pp", 2, "--cp", 2, "--to-cp", 1]
    code, section = plan("--global-batch", 256, "--gpus", 512, "--to-gpus", 128, *sizes, "--max-micro-batch", 8)
    assert code == 0
    assert (section["before"]["data_parallel"], section["after"]["data_parallel"]) == (32, 16)
    assert used(section) == (16, 8, 2)
    assert any("Other parallel sizes" in note for note in section["memory"]["notes"])


def test_where_none_is_exact_it_says_how_far_off_and_exits_with_1(plan):
    code, section = plan("--global-batch", 2048, "--gpus", 512, "--to-gpus", 100, "--max-micro-batch", 8)
    assert (code, section["exact"], section["emit"]) == (1, [], None)
    assert [one["off"] for one in section["nearest"]] == [-48] * 4 + [52] * 3
    assert product(section["nearest"][0]) == (100, 5, 4)
    assert product(section["fewer"]) == (64, 8, 4)
    assert "x 0.9766" in figures(section)["learning rate"]


def test_memory_decides_what_fits(plan):
    """7e9 parameters under ZeRO-3: 16 bytes each over 512 ranks are 0.219 GB a device, over 8 ranks 14 GB."""
    job = ["--global-batch", 512, "--gpus", 512, "--to-gpus", 8, "--micro-batch", 1]
    sizes = ["--device-memory", "20GB", "--memory-per-sample", "4GB", "--params", "7B", "--shard-stage", 3]
    code, section = plan(*job, *sizes)
    memory = section["memory"]
    assert (code, memory["max_micro_batch"]) == (0, 1)
    assert memory["states_before"] == pytest.approx(7e9 * 16 / 512, rel=1e-5)
    assert memory["states_after"] == 7e9 * 16 / 8
    assert [one["micro_batch"] for one in section["exact"] if one["fits"]] == [1]
    for one in section["exact"]:
        assert one["bytes_needed"] == pytest.approx(4e9 * one["micro_batch"] + 14e9, rel=1e-5)
        assert one["fits"] is (one["bytes_needed"] <= 20e9)


@pytest.mark.parametrize(("stage", "after"), [(0, 16), (1, 2 + 2 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)])
def test_what_each_stage_cuts(plan, stage, after):
    job = ["--global-batch", 64, "--gpus", 64, "--to-gpus", 8, "--max-micro-batch", 8]
    _, section = plan(*job, "--params", "1e9", "--shard-stage", stage)
    assert section["memory"]["states_after"] == after * 1e9
    assert bool(section["memory"]["notes"]) is (stage > 0)  # they grow, and nobody has said what a sample takes


def test_growing_shards_take_samples_from_what_fitted_before(plan):
    """16 bytes x 8e9 over 64 ranks are 2 GB, over 16 ranks 8 GB: at 2.5 GB a sample the 6 GB more cost 3 samples."""
    job = ["--global-batch", 1024, "--gpus", 64, "--to-gpus", 16, "--micro-batch", 8]
    sizes = ["--memory-per-sample", "2.5GB", "--params", "8e9", "--shard-stage", 3]
    code, section = plan(*job, *sizes)
    assert (code, section["memory"]["max_micro_batch"], section["current"]["fits"]) == (0, 5, False)
    assert used(section) == (16, 4, 16)
    assert "less 3 for the 6 GB" in section["memory"]["limited_by"]


def test_where_not_one_sample_fits_it_exits_with_1(plan):
    sizes = ["--device-memory", "8GB", "--memory-per-sample", "1GB", "--params", "1B"]
    code, section = plan("--global-batch", 8, "--to-gpus", 8, *sizes)
    assert (code, section["memory"]["max_micro_batch"]) == (1, 0)


@pytest.mark.parametrize(
    ("known", "fits", "shown"),
    [
        ([], None, "not known to fit"),
        (["--params", "1B"], None, "not known to fit"),
        (["--max-micro-batch", 4], False, "does not fit"),
        (["--device-memory", "40GB", "--memory-per-sample", "9GB"], False, "does not fit"),
    ],
)
def test_what_is_only_not_known_to_fit_is_not_said_not_to(plan, known, fits, shown, capsys):
    job = ["--global-batch", 2048, "--gpus", 512, "--to-gpus", 64, "--micro-batch", 4, *known]
    code, section = plan(*job)
    assert (code, used(section)) == (0, (64, 4, 8))
    assert {one["micro_batch"]: one["fits"] for one in section["exact"] if not one["fits"]} == dict.fromkeys(
        (32, 16, 8), fits
    )
    for form in ("human", "markdown", "html"):
        assert main(["plan", *map(str, job), "--isolated", "-v", "--format", form]) == 0
        assert capsys.readouterr().out.count(shown) == 3


@pytest.fixture
def watched(tmp_path):
    """Return a function that writes the log of a run of three steps, with the most memory of each."""

    def write(*memory):
        run = RunLine(name="first", tensors=(), optimizers=("AdamW",), precision="fp16", accumulation=2)
        steps = [StepLine(step=n, micro_steps=2, samples=64 * (n + 1), memory_bytes=m) for n, m in enumerate(memory)]
        records = (LogRecord(stamp=Stamp(run_id="r", world_size=8, time_ms=0), line=line) for line in (run, *steps))
        (tmp_path / "log").mkdir()
        (tmp_path / "log" / "log.jsonl").write_text("".join(f"{text_of(record)}\n" for record in records))
        return tmp_path / "log"

    return write


def test_a_watched_run_says_what_is_in_force_and_what_a_sample_takes(plan, watched):
    log = watched(8 * 10**9, 9 * 10**9, 10 * 10**9)
    job = ["--to-gpus", 2, "--device-memory", "10GB", "--params", "1e8", "--shard-stage", 3]
    code, section = plan(log, *job)
    assert (code, product(section["current"]["plan"]), section["global_batch"]) == (0, (8, 4, 2), 64)
    assert section["memory"]["per_sample"] == pytest.approx((10e9 - 0.2e9) / 4)
    assert used(section) == (2, 2, 16)


def test_what_is_in_force_comes_from_a_configuration(plan, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DEEPSPEED))
    code, section = plan(file, "--gpus", 512, "--to-gpus", 128, "--max-micro-batch", 8, "--emit", "deepspeed")
    assert code == 0
    assert product(section["current"]["plan"]) == (512, 4, 1)
    assert [one["figure"] for one in section["changes"] if one["what"] == "reduce in fp16"] == ["/512 sum -> /128 sum"]
    assert json.loads(section["emit"]["text"])["gradient_accumulation_steps"] == 2


def test_a_saved_profile_says_what_is_flushed(plan, tmp_path):
    file = str(tmp_path / "run.ampprofile")
    tensors = {place("fc"): values(-31, count=20_000, spread=3.0), place("fc.weight", "weight_grad"): values(-20)}
    write_profile(file, collected([tensors], loss_scale=2.0**10))
    code, section = plan(*THE_CASE, "--max-micro-batch", 4, "--profile", file)
    flushed = section["flushed"]
    assert (code, flushed["scale"], flushed["init_scale"]) == (0, 2.0**10, 2.0**12)
    (of_fc,) = (one for one in flushed["layers"] if one["layer"] == "fc.output")
    lost = [int(((tensors[place("fc")] * scale).half() == 0).sum()) / 20_000 for scale in (2.0**10, 2.0**8)]
    assert (of_fc["before"], of_fc["after"]) == (pytest.approx(lost[0], rel=1e-5), pytest.approx(lost[1], rel=1e-5))
    assert of_fc["kept"] == of_fc["before"]


def test_a_split_reduce_divides_by_what_the_ranks_allow(plan):
    job = ["--global-batch", 512 * 509, "--gpus", 512, "--to-gpus", 509, "--micro-batch", 1, "--reduce-fp16", "split"]
    _, section = plan(*job)
    assert figures(section)["reduce in fp16"] == "/32 sum /16 -> /2 sum /254.5"


@pytest.mark.parametrize(
    ("arguments", "figure"),
    [
        (["--reduction", "sum"], "over the whole step"),
        (["--reduction", "tokens"], "over the whole step"),
        (["--max-micro-batch", 8], "512 -> 256 means"),
    ],
)
def test_what_a_token_weighs(plan, arguments, figure):
    _, section = plan(*THE_CASE, "--micro-batch", 4, *arguments)
    assert figures(section)["token-weighted averages"] == figure


@pytest.mark.parametrize("reduction", ["sum", "step"])
@pytest.mark.parametrize(
    ("most", "weights", "scale"),
    [
        (64, "16 times larger to 4 times larger", "x 2^0 (x 2^-4 where weight gradients would overflow)"),
        (4, "as before", "x 2^0"),
    ],
)
def test_a_larger_micro_batch_makes_weight_gradients_larger(plan, reduction, most, weights, scale):
    job = ["--micro-batch", 4, "--max-micro-batch", most, "--reduction", reduction]
    _, section = plan("--global-batch", 2048, "--gpus", 512, "--to-gpus", 32, *job)
    said = figures(section)
    assert said["fp16 activation gradients"].startswith("as before")
    assert (said["fp16 local weight gradients"], said["loss scale"]) == (weights, scale)


def test_a_job_without_fp16_has_no_shares_of_it(capsys, check_report, tmp_path):
    file = str(tmp_path / "run.ampprofile")
    write_profile(file, collected([{place("fc"): values(-31)}], loss_scale=2.0**10))
    job = ["plan", *THE_CASE, "--max-micro-batch", "8", "--profile", file, "--format", "json", "--isolated"]
    for precision, shown in (("bf16", False), ("fp16", True)):
        assert main([*job, "--precision", precision]) == 0
        report = check_report(capsys.readouterr().out)
        assert bool(report["plan"]["flushed"]) is shown
        assert [f"a job in {precision} has no loss scale" in one["reason"] for one in report["skipped"]] == [True] * (
            not shown
        )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpus", "0", "--max-micro-batch", "1"], "--gpus 0: a job needs at least 1 device"),
        (["--gpus", "8", "--tp", "3", "--max-micro-batch", "1"], "8 devices are not divided by tensor 3"),
        (["--max-micro-batch", "1"], "no devices are named"),
        (["--to-gpus", "8"], "what fits a device is not known"),
        (["--to-gpus", "8", "--global-batch", "4194304000", "--max-micro-batch", "8"], "counts samples, not tokens"),
        (["--gpus", "8", "--micro-batch", "4", "--accumulation", "4"], "= 128, and not the global batch of 64"),
        (["--gpus", "7", "--to-gpus", "8", "--max-micro-batch", "8"], "are not even, which no job has in force"),
        (
            ["--gpus", "8", "--device-memory", "8GB", "--memory-per-sample", "9GB"],
            "not one sample fits a device of the job",
        ),
        (
            ["--gpus", "8", "--params", "1B", "--state-bytes", "1e308,1e308,1e308", "--micro-batch", "1"],
            "are 0 to 1000",
        ),
        (["--gpus", "8", "--device-memory", "80GB"], "--device-memory says what fits beside"),
        (["--gpus", "8", "--shard-stage", "3", "--max-micro-batch", "1"], "give both"),
        (
            ["--gpus", "8", "--params", "7B", "--shard-stage", "5", "--max-micro-batch", "1"],
            "there is no shard stage 5",
        ),
        (["--gpus", "8", "--params", "1B", "--state-bytes", "2,2", "--max-micro-batch", "1"], "as in 2,2,12"),
        (["--gpus", "8", "--peak-memory", "9GB", "--max-micro-batch", "1"], "a peak memory is of the job in force"),
        (["--to-gpus", "8", "--max-micro-batch", "8", "--profile", "none.st"], "--gpus, and what else is in force"),
    ],
)
def test_nonsense_exits_with_2_and_a_sentence(arguments, sentence, capsys):
    assert main(["plan", "--global-batch", "64", *arguments, "--isolated"]) == 2
    said = capsys.readouterr()
    assert sentence in " ".join(said.err.split())
    assert not said.out


@pytest.mark.parametrize("form", ["human", "markdown", "html", "sarif"])
@pytest.mark.parametrize("ranks", [128, 100])
def test_every_form_shows_it(form, ranks, capsys, tmp_path):
    file = tmp_path / "run.ampprofile"
    write_profile(str(file), collected([{place("fc"): values(-31)}], loss_scale=2.0**10))
    job = ["--global-batch", "2048", "--gpus", "512", "--to-gpus", str(ranks), "--max-micro-batch", "8"]
    asked = ["plan", *job, "--profile", str(file), "--emit", "torchtitan", "--format", form]
    assert main(asked) == (0 if ranks == 128 else 1)
    shown = capsys.readouterr().out
    if form in ("human", "markdown", "html"):
        assert "times smaller" in shown
        assert ("global_batch_size = 2048" in shown) is (ranks == 128)
    if form != "human" and ranks == 100:
        assert "AMP801" in shown or form == "html"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12, 64, 100, 512, 1000])
def test_fsdp_divides_as_torch_does(ranks):
    before, after = divisors(ranks, "split")
    assert before == DefaultState._get_gradient_predivide_factor(ranks)
    assert before * after == ranks


@pytest.mark.parametrize(
    ("text", "size"), [("4GB", 4 * 10**9), ("512 MB", 512 * 10**6), ("1.5GiB", 3 * 2**29), ("2ki", 2048), ("7B", 7)]
)
def test_a_size_has_the_units_that_people_type(text, size):
    assert bytes_of("--bundle-max", text) == size


@pytest.mark.parametrize("text", ["", "4 elephants", "-1GB", "1e9", "0.1B"])
def test_what_is_no_size_is_a_sentence(text):
    with pytest.raises(UsageError, match="--bundle-max"):
        bytes_of("--bundle-max", text)
