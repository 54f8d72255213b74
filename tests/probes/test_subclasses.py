"""Tensor subclasses with ops of their own, as torchao's: taken apart, or read by what they dequantise to."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from ampdoctor.numerics.tensors import describe, extremes, is_readable, parts_of
from ampdoctor.precision.spec import as_plain_linears
from ampdoctor.probes.formats_seen import FormatsProbe
from ampdoctor.probes.written_state import OldCastsProbe
from tests.probes.traced import Inline, births_of, session_of, stepped, trace_of

aten = torch.ops.aten


class Quantised(torch.Tensor):
    """As torchao's Float8TrainingTensor: FP8 codes and a scale; refuses whatever is not in its table."""

    @staticmethod
    def __new__(cls, codes, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device, requires_grad=False
        )

    def __init__(self, codes, scale, dtype):
        self._codes, self._scale, self._dtype = codes, scale, dtype

    def __tensor_flatten__(self):
        return ["_codes", "_scale"], {"dtype": self._dtype}

    @staticmethod
    def __tensor_unflatten__(inner, meta, *_):
        return Quantised(inner["_codes"], inner["_scale"], meta["dtype"])

    def to_original_precision(self):
        return self._codes.to(self._dtype) / self._scale.to(self._dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        def apart(value):
            return value.to_original_precision() if isinstance(value, Quantised) else value

        if func in (aten.detach.default, aten.view.default, aten.t.default):
            first, *rest = args
            made = type(first)(func(first._codes, *rest), first._scale, first._dtype)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        if func is aten.mm.default:
            return func(*map(apart, args))
        if func is aten._to_copy.default:
            return func(apart(args[0]), **kwargs)
        raise NotImplementedError(f"attempting to run {func}, this is not supported")


class Hidden(Quantised):
    """As above, but it says nothing of what it consists of."""

    __tensor_flatten__ = None
    to_original_precision = None


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = 448.0 / x.abs().max().float().clamp(min=1e-12)
        return Quantised((x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale, x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.mm(Cast.apply(x).view(x.shape), Cast.apply(weight).t())

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return torch.mm(gradient, weight), torch.mm(gradient.t(), x)


class Float8Linear(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight) + self.bias


Float8Linear.__module__ = "torchao.float8.float8_linear"


def loss(model, x):
    return model(x).float().square().mean()


def inner(values):
    return Quantised(values.to(torch.float8_e4m3fn), torch.tensor(2.0), torch.float32)


def test_a_trace_sees_the_ops_that_a_subclass_consists_of():
    trace, nonfinite = trace_of(Inline(lambda m, x: m.fc(x), fc=Float8Linear(4, 4)), loss, torch.randn(3, 4))
    assert nonfinite.affected == ()
    assert trace.origins == ()
    assert trace.left_out == ()


def test_a_value_that_is_born_behind_one_has_its_place():
    def forward(module, x):
        return torch.log(module.fc(x) - 1e6)

    origins = births_of(Inline(forward, fc=Float8Linear(4, 4)), loss, torch.randn(3, 4))
    assert origins[0].where.op == "aten.log"


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_what_it_dequantises_to_is_read(value):
    tensor = inner(torch.tensor([4.0, value]))
    assert is_readable(tensor)
    assert bool(torch.isfinite(extremes(tensor)[0])) is (value == 1.0)
    assert describe(tensor).finite_max == 2.0
    assert [part.dtype for part in parts_of(tensor)] == [torch.float8_e4m3fn, torch.float32]


def test_one_that_gives_no_numbers_is_not_read():
    tensor = Hidden(torch.ones(2).to(torch.float8_e4m3fn), torch.tensor(1.0), torch.float32)
    assert not is_readable(tensor)


def test_in_the_reference_a_quantised_layer_is_the_linear_layer_that_it_is():
    torch.manual_seed(0)
    layer, other = Float8Linear(64, 8), nn.Linear(64, 8)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 64)
    assert not torch.equal(layer(x), other(x))
    with as_plain_linears(layer.modules()):
        assert torch.equal(layer(x), other(x))
    assert "forward" not in vars(layer)
    assert not torch.equal(layer(x), other(x))


@pytest.mark.parametrize("probe", [OldCastsProbe, FormatsProbe])
def test_one_without_memory_of_its_own_ends_no_search_for_casts(probe):
    def forward(module, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = module.first(x)  # autocast keeps a copy of this weight
            with torch.autocast("cpu", enabled=False):
                return module.second(h.float()) + Cast.apply(h.float()).to(torch.bfloat16)

    model = Inline(forward, first=nn.Linear(4, 4), second=Float8Linear(4, 4))
    session, watching = session_of(model, loss, [torch.randn(3, 4)]), probe()
    stepped(session, watching)
    session.close()
    seen = watching.found if probe is OldCastsProbe else watching.plan.parameters
    assert set(seen) == (set() if probe is OldCastsProbe else {"first.weight", "first.bias"})
