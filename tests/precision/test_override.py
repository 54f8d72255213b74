import pytest
import torch

from ampdoctor.precision.dtype_overrides import AutocastOverride


def product():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize(
    ("wanted", "computed"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (None, torch.float32)]
)
def test_a_region_that_names_its_own_dtype_is_overridden(wanted, computed):
    with AutocastOverride(wanted), torch.autocast("cpu", dtype=torch.float16):
        assert product() is computed


def test_a_decorator_and_an_object_made_earlier_are_overridden():
    region = torch.autocast("cpu", dtype=torch.float16)
    decorated = region(product)
    with AutocastOverride(torch.bfloat16):
        assert decorated() is torch.bfloat16
        with region:
            assert product() is torch.bfloat16
    assert decorated() is torch.float16


def test_it_is_undone_after_an_exception():
    enter = torch.autocast.__enter__
    with pytest.raises(ValueError, match="x"), AutocastOverride(None):
        raise ValueError("x")
    assert torch.autocast.__enter__ is enter
    with torch.autocast("cpu", dtype=torch.float16):
        assert product() is torch.float16
