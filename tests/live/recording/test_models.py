from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from ampdoctor.hooks.callbacks import UncopiedHooks
from ampdoctor.live.recording.models import OutermostModels


class Heard:
    """Notes the calls: the model's class and whether it returned."""

    def __init__(self):
        self.calls = []

    def entered(self, module):
        pass

    def left(self, module, _args, _kwargs, output):
        self.calls.append((type(module).__name__, output is not None))


class Stops(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x, *, stop):
        if stop:
            raise StopIteration
        return self.inner(x)


def test_a_forward_that_raises_is_left_without_a_warning():
    heard, model = Heard(), Stops()
    with warnings.catch_warnings(), OutermostModels(heard).watching():
        warnings.simplefilter("error")
        with pytest.raises(StopIteration):
            model(torch.zeros(1, 2), stop=True)
        model(torch.zeros(1, 2), stop=False)
    assert heard.calls == [("Stops", False), ("Stops", True)]


def called_by_hook(model, *watched):
    """The classes that a watch is told of while `model` and those watched run under it."""
    heard = Heard()
    models = OutermostModels(heard)
    with models.watching():
        for one in watched:
            one(torch.zeros(1, 2))
        models.settle()  # from here on known models alone are told of
        heard.calls.clear()
        model()(torch.zeros(1, 2))
    return heard.calls


class CopiesItself(nn.Linear):
    def __deepcopy__(self, memo):
        other = CopiesItself(2, 2)
        other.__dict__.update(copy.deepcopy(vars(self), memo))
        return other


class KeepsState(nn.Linear):
    def __getstate__(self):
        return {**vars(self), "kept": True}


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


@pytest.mark.parametrize("kind", [nn.Linear, CopiesItself, KeepsState])
@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_a_watched_model_is_not_watched(kind, again):
    model = kind(2, 2)
    assert called_by_hook(lambda: model, model) == [(kind.__name__, True)]
    assert called_by_hook(lambda: again(model), model) == []


@pytest.mark.parametrize("kind", [nn.Linear, KeepsState])
def test_a_model_that_is_saved_under_watch_is_saved_as_it_is_bare(kind):
    model = nn.Sequential(kind(2, 2), kind(2, 2))
    own = model[0].register_forward_hook(functools.partial(print, end=""))
    bare = saved(model)
    models = OutermostModels(Heard())
    with models.watching():
        for one in (model, model[1]):
            one(torch.zeros(1, 2))
        assert len(model._forward_hooks) == 1
        assert saved(model) == bare
        assert [len(one._forward_hooks) for one in copy.deepcopy(model)] == [1, 0]
    assert saved(model) == bare
    own.remove()


class Lends(nn.Module):
    """Has its wrapper call a part of the loop, as Lightning does; `given` calls the module itself, or parts of it."""

    def __init__(self, wrap):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        object.__setattr__(self, "wrapper", wrap(self))

    def forward(self, x):
        return self.second(self.first(x))

    def step(self, given, x):
        own = self.forward

        def redirected(x):
            self.forward = own
            return given(x)

        self.forward = redirected
        return self.wrapper(x)


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


torchs = type("DistributedDataParallel", (Wrapper,), {"__module__": "torch.nn.parallel.distributed"})
"""As torch's wrapper is known: by its name; a real one needs a process group."""


@pytest.mark.parametrize("settled", [False, True])
def test_what_a_wrapper_calls_in_place_of_a_forward_is_a_part_of_the_loop(settled):
    heard, model = Heard(), Lends(torchs)
    models = OutermostModels(heard)
    with models.watching():
        model.step(model, torch.zeros(1, 2))
        if settled:
            models.settle()  # the wrapper is not known
        model.step(lambda x: model(x).sum(), torch.zeros(1, 2))
    assert heard.calls == [("Lends", True), ("Lends", True)]


def test_a_wrapped_model_with_a_decorated_forward_is_one_call():
    heard, model = Heard(), nn.Sequential(nn.Linear(2, 2))
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    with OutermostModels(heard).watching():
        torchs(model)(torch.zeros(1, 2))
    assert heard.calls == [("DistributedDataParallel", True)]


def ones(_module, _args, output):
    return output


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 2))])
def test_a_watched_model_is_compiled_by_torch_jit_as_it_is_bare(compiled):
    """A script that trains exports its model at the end."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    models = OutermostModels(Heard())
    with models.watching():
        model(torch.ones(1, 2))
        inner = UncopiedHooks()
        inner.add(model[0], model[0].register_forward_hook(ones))
        hooks = [list(part._forward_hooks.values()) for part in model.modules()]
        exported = compiled(model)
        assert [list(part._forward_hooks.values()) for part in model.modules()] == hooks
        assert sum(map(len, hooks)) == 2
        inner.remove()
    assert torch.equal(exported(torch.ones(1, 2)), model(torch.ones(1, 2)))
