from __future__ import annotations

import torch

from ampdoctor.live.numbers.async_reader import PackedTensors


def test_sections_come_out_as_they_went_in():
    parcel = PackedTensors()
    parcel.add("a", torch.tensor(1.0))
    parcel.add("flag", torch.tensor(3, dtype=torch.int32))
    parcel.add("a", torch.tensor([[2.0, 3.0]]))
    parcel.pack()
    parcel.add("b", torch.tensor([1e-300], dtype=torch.float64))
    parcel.pack()
    opened = parcel.opened(parcel.tensors)
    assert {key: [part.tolist() for part in parts] for key, parts in opened.items()} == {
        "a": [[1.0], [2.0, 3.0]],
        "flag": [[3.0]],
        "b": [[1e-300]],
    }


def test_one_tensor_a_device_and_the_order_is_that_of_adding():
    parcel = PackedTensors()
    parcel.add("scale", torch.empty((), device="meta"))
    parcel.add("norms", torch.tensor([1.0]))
    parcel.add("norms", torch.empty(2, device="meta"))
    parcel.add("norms", torch.tensor([4.0]))
    parcel.pack()
    assert [(t.device.type, t.numel()) for t in parcel.tensors] == [("meta", 3), ("cpu", 2)]
    opened = parcel.opened([torch.tensor([9.0, 2.0, 3.0]), torch.tensor([1.0, 4.0])])
    assert [part.tolist() for part in opened["norms"]] == [[1.0], [2.0, 3.0], [4.0]]


def test_what_was_packed_may_be_written_to():
    scale, parcel = torch.tensor([8.0]), PackedTensors()
    parcel.add("scale", scale)
    parcel.pack()
    scale.fill_(4.0)
    assert parcel.tensors[0].tolist() == [8.0]
