"""The corpus grown: each case with its names, seeds, widths, depth, batches and loop changed from outside.

    ampdoctor bisect-nan tests/corpus/variants.py:make_run --arg case='"fp8_e5m2_wrong_max"' \
        --arg changes='{"wrapped": "net", "seed": 3}'

A change is a word with a value; several make one variant. `expected` derives the label from the changes alone:

    seed N          every seed of the script is N higher
    wider NAMES     the widths of these names in the script are twice as large
    deeper N        every stack of the script has N more blocks
    swapped [A, B]  two submodules change places, with their state
    nested NAME     the submodule lies one level deeper, behind a healthy activation that does nothing
    recomputed NAME the submodule runs under activation checkpointing, one level deeper
    wrapped NAME    the whole model is the submodule NAME of another one
    compiled        the model is handed over by torch.compile
    later N         N healthy batches come first
    sooner N        the first N batches are left out
    accumulated N   N batches make a step
    loop            the training step is written out by hand
    fixed           the label's own fix is in place
"""

from __future__ import annotations

import itertools
import re

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampdoctor import TrainingRun
from ampdoctor.precision.cuda_autocast import autocast_policy
from fixtures.corpus import runs

_SEED = re.compile(r"manual_seed\((\d+)\)")
_DEPTH = re.compile(
    r"\b(num_layers|num_hidden_layers|num_decoder_layers|n_layer)=(\d+)|(?<=for _ in range\()(\d+)(?=\)[\])])"
)


class _Delegating(nn.Module):
    """Passes calls and attributes on to the module that it holds under a name of the caller's choice."""

    def __init__(self, held, name):
        super().__init__()
        self.add_module(name, held)
        self._held = name

    def forward(self, *args, **kwargs):
        return self._modules[self._held](*args, **kwargs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_held" not in self.__dict__:
                raise
            return getattr(self._modules[self._held], name)

    def __getitem__(self, key):
        return self._modules[self._held][key]


class _Deeper(_Delegating):
    """One level deeper, with a healthy module of its own before."""

    def __init__(self, held, name):
        super().__init__(held, name)
        self.nothing = nn.Identity()

    def forward(self, *args, **kwargs):
        return super().forward(*(self.nothing(arg) for arg in args), **kwargs)


class _Recomputed(_Delegating):
    def forward(self, *args, **kwargs):
        return checkpoint(self._modules[self._held], *args, use_reentrant=False, **kwargs)


class Float32(_Delegating):
    """A module in fp32, as a user would write it."""

    def forward(self, *args, **kwargs):
        up = lambda x: x.float() if torch.is_tensor(x) and x.is_floating_point() else x  # noqa: E731 - a helper of one line
        with torch.autocast("cpu", enabled=False):
            return super().forward(*map(up, args), **{key: up(value) for key, value in kwargs.items()})


def script(case, changes):
    """The case's module, its text changed."""

    def edit(text):
        if "seed" in changes:
            text = _SEED.sub(lambda m: f"manual_seed({int(m[1]) + changes['seed']})", text)
        for width in changes.get("wider", []):
            text, count = re.subn(rf"\b{width}=(\d+)(?=[,)])", lambda m, width=width: f"{width}={2 * int(m[1])}", text)
            assert count, width
        if "deeper" in changes:
            more = changes["deeper"]
            text, count = _DEPTH.subn(lambda m: f"{m[1]}={int(m[2]) + more}" if m[1] else str(int(m[3]) + more), text)
            assert count, case
        return text

    module = runs.load_case(case, edit)
    if "fixed" in changes:
        _swap_in(module, runs.label(case)["fixed_by"])
    return module


def make_run(case, changes) -> TrainingRun:
    """The variant as a run."""
    module = script(case, changes)
    run = runs.run_of(module)
    if "fixed" in changes:
        _fix(run, runs.label(case)["fixed_by"])
    run.model = _changed_model(run.model, changes)
    given = run.batches
    run.batches = lambda: _changed_batches(given() if callable(given) else given, changes)
    if "accumulated" in changes:
        run.accumulation_steps = changes["accumulated"]
    if "loop" in changes:
        run.step = _step_by_hand
    return run


def write_checkpoint(case, changes, path):
    """The case's checkpoint, for the changed model."""
    module = script(case, changes)
    torch.manual_seed(0)
    module.write_checkpoint(str(path))
    state = torch.load(path)
    before = [name for name, _ in module.make_model().named_parameters()]
    changed = {change: value for change, value in changes.items() if change != "compiled"}
    after = [name for name, _ in _changed_model(module.make_model(), changed).named_parameters()]
    rename = renaming(changes)
    state["model"] = {rename(key): value for key, value in state["model"].items()}
    if "optimizer" in state:
        moments = state["optimizer"]["state"]
        place = {old: after.index(rename(name)) for old, name in enumerate(before)}
        state["optimizer"]["state"] = {place[index]: value for index, value in moments.items()}
    torch.save(state, path)


def renaming(changes):
    """How the changes rename a module or a tensor."""

    def rename(name):
        if "swapped" in changes:
            first, second = changes["swapped"]
            for here, there in ((first, second), (second, first)):
                if name == here or name.startswith(f"{here}."):
                    name = there + name[len(here) :]
                    break
        for change in ("nested", "recomputed"):
            held = changes.get(change)
            if held is not None and (name == held or name.startswith(f"{held}.")):
                name = f"{held}.held{name[len(held) :]}"
        if "wrapped" in changes:
            name = f"{changes['wrapped']}.{name}".strip(".")
        return name

    return rename


def expected(case, changes):
    """The label of the variant."""
    label = dict(runs.label(case))
    rename = renaming(changes)
    owned = label["phase"] == "forward" or label.get("silent_kind") == "frozen"
    if label["culprit_module"] or owned:  # "" is otherwise the loss, the loop or the scaler
        label["culprit_module"] = rename(label["culprit_module"])
    loop = [name for name in label.get("culprit_modules_ok") or [] if not name]
    label["culprit_modules_ok"] = loop + [rename(name) for name in label.get("culprit_modules_ok") or [] if name]
    label["also_culprits"] = [{**one, "module": rename(one["module"])} for one in label.get("also_culprits") or []]
    label["step"], label["micro_batch"] = _moved(label["step"], changes)
    return label


def _moved(step, changes):
    """A step's place in the variant: the step and the micro-batch."""
    return divmod(step + changes.get("later", 0) - changes.get("sooner", 0), changes.get("accumulated", 1))


# -- the changes -------------------------------------------------------------------------------------------------


def _changed_model(model, changes):
    if "swapped" in changes:
        first, second = changes["swapped"]
        held = model.get_submodule(first), model.get_submodule(second)
        _put(model, first, held[1])
        _put(model, second, held[0])
    for change, around in (("nested", _Deeper), ("recomputed", _Recomputed)):
        if change in changes:
            _put(model, changes[change], around(model.get_submodule(changes[change]), "held"))
    if "wrapped" in changes:
        model = _Delegating(model, changes["wrapped"])
    if "compiled" in changes:
        model = torch.compile(model, backend="eager")
    return model


def _put(model, name, module):
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _changed_batches(batches, changes):
    batches = itertools.islice(batches, changes.get("sooner", 0), None)
    if "later" in changes:
        first = next(batches)
        yield from itertools.repeat(first, changes["later"] + 1)
    yield from batches


def _step_by_hand(model, batch, optimizer, scaler, autocast, run):  # noqa: PLR0917 - the names that a step is given
    optimizer.zero_grad()
    with autocast():
        loss = run.loss(model, batch)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def _swap_in(module, fix):
    for name, repaired in fix.get("swap", {}).items():
        setattr(module, name, getattr(module, repaired))
    if "init_scale" in fix:
        module.AMP["init_scale"] = fix["init_scale"]
    if "scaler" in fix:
        module.AMP["scaler"] = fix["scaler"]


def _fix(run, fix):
    for name in fix.get("fp32_modules", []):
        _put(run.model, name, Float32(run.model.get_submodule(name), "held"))
    if "skip_batch" in fix:
        given = run.batches
        run.batches = lambda: [batch for index, batch in enumerate(given()) if index != fix["skip_batch"]]
    if "optimizer" in fix:
        given_optimizer = run.optimizer

        def optimizer(model):
            made = given_optimizer(model)
            for group in made.param_groups:
                group.update(fix["optimizer"])
            return made

        run.optimizer = optimizer
    if "dtype" in fix:
        run.precision = {"bfloat16": "bf16", "float32": "fp32"}[fix["dtype"]]
        if not run.autocast:
            _cast(run, getattr(torch, fix["dtype"]))


def _cast(run, dtype):
    run.model.to(dtype)
    given = run.batches

    def cast(value):
        if isinstance(value, dict):
            return {key: cast(item) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            return tuple(map(cast, value))
        return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value

    run.batches = lambda: map(cast, given())


def fails_as_labelled(case, changes, policy):
    """Does a plain loop show the variant's failure at the labelled step and place? Then the derived label holds.

    What leaves no non-finite value behind, or is there before the first step, is so by the way the case is made.
    """
    label = expected(case, changes)
    finite = label["kind"] == "healthy" or label["nonfinite"] == "none" or label["phase"] in ("checkpoint", "scaler")
    if finite and label["kind"] != "forward_precision":
        return True
    try:
        torch.manual_seed(0)
        plain = Plain(make_run(case, changes), policy)
    except (RuntimeError, IndexError):
        return False  # a width that something else in the script depends on, or an id that rounds up out of its table
    if finite:
        return True
    symptoms = label["symptoms"]
    shown = [symptoms[sink] for sink in ("loss", "grad", "param", "buffer", "state") if symptoms[sink] is not None]
    if not shown:
        return plain.step is None  # silent: it stays finite
    if label.get("silent_kind") and min(shown) > runs.label(case)["step"]:
        return plain.step == _moved(min(shown), changes)[0]  # the first harm stays finite, and is not seen here
    if plain.step != label["step"] or label["phase"] == "data":
        return plain.step == label["step"]
    if label["culprit_module"] and label["phase"] == "forward" and label["cuda_policy"] != "moves":
        at = plain.module or ""
        also = [one["module"] for one in label["also_culprits"]]
        right = [label["culprit_module"], *label["culprit_modules_ok"], *also]
        return any(f"{one}.".startswith(f"{at}." if at else "") or at.startswith(f"{one}.") for one in right)
    loss = symptoms["loss"] == runs.label(case)["step"]
    return label["phase"] == "forward" or (plain.module is None and plain.loss == loss)


# -- what a plain loop sees --------------------------------------------------------------------------------------


class Plain:
    """The variant in a plain loop, without ampdoctor's replay: where the loss, a gradient or the weights first fail.

    Attributes:
        step: First step whose loss, gradient, weight or buffer is non-finite; None where none is.
        module: First module of that step that put out a non-finite value; None where none did.
        loss: The loss of that step was non-finite.
    """

    def __init__(self, run: TrainingRun, policy: str, steps: int = 12):
        self.step = self.module = None
        self.loss = False
        self._first = None
        names = {id(module): name for name, module in run.model.named_modules()}
        handles = [module.register_forward_hook(self._watch(names[id(module)])) for module in run.model.modules()]
        try:
            with autocast_policy(policy):
                self._train(run, steps)
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, name):
        def hook(_module, _args, output):
            outputs = output.values() if isinstance(output, dict) else output
            outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
            bad = any(torch.is_tensor(t) and t.is_floating_point() and not t.isfinite().all() for t in outputs)
            if bad and self._first is None:
                self._first = name

        return hook

    def _train(self, run, steps):
        model, optimizer = run.model, run.optimizer(run.model)
        scaler = run.scaler() if callable(run.scaler) else torch.amp.GradScaler("cpu", enabled=False)
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[run.precision]
        each = run.accumulation_steps
        batches = itertools.islice(run.batches(), steps * each)
        for index, batch in enumerate(batches):
            if index % each == 0:
                self._first = None

            def autocast():
                return torch.autocast("cpu", dtype=dtype, enabled=run.autocast)

            if run.step is not None:
                given = {"model": model, "batch": batch, "optimizer": optimizer, "scaler": scaler, "autocast": autocast}
                given |= {"run": run} if run.step is _step_by_hand else {}
                loss = torch.as_tensor(run.step(**given))
                bad = self._bad(model, loss)
            else:
                with autocast():
                    loss = run.loss(model, batch) / each
                scaler.scale(loss).backward()
                bad = self._bad(model, loss)
                if index % each == each - 1:
                    scaler.step(optimizer)
                    scaler.update()
                    bad = bad or self._bad(model, loss)
                    optimizer.zero_grad()
            if bad:
                self.step, self.module, self.loss = index // each, self._first, not bool(loss.isfinite().all())
                return

    @staticmethod
    def _bad(model, loss):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        tensors = [loss, *model.parameters(), *model.buffers(), *gradients]
        return not all(t.isfinite().all() for t in tensors)
