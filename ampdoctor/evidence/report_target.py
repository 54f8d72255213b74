"""What a report is about and how it was replayed: mappings whose usual keys are known, and that may have others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NotRequired, TypedDict

from ampdoctor.evidence.json_records import Count, Positive, form

Options = Annotated[
    Mapping[Annotated[str, form(pattern="^--[a-z0-9-]+$")], Sequence[str]],
    form("options", description="Options of a command line: each with its values, a flag with none."),
]


class TargetFile(TypedDict):
    """One file of a checkpoint.

    Attributes:
        path: Relative to the checkpoint; its own name where it is one file.
        bytes: Size.
    """

    path: str
    bytes: Count


class TargetMember(TypedDict):
    """A checkpoint of a folder that was read.

    Attributes:
        name: Relative to the folder.
        step: When it was saved; None where that is not known.
        verdict: As the report's, of this one.
        sick: Whether its weights, buffers, moments or scaler are sick, set aside or not.
    """

    name: str
    step: int | None
    verdict: str
    sick: NotRequired[bool]


class TargetExamined(TypedDict):
    """Of a folder of many checkpoints, the one that the findings are about.

    Attributes:
        name: Relative to the folder.
        step: When it was saved; None where that is not known.
    """

    name: str
    step: int | None


class Repository(TypedDict):
    """Where the working directory lies below the root of a repository, or of the workspace of GitHub Actions.

    Attributes:
        root: The root's absolute path.
        folder: The working directory, from the root: annotations and SARIF put it before the report's paths.
    """

    root: str
    folder: str


class TargetAgainst(TypedDict):
    """The older checkpoint of a comparison.

    Attributes:
        path: Its name.
        location: Its path from the working directory.
        global_step: The step counter stored in it.
    """

    path: str
    location: str
    global_step: int | None


class Target(TypedDict, total=False):
    """What was examined: the path and format of a checkpoint, or the factory.

    Attributes:
        path: The checkpoint, or how many paths there are.
        location: The checkpoint's path from the working directory.
        profile: The saved profile.
        factory: The factory, or the script.
        checkpoint: The checkpoint that a replay began with.
        options: What was said of the run beside its factory and checkpoint.
        arguments: The arguments of the user's script: what followed `--`, or of `run` the script.
        advice_options: What was said of whom the advice is for.
        paths: Of several, each.
        files: Of the checkpoint.
        members: Of a folder of many checkpoints, those that were read.
        global_step: The step counter stored in the checkpoint.
        tensors: How many there are.
        bytes: Of all files.
        format: The layout that was recognised (safetensors, hf-trainer, torch-dcp, ...), or how many
            checkpoints a folder holds.
        count: Of a folder of many checkpoints, how many.
        examined: Of a folder of many checkpoints, the one that the findings are about.
        repository: Where the working directory lies below the root of a repository, or of the workspace of
            GitHub Actions; absent where it is the root, or where no root is known.
        against: The older checkpoint of a comparison.
    """

    path: str | None
    location: str | None
    profile: str | None
    factory: str | None
    checkpoint: str | None
    options: Options
    arguments: Sequence[str]
    advice_options: Options
    paths: Sequence[str]
    files: Sequence[TargetFile]
    members: Sequence[TargetMember]
    global_step: int | None
    tensors: int | None
    bytes: Count
    format: str | None
    count: Count
    examined: TargetExamined
    repository: Repository
    against: TargetAgainst


class Kept(TypedDict, total=False):
    """What a watched training has left; paths are from where its command was typed.

    Attributes:
        health: The folder of the log.
        bundle: The bundle of the sick step; absent where it cannot be replayed.
        model: What `--model` has to name for the bundle's model to be made again; absent where it takes no code.
        from_checkpoint: Its weights are not in it: `--checkpoint` has to name a checkpoint from before the step.
    """

    health: str
    bundle: str
    model: str
    from_checkpoint: bool


class Run(TypedDict, total=False):
    """How it was replayed; empty for scan.

    Attributes:
        device: Where it was replayed.
        policy: Whose list of autocast ops the replay followed.
        half_products: How a CPU multiplied fp16: through its fp32 kernels, rounded once; absent where nothing was.
        precision: The precision of the run, or the one that was asked for.
        autocast: Whether the run computes under autocast.
        autocast_on: The device that a script's own autocast names, where that is the CPU; absent otherwise.
        steps: Optimizer steps that were replayed, or watched.
        step: Of a watched training, the sick step.
        optimizer: Of a watched training that steps several, whose step it is: what the script calls it, and its kind.
        kept: Of a watched training, what it has left.
        replays: Steps that were run in all, those that prove a change included.
        bad_step_replays: How often the first bad step was run as a whole, the fp32 reference included; 0 where
            none is bad.
        deterministic: Whether each step that was run again gave the same values; another call of the factory
            may make another run.
        saved: The file that holds the profile, where it was saved.
        torch: The version of torch.
        torch_shims: What this torch lacks or does otherwise and ampdoctor stands in for, by name; `ampdoctor env`
            explains each. Absent where there is nothing.
        threads: Threads of torch; another number may change last bits.
        notes: What else there is to say of the replay.
    """

    device: str
    policy: Literal["cuda", "native"]
    half_products: Literal["fp32"]
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
    autocast: bool
    autocast_on: Literal["cpu"]
    steps: Count
    step: Count
    optimizer: str
    kept: Kept
    replays: Count
    bad_step_replays: Count
    deterministic: bool | None
    saved: str
    torch: str
    torch_shims: Sequence[str]
    threads: Positive
    notes: Sequence[str]
