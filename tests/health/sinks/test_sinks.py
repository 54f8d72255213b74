"""Each sink against the real library, which reads its own files back."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.errors import OutputError, UsageError
from ampdoctor.evidence.log_records import ActionLine, CheckpointLine, RunLine, StepLine
from ampdoctor.health.reading.event_files import framed_records
from ampdoctor.health.sinks.export import KINDS, Exporter, export, export_of
from ampdoctor.health.sinks.metrics import Alert, Projection, Row
from ampdoctor.health.sinks.sink import RunFacts
from tests.health.sinks.lines import BEGAN_MS, NAMES, a_run, stamped

LOSSES = [4.0 - step / 4 if step != 7 else math.nan for step in range(10)]
WORST = f"underflow_ratio/{NAMES[99]}"


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    """What a library writes unasked lies in a folder of the test."""
    monkeypatch.chdir(tmp_path)


REQUIRED = os.environ.get("AMPDOCTOR_SINKS") == "required"


def needs(module):
    if REQUIRED:
        return importlib.import_module(module)
    return pytest.importorskip(module, reason=f"{module} is not installed: make sinks")


EXPORT = """
import sys
sys.path.insert(0, sys.argv[1])
from ampdoctor.health.sinks.export import export
from ampdoctor.health.sinks.export import export_of
from tests.health.sinks.lines import a_run
export(a_run(), [export_of(sys.argv[2])])
"""


def exported(text, script=EXPORT, **environment):
    """Export to a library that reads its environment once, in a process of its own."""
    command = [sys.executable, "-c", script, str(Path(__file__).parents[3]), text]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def same(found, expected=LOSSES):
    assert [str(float(value)) for value in found] == [str(float(value)) for value in expected]


# -- TensorBoard -----------------------------------------------------------------------------------------------------


def test_tensorboard(tmp_path):
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    export(a_run(), [export_of("tensorboard=tb")])
    read = EventAccumulator(str(tmp_path / "tb" / "small"))
    read.Reload()
    losses = read.Scalars("ampdoctor/loss")
    same([one.value for one in losses])
    assert [one.step for one in losses] == list(range(10))
    assert losses[3].wall_time == BEGAN_MS / 1000 + 1.5
    assert [one.value for one in read.Scalars(f"ampdoctor/{WORST}")] == pytest.approx([99 / 200])
    assert read.Scalars("ampdoctor/gradient_norm")[4].value == math.inf
    (alert,) = read.Tensors("ampdoctor/alerts/AMP721 loss-spike")
    said = alert.tensor_proto.string_val[0].decode()
    assert (alert.step, said) == (7, "**warning** Step 7: The loss rises 4.2-fold. Lower the rate.")


def test_a_runs_name_is_a_folder_and_no_way_out_of_it(tmp_path):
    needs("tensorboard")
    lines = [stamped(RunLine(name="../../a b/..")), stamped(StepLine(step=0, loss=1.0))]
    export(lines, [export_of("tensorboard=tb")])
    assert [path.name for path in (tmp_path / "tb").iterdir()] == ["-..-a-b-"]


# -- Weights & Biases ------------------------------------------------------------------------------------------------


def records(folder):
    """The records of W&B's own file, of which its library no longer has a reader."""
    pb = needs("wandb.proto.wandb_internal_pb2")
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    with RegularFile(path, path.name) as file:
        for data in framed_records(file, 7, []):
            record = pb.Record()
            record.ParseFromString(data)
            yield record


def test_wandb_offline(tmp_path):
    needs("wandb")
    exported("wandb=health", WANDB_MODE="offline")
    found = list(records(tmp_path))
    run = next(record.run for record in found if record.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("health", "small")
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    steps = [row for row in rows if "ampdoctor/loss" in row]
    same([row["ampdoctor/loss"] for row in steps])
    assert [row["ampdoctor/step"] for row in steps] == list(range(10))
    assert steps[3]["_timestamp"] == BEGAN_MS / 1000 + 1.5
    assert [row[f"ampdoctor/{WORST}"] for row in rows if f"ampdoctor/{WORST}" in row] == [99 / 200]
    said = {(record.alert.title, record.alert.level) for record in found if record.HasField("alert")}
    assert said == {("AMP721 loss-spike", "WARN"), ("AMP201 loss-spike", "ERROR")}
    metric = [record.metric for record in found if record.WhichOneof("record_type") == "metric"]
    assert any(one.step_metric == "ampdoctor/step" for one in metric)


# -- MLflow ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default")  # of a library's own libraries
def test_mlflow(tmp_path, monkeypatch):
    needs("mlflow")
    needs("alembic")
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for _ in range(2):  # the second run finds the experiment
        export(a_run(), [export_of("mlflow=health")])
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("health")
    first, second = client.search_runs([experiment.experiment_id])
    for run in (first, second):
        assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
        losses = sorted(client.get_metric_history(run.info.run_id, "ampdoctor/loss"), key=lambda one: one.step)
        same([one.value for one in losses])
        assert losses[3].timestamp == BEGAN_MS + 1500
        (worst,) = client.get_metric_history(run.info.run_id, f"ampdoctor/{WORST}")
        assert worst.value == 99 / 200
        assert run.data.tags["ampdoctor.alert.AMP721"].startswith("warning: Step 7: The loss rises")


# -- trackio ---------------------------------------------------------------------------------------------------------

READ = """
import json
from trackio.sqlite_storage import SQLiteStorage
told = {"logs": SQLiteStorage.get_logs("health", "small"), "alerts": SQLiteStorage.get_alerts("health")}
print("\\n" + json.dumps(told))
"""


def test_trackio(tmp_path):
    needs("trackio")
    out = exported("trackio=health", EXPORT + READ, TRACKIO_DIR=str(tmp_path / "trackio"))
    told = json.loads(next(line for line in out.splitlines() if line.startswith('{"logs"')))
    rows = [row for row in told["logs"] if "ampdoctor/loss" in row]
    same([row["ampdoctor/loss"] for row in rows])
    assert [row["step"] for row in rows] == list(range(10))
    said = {(one["title"], one["level"], one["step"]) for one in told["alerts"]}
    assert said == {("AMP721 loss-spike", "warn", 7), ("AMP201 loss-spike", "error", 7)}


# -- OpenMetrics -----------------------------------------------------------------------------------------------------


def samples(text, *, openmetrics):
    parser = needs("prometheus_client.openmetrics.parser" if openmetrics else "prometheus_client.parser")
    families = list(parser.text_string_to_metric_families(text))
    found = {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}
    return families, lambda name, **labels: found[name, frozenset(({"run": "small"} | labels).items())]


@pytest.mark.parametrize("name", ["run.om", "run.prom"])
def test_openmetrics_files(tmp_path, name):
    export(a_run(), [export_of(f"openmetrics={name}")])
    text = (tmp_path / name).read_text()
    families, value = samples(text, openmetrics=name == "run.om")
    assert text.endswith("# EOF\n") == (name == "run.om")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert value("ampdoctor_step_total") == 10
    assert value("ampdoctor_skipped_steps_total", reason="overflow") == 1
    assert value("ampdoctor_skipped_steps_total", reason="spike") == 0
    assert value("ampdoctor_alerts_total", cause="loss-spike", severity="warning") == 1
    assert value("ampdoctor_alerts_total", cause="nan_input", severity="error") == 1
    assert value("ampdoctor_rollbacks_total") == 1
    assert value("ampdoctor_running") == 0
    assert (value("ampdoctor_loss"), value("ampdoctor_loss_finite")) == (1.75, 1)
    assert value("ampdoctor_loss_scale") == 2**15
    assert value("ampdoctor_underflow_ratio", layer=NAMES[99]) == 99 / 200
    assert value("ampdoctor_step_duration_seconds_bucket", le="0.5") == 10
    assert value("ampdoctor_step_duration_seconds_bucket", le="0.2") == 0
    assert value("ampdoctor_step_duration_seconds_sum") == 5.0
    assert value("ampdoctor_data_wait_ratio") == 0.25
    assert value("ampdoctor_last_good_checkpoint_timestamp_seconds") == BEGAN_MS / 1000 + 4.2
    assert value("ampdoctor_last_good_checkpoint_age_seconds") >= 0
    assert value("ampdoctor_last_step_timestamp_seconds") == BEGAN_MS / 1000 + 4.5
    facts = {"precision": "fp16", "run_id": "5c1f0e6bd2f7a390", "version": "0.1.0", "world_size": "1"}
    assert value("ampdoctor_run_info", **facts) == 1
    types = {family.name: family.type for family in families}
    assert types["ampdoctor_step_duration_seconds"] == "histogram"
    assert "unknown" not in types.values()


def test_openmetrics_layers_are_those_of_the_last_look(tmp_path):
    sink = export_of("openmetrics=run.om").begin(RunFacts(name="small"))
    sink.log({"underflow_ratio/a": 0.5, "underflow_ratio/b": 0.25, "optimizer2/underflow_ratio/c": 0.5}, 1, time_ms=0)
    sink.log({"loss": 1.0}, 2, time_ms=0)
    sink.log({"underflow_ratio/b": 0.125}, 3, time_ms=0)
    sink.close()
    _, value = samples((tmp_path / "run.om").read_text(), openmetrics=True)
    assert value("ampdoctor_underflow_ratio", layer="b") == 0.125
    assert value("ampdoctor_underflow_ratio", layer="c", optimizer="optimizer2") == 0.5
    with pytest.raises(KeyError):
        value("ampdoctor_underflow_ratio", layer="a")


def promtool():
    found = shutil.which("promtool")
    if found is None:
        assert not REQUIRED
        pytest.skip("promtool is not installed: apt-get install prometheus")
    return found


def test_promtool_finds_nothing_to_say_of_the_file(tmp_path):
    tool = promtool()
    export(a_run(), [export_of("openmetrics=run.prom")])
    with (tmp_path / "run.prom").open() as file:
        done = subprocess.run([tool, "check", "metrics"], stdin=file, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- CSV -------------------------------------------------------------------------------------------------------------


def test_csv(tmp_path):
    for _ in range(2):  # another run is appended, and the columns are named once
        export(a_run(), [export_of("csv=out")])
    tables = {}
    for name in ("steps", "others", "alerts"):
        with (tmp_path / "out" / f"{name}.csv").open(newline="") as file:
            tables[name] = list(csv.DictReader(file))
    assert [row["step"] for row in tables["steps"]] == [str(step) for step in (*range(10), *range(10))]
    same([row["loss"] for row in tables["steps"]], LOSSES * 2)
    assert tables["steps"][3]["memory_active_peak_bytes"] == str(3 * 2**30)
    assert "gradient_headroom_log2" not in tables["steps"][3]
    worst = [row for row in tables["others"] if row["label"] == NAMES[99] and row["metric"] == "underflow_ratio"]
    assert [float(row["value"]) for row in worst] == [99 / 200] * 2
    assert [row["code"] for row in tables["alerts"]] == ["AMP721", "AMP201"] * 2
    (tmp_path / "out" / "steps.csv").write_text("my,own\n1,2\n")
    with pytest.raises(OutputError, match=r"steps.csv has other columns than those of an export, and stays as it is"):
        export(a_run(), [export_of("csv=out")])
    assert (tmp_path / "out" / "steps.csv").read_text() == "my,own\n1,2\n"


# -- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("grafana=x", "no such sink; there are tensorboard=DIR, wandb=PROJECT"),
        ("csv", "say where to: csv=DIR"),
        ("csv=", "say where to: csv=DIR"),
        ("openmetrics=:9105", "openmetrics is written to a path of this machine"),
        ("csv=s3://bucket/logs", "csv is written to a path of this machine"),
    ],
)
def test_what_makes_no_sense_is_said(text, sentence):
    with pytest.raises(UsageError, match="--export") as caught:
        export_of(text)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.module], ids=lambda kind: kind.name)
def test_a_library_that_is_missing_is_named_with_what_installs_it(kind, monkeypatch):
    import tomllib

    monkeypatch.setattr("ampdoctor.health.sinks.export.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=rf"{kind.module} is not installed: pip install 'ampdoctor\[{kind.name}\]'"):
        export_of(f"{kind.name}=x")
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert kind.name in project["optional-dependencies"]


def test_paths_are_meant_from_where_the_command_was_typed(tmp_path, monkeypatch):
    monkeypatch.setattr("ampdoctor.health.sinks.export.find_spec", lambda _: "is there")
    assert export_of("csv=a/b").target == str(tmp_path / "a" / "b")
    assert export_of("mlflow=a/b").target == "a/b"
    assert str(export_of("mlflow=a=b")) == "mlflow=a=b"
    assert export_of("csv=C:/a").target == str(tmp_path / "C:" / "a")  # a disk, where there are disks


@pytest.mark.parametrize("text", ["openmetrics=pipe", "csv=folder", "openmetrics=folder"])
def test_nothing_but_a_file_is_replaced_and_no_pipe_is_waited_for(text, tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder/steps.csv"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match=r"cannot write .*: it is (no regular file|a folder)$"):
        export_of(text)


def test_a_link_stays_and_the_file_that_it_leads_to_is_written(tmp_path):
    (tmp_path / "link.prom").symlink_to("file.prom")
    export(a_run(), [export_of("openmetrics=link.prom")])
    assert (tmp_path / "link.prom").is_symlink()
    assert "ampdoctor_loss" in (tmp_path / "file.prom").read_text()


@pytest.mark.parametrize(
    ("text", "link"), [("csv=out", "out/alerts.csv"), ("openmetrics=out/run.om", "out/.run.om.{pid}.tmp")]
)
def test_a_link_that_lay_in_the_folder_leads_nothing_out_of_it(text, link, tmp_path):
    """A repository comes with a configuration that exports into its own folder, and with the links there."""
    (tmp_path / "out").mkdir()
    precious = tmp_path / "precious"
    precious.write_text("")
    (tmp_path / link.format(pid=os.getpid())).symlink_to(precious)
    with suppress(OutputError):
        export(a_run(), [export_of(text)])
    assert precious.read_text() == ""


def test_no_library_is_imported_before_it_is_needed():
    script = (
        "import sys\nfrom ampdoctor.health.sinks.export import KINDS, export_of\nexport_of('csv=x')\n"
        "heavy = {'torch', 'numpy', 'tensorboard', 'wandb', 'mlflow', 'trackio'}\n"
        "sys.exit(str(heavy & {name.partition('.')[0] for name in sys.modules} or ''))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_one_that_fails_costs_the_others_nothing_and_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"the export csv=.*file has failed: .*File exists"):
        export(a_run(), [export_of("csv=file"), export_of("csv=out"), export_of("openmetrics=run.prom")])
    assert len((tmp_path / "out" / "steps.csv").read_text().splitlines()) == 11
    assert "ampdoctor_step_total" in (tmp_path / "run.prom").read_text()


class Kept:
    """A sink that remembers."""

    def __init__(self):
        self.told = []

    def log(self, metrics, step, *, time_ms):
        self.told.append((step, dict(metrics)))

    def alert(self, finding, step, *, time_ms):
        self.told.append((step, finding.code))

    def flush(self):
        self.told.append("flush")

    def close(self):
        self.told.append("close")


def test_a_sink_that_asks_a_server_gets_a_row_a_second_with_the_worst_of_it(monkeypatch):
    now = 100.0
    monkeypatch.setattr("ampdoctor.health.sinks.export.monotonic", lambda: now)
    sink = Kept()
    exporter = Exporter(lambda _: sink, often=False)
    for step in range(100):
        exporter.add(stamped(StepLine(step=step, loss=100.0 if step == 42 else 1.0)))
        now += 0.125
    exporter.add(stamped(StepLine(step=100, loss=2.0)))
    rows = [told for told in sink.told if isinstance(told, tuple)]
    assert [step for step, _ in rows] == [*range(0, 97, 8)]
    assert [values["loss"] for _, values in rows] == [1.0] * 6 + [100.0] + [1.0] * 6
    exporter.idle()
    assert sink.told[-1] == "flush"
    assert [told for told in sink.told if isinstance(told, tuple)] == rows
    now += 1
    exporter.idle()  # nothing came any more: what waits is the last word before a hang
    assert [told for told in sink.told if isinstance(told, tuple)][-1][0] == 100
    exporter.close()
    assert sink.told[-1] == "close"


def test_an_alert_waits_for_nothing_and_comes_after_what_it_is_about():
    sink = Kept()
    exporter = Exporter(lambda _: sink, often=False)
    for whole in a_run():
        exporter.add(whole)
    exporter.close()
    order = [told for told in sink.told if isinstance(told, tuple)]
    assert [step for step, _ in order] == [0, 9, 7, 7, 9]
    assert [told for _, told in order][2:4] == ["AMP721", "AMP201"]
    assert math.isnan(order[1][1]["loss"])
    assert sink.told[-1] == "close"


# -- what the lines of a log say to sinks --


def said(lines):
    projection = Projection()
    out = [one for whole in lines for one in projection.of(whole)]
    return [*out, *projection.rest()]


def rows(lines):
    return [one for one in said(lines) if isinstance(one, Row)]


def values(line, *before):
    return rows([*map(stamped, before), stamped(line)])[-1].values


def test_a_step_says_what_is_known_of_it_and_no_more():
    assert values(StepLine(step=0)) == {"step_total": 1}
    known = rows(a_run())[3]
    assert (known.step, known.time_ms) == (3, 1_790_000_001_500)
    assert known.values == {
        "step_total": 4,
        "skipped_steps_total/overflow": 0,
        "loss": 3.25,
        "loss_finite": 1,
        "gradient_norm": 2.0,
        "clipped_gradient_norm": 0.5,
        "loss_scale": 65536,
        "learning_rate": 1e-3,
        "step_duration_seconds": 0.5,
        "data_wait_ratio": 0.25,
        "memory_active_peak_bytes": 3 * 2**30,
        "memory_retries_total": 0,
        "tokens_total": 4 * 4096,
        "tokens_per_second": 8192,
    }


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"max_norm": 1.0}, {"gradient_norm": 8.0, "clipped_gradient_norm": 1.0}),
        ({"max_norm": 9.0}, {"gradient_norm": 8.0, "clipped_gradient_norm": 8.0}),
        ({}, {"gradient_norm": 8.0}),
        ({"norm_clipped": True}, {"clipped_gradient_norm": 8.0}),
        ({"norm_scaled": True, "loss_scale": 4.0}, {"gradient_norm": 2.0}),
        ({"norm_scaled": True}, {}),
    ],
)
def test_the_norm_is_unscaled_and_said_to_be_what_it_is(told, expected):
    found = values(StepLine(step=1, gradient_norm=8.0, **told))
    assert {name: value for name, value in found.items() if "norm" in name} == expected


def test_a_look_is_one_row_however_many_lines_it_takes():
    looks = [row for row in rows(a_run()) if "underflow_max_ratio" in row.values]
    assert [row.step for row in looks] == [5]
    found = looks[0].values
    assert found["underflow_max_ratio"] == 99 / 200
    assert found["gradient_headroom_log2"] == 20.0 - 9.9
    assert found["nonfinite_tensors"] == 1
    layers = {name: value for name, value in found.items() if name.startswith("underflow_ratio/")}
    assert layers == {f"underflow_ratio/layers.{i}.weight": i / 200 for i in range(92, 100)}
    assert found["zero_max_ratio"] == 0
    assert not [name for name in found if name.startswith("zero_ratio/")]  # a series for what is zero is none


def test_alerts_and_what_was_done():
    alerts = [one for one in said(a_run()) if isinstance(one, Alert)]
    assert [(one.step, one.finding.code) for one in alerts] == [(7, "AMP721"), (7, "AMP201")]
    assert values(ActionLine(step=3, action="rollback")) == {"rollbacks_total": 1}
    assert values(ActionLine(step=3, action="skip")) == {"skipped_steps_total/policy": 1}
    assert rows([stamped(ActionLine(step=3, action="look"))]) == []
    assert values(CheckpointLine(step=3, path="x", health="good")) == {
        "last_good_checkpoint_timestamp_seconds": 1_790_000_000
    }
    assert rows([stamped(CheckpointLine(step=3, path="x", health="sick"))]) == []
