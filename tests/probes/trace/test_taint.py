"""Ancestry by memory: what a view and an overwrite do to it, and that an address is used again."""

from __future__ import annotations

import math

import torch

from ampdoctor.probes.tensor_memory import NONE, ByMemory, Taint, storage_key, union

ONE, TWO = frozenset({1}), frozenset({2})


def test_a_mark_is_seen_through_every_view():
    taint = Taint()
    base = torch.zeros(4)
    taint.mark(base[1:2], ONE, added=False)
    assert taint.origins(base) == ONE
    assert taint.origins(base.view(2, 2)) == ONE
    assert taint.origins(torch.zeros(4)) == NONE


def test_writing_in_place_adds_and_a_new_result_replaces():
    taint = Taint()
    tensor = torch.zeros(4)
    taint.mark(tensor, ONE, added=False)
    taint.mark(tensor, TWO, added=True)
    assert taint.origins(tensor) == ONE | TWO
    taint.mark(tensor, TWO, added=False)
    assert taint.origins(tensor) == TWO


def test_only_a_result_that_fills_its_memory_cleans_it():
    taint = Taint()
    base = torch.zeros(4)
    for part in (base[:3], base[:1].expand(4), base[:1].expand(99), base[::2]):
        taint.mark(base, ONE, added=False)
        taint.clean(part)
        assert taint.origins(base) == ONE
    taint.clean(base.view(2, 2).t())
    assert taint.origins(base) == NONE


def test_memory_that_is_used_again_is_other_memory():
    keys = {storage_key(torch.zeros(3)) for _ in range(100)}
    keys |= {storage_key(torch.eye(2).to_sparse()) for _ in range(100)}
    assert len(keys) == 200


def test_what_is_known_of_freed_memory_goes():
    known, kept = ByMemory(), [torch.zeros(3) for _ in range(100)]
    for tensor in kept:
        known[storage_key(tensor)] = "kept"
    for _ in range(1000):
        known[storage_key(torch.zeros(3))] = "freed"
    assert len(known) < 400
    assert all(known[storage_key(tensor)] == "kept" for tensor in kept)


def test_sparse_tensors_have_keys():
    sparse = torch.eye(2).to_sparse()
    taint = Taint()
    taint.mark(sparse, ONE, added=False)
    assert taint.origins(sparse) == ONE
    taint.clean(sparse)
    assert taint.origins(sparse) == NONE
    assert taint.shadow(sparse) is None


def test_a_shadow_is_what_would_have_been_there():
    taint = Taint()
    real = torch.tensor([1.0, math.inf, math.inf])
    taint.cast_shadow(real, torch.tensor([5.0, 1e6, math.inf], dtype=torch.float64))
    assert taint.shadow(real).tolist() == [1.0, 1e6, math.inf]
    assert taint.shadow(real[1:]) is None
    taint.cast_shadow(real, torch.tensor([5.0, math.inf, math.nan], dtype=torch.float64))
    assert taint.shadow(real) is None
    taint.clear()
    assert union([ONE, TWO, NONE]) == ONE | TWO
