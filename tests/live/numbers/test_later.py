from __future__ import annotations

import torch

from ampdoctor.live.numbers.async_reader import AsyncReader


class Device:
    """A device that is done with a copy when it is told so, and notes who waits."""

    def __init__(self):
        self.copies = []
        self.waits = 0

    def send(self, tensor, buffer):
        buffer = torch.zeros(tensor.shape) if buffer is None else buffer
        copy = Copy(self, buffer)
        self.copies.append(copy)
        return buffer, copy


class Copy:
    def __init__(self, device, buffer):
        self.device, self.buffer, self.done = device, buffer, False

    def finish(self, value):
        self.buffer.fill_(value)
        self.done = True

    def query(self):
        return self.done

    def synchronize(self):
        self.device.waits += 1
        self.finish(-1.0)


def on_device(size=2):
    return torch.empty(size, device="meta")


def told(readings):
    return [(tag, [values.tolist() for values in parts]) for tag, parts in readings]


def test_readings_arrive_in_their_order_and_nobody_waits():
    device = Device()
    later = AsyncReader(device.send)
    later.put("a", [on_device(), torch.tensor([7.0])])
    later.put("b", [on_device()])
    device.copies[1].finish(2.0)
    assert told(later.ready()) == []
    device.copies[0].finish(1.0)
    assert told(later.ready()) == [("a", [[1.0, 1.0], [7.0]]), ("b", [[2.0, 2.0]])]
    assert device.waits == 0


def test_buffers_are_used_again_but_not_while_they_are_read():
    device = Device()
    later = AsyncReader(device.send)
    later.put("a", [on_device()])
    device.copies[0].finish(1.0)
    for _, (values,) in later.ready():
        later.put("b", [on_device()])
        assert device.copies[1].buffer is not values
    later.put("c", [on_device()])
    assert device.copies[2].buffer is device.copies[0].buffer
    later.put("d", [on_device(3)])
    assert device.copies[3].buffer.shape == (3,)


def test_a_device_that_lags_behind_loses_readings_and_holds_nobody_up():
    device = Device()
    later = AsyncReader(device.send, ahead=2)
    assert [later.put(tag, [on_device()]) for tag in "abc"] == [True, True, False]
    assert (later.lost, len(device.copies), device.waits) == (1, 2, 0)
