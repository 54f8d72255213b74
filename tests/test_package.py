"""The front door: what `import ampdoctor` offers."""

from __future__ import annotations

import importlib

import pytest

import ampdoctor


def test_every_public_name_is_listed():
    assert set(ampdoctor.__all__) <= set(dir(ampdoctor))
    assert isinstance(ampdoctor.__version__, str)


@pytest.mark.parametrize("name", sorted(ampdoctor._HOME))
def test_every_public_name_is_what_its_home_defines(name):
    home = importlib.import_module(ampdoctor._HOME[name])
    assert getattr(ampdoctor, name) is getattr(home, name)
